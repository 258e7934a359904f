"""The read model in SQL: the log is folded into it, and its checkpoint is part of the same transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

from sqlalchemy import Connection, Engine, StaticPool, bindparam, create_engine, event, func, select
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.orm import InstrumentedAttribute, Session

from stoker_chassis.eventlog import START, Position
from stoker_proto import Cluster, ClusterConfigured, NodeJoined, Recorded
from stoker_proto.jobs import JobEvent
from stoker_proto.nodes import NodeEvent, PreflightFailed, PreflightPassed, PreflightStarted

from .configuration import Names
from .fit import Machine
from .tables import Base, CheckpointRow, ClusterRow, JobRow, NodeRow
from .views import JobView, NodeView, evolve_job, evolve_node, freed, hold, holders

SCHEMA = 4  # raise it when a view changes its shape: the model is then rebuilt from the log
UNFINISHED = ("queued", "active")


def open_engine(path: Path | None) -> Engine:
    """SQLite in a file with a write-ahead log, or in memory."""
    if path is None:
        return create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    path.parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(f"sqlite:///{path}")

    @event.listens_for(engine, "connect")
    def _tune(connection: object, _: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute("PRAGMA busy_timeout=5000")
        cursor.close()

    return engine


class Views:
    """Reads and folds. One fold writes; waiting readers are woken after each commit."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._folded = asyncio.Condition()
        self._inventory: list[Machine] | None = None
        self._cluster: tuple[int, Cluster] | None = None
        self.seq = 0
        Base.metadata.create_all(engine)

    def position(self) -> Position:
        """Where to go on reading the log."""
        with Session(self._engine) as session:
            row = session.get(CheckpointRow, 1)
            at = Position(row.seq, row.event_id) if row and row.schema == SCHEMA else None
        if at is None:
            self.clear()
            return START
        self.seq = at.seq
        return at

    def clear(self) -> None:
        """Forget everything, the tables' old shape included; the log has it all."""
        Base.metadata.drop_all(self._engine)
        Base.metadata.create_all(self._engine)
        self.seq, self._inventory, self._cluster = 0, None, None

    def fold(self, burst: Sequence[Recorded]) -> None:
        """Fold events in order, in one transaction with the checkpoint."""
        with self._engine.begin() as connection:
            fold = _Fold(connection)
            for recorded in burst:
                fold.one(recorded)
            fold.write()
            last = burst[-1]
            values = {"one": 1, "seq": last.seq, "event_id": last.envelope.id, "schema": SCHEMA}
            connection.execute(PUT_CHECKPOINT, values)
        if any(isinstance(r.event, NodeJoined) for r in burst):
            self._inventory = None
        if any(isinstance(r.event, ClusterConfigured) for r in burst):
            self._cluster = None

    async def announce(self, seq: int) -> None:
        async with self._folded:
            self.seq = seq
            self._folded.notify_all()

    async def reached(self, seq: int, seconds: float) -> bool:
        """Wait until the log is folded in up to `seq`."""
        try:
            async with asyncio.timeout(seconds), self._folded:
                await self._folded.wait_for(lambda: self.seq >= seq)
        except TimeoutError:
            return False
        return True

    async def change(self, after: int, seconds: float) -> bool:
        """Wait until anything was folded in after `after`."""
        return await self.reached(after + 1, seconds)

    def job(self, job_id: str) -> JobView | None:
        with self._engine.connect() as connection:
            stored = connection.scalar(GET_JOB, {"key": job_id})
        return JobView.model_validate_json(stored) if stored else None

    def jobs(
        self, states: Sequence[str], limit: int, before: int | None, array_id: str | None = None
    ) -> list[tuple[int, JobView]]:
        """Newest first, as (place, view); `before` is the place after which to go on."""
        query = select(JobRow).order_by(JobRow.submitted_seq.desc()).limit(limit)
        if states:
            query = query.where(JobRow.state.in_(states))
        if array_id is not None:
            query = query.where(JobRow.array_id == array_id)
        if before is not None:
            query = query.where(JobRow.submitted_seq < before)
        with Session(self._engine) as session:
            rows = session.scalars(query).all()
            return [(r.submitted_seq, JobView.model_validate_json(r.view)) for r in rows]

    def nodes(self) -> list[NodeView]:
        with Session(self._engine) as session:
            rows = session.scalars(select(NodeRow).order_by(NodeRow.name)).all()
            return [NodeView.model_validate_json(r.view) for r in rows]

    def known(self, job_ids: Collection[str]) -> set[str]:
        """Those of these jobs that there are."""
        if not job_ids:
            return set()
        with self._engine.connect() as connection:
            return set(connection.scalars(select(JobRow.id).where(JobRow.id.in_(job_ids))))

    def has_array(self, array_id: str) -> bool:
        with self._engine.connect() as connection:
            return connection.scalar(GET_ARRAY, {"key": array_id}) is not None

    def array(self, array_id: str) -> list[str]:
        """The ids of an array's jobs, in the order in which they were accepted."""
        with self._engine.connect() as connection:
            return list(connection.scalars(GET_ARRAY, {"key": array_id}))

    def inventory(self) -> list[Machine]:
        """What each node that ever joined has: asked at each submission, so kept at hand."""
        if self._inventory is None:
            self._inventory = [Machine(n.gpus, n.cpus, n.memory_bytes, n.node, n.labels) for n in self.nodes()]
        return self._inventory

    def cluster(self) -> tuple[int, Cluster]:
        """The configuration in force and its version: asked at each submission, so kept at hand."""
        if self._cluster is None:
            with Session(self._engine) as session:
                row = session.get(ClusterRow, 1)
                self._cluster = (row.version, Cluster.model_validate_json(row.cluster)) if row else (0, Cluster())
        return self._cluster

    def in_use(self) -> Names:
        """The queues, classes and windows that unfinished jobs name."""

        def by(column: InstrumentedAttribute[str] | InstrumentedAttribute[str | None]) -> dict[str, tuple[str, int]]:
            query = select(column, func.min(JobRow.id), func.count()).group_by(column)
            rows = connection.execute(query.where(JobRow.state.in_(UNFINISHED), column.is_not(None)))
            return {str(name): (first, count) for name, first, count in rows}

        with self._engine.connect() as connection:
            return Names(by(JobRow.queue), by(JobRow.priority_class), by(JobRow.window))

    def node(self, name: str) -> NodeView | None:
        with Session(self._engine) as session:
            row = session.get(NodeRow, name)
            return NodeView.model_validate_json(row.view) if row else None


def _put(table: type[Base], key: str) -> Insert:
    """Insert a row or replace the one with its key."""
    statement = insert(table)
    others = {c.name: statement.excluded[c.name] for c in table.__table__.columns if c.name != key}
    return statement.on_conflict_do_update(index_elements=[key], set_=others)


PUT_JOB, PUT_NODE = _put(JobRow, "id"), _put(NodeRow, "name")
PUT_CLUSTER, PUT_CHECKPOINT = _put(ClusterRow, "one"), _put(CheckpointRow, "one")
GET_JOB = select(JobRow.view).where(JobRow.id == bindparam("key"))
GET_ARRAY = select(JobRow.id).where(JobRow.array_id == bindparam("key")).order_by(JobRow.submitted_seq)
GET_NODE = select(NodeRow.view).where(NodeRow.name == bindparam("key"))


class _Fold:
    """One burst: each view is read and written once, however many of the events change it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._jobs: dict[str, tuple[JobView | None, JobView | None]] = {}  # as it was stored, as it is now
        self._nodes: dict[str, tuple[NodeView | None, NodeView | None]] = {}
        self._cluster: ClusterConfigured | None = None

    def _job(self, job_id: str) -> JobView | None:
        if job_id not in self._jobs:
            stored = self._connection.scalar(GET_JOB, {"key": job_id})
            view = JobView.model_validate_json(stored) if stored else None
            self._jobs[job_id] = (view, view)
        return self._jobs[job_id][1]

    def _node(self, name: str) -> NodeView | None:
        if name not in self._nodes:
            stored = self._connection.scalar(GET_NODE, {"key": name})
            view = NodeView.model_validate_json(stored) if stored else None
            self._nodes[name] = (view, view)
        return self._nodes[name][1]

    def one(self, recorded: Recorded) -> None:
        event = recorded.event
        if isinstance(event, ClusterConfigured):
            self._cluster = event
        job: JobView | None = None
        if isinstance(event, JobEvent | PreflightPassed | PreflightFailed | PreflightStarted):
            job = evolve_job(self._job(event.job_id), recorded)
            self._jobs[event.job_id] = (self._jobs[event.job_id][0], job)
        if isinstance(event, NodeEvent):
            self._set_node(event.node, evolve_node(self._node(event.node), recorded))
        for name, holder in holders(recorded).items():
            self._set_node(name, hold(self._node(name), add=holder))
        gone = freed(recorded)
        if gone is not None:
            of_attempts = {n for a in (job.attempts if job else ()) for n in a.nodes}
            for name in [gone[0]] if gone[0] else of_attempts:
                self._set_node(name, hold(self._node(name), drop=gone[1]))

    def _set_node(self, name: str, view: NodeView | None) -> None:
        self._nodes[name] = (self._nodes[name][0], view)

    def write(self) -> None:
        jobs = [_row(job) for stored, job in self._jobs.values() if job is not None and job is not stored]
        nodes = [
            {"name": name, "view": node.model_dump_json()}
            for name, (stored, node) in self._nodes.items()
            if node is not None and node is not stored
        ]
        if jobs:
            self._connection.execute(PUT_JOB, jobs)
        if nodes:
            self._connection.execute(PUT_NODE, nodes)
        if self._cluster:
            told = {"one": 1, "version": self._cluster.version, "cluster": self._cluster.cluster.model_dump_json()}
            self._connection.execute(PUT_CLUSTER, told)


def _row(job: JobView) -> dict[str, object]:
    return {
        "id": job.job_id, "submitted_seq": job.submitted_seq, "state": job.state, "queue": job.queue,
        "priority_class": job.spec.compute.priority_class, "window": job.spec.schedule.window,
        "array_id": job.array_id, "view": job.model_dump_json(),
    }  # fmt: skip
