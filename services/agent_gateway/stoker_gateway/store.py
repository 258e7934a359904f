"""The read model in SQL: the log is folded into it, and its checkpoint is part of the same transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Engine, create_engine, delete, event, func, select
from sqlalchemy.orm import Session

from stoker_chassis.eventlog import START, Position
from stoker_proto import Recorded
from stoker_proto.jobs import JobEvent
from stoker_proto.nodes import NodeEvent, PreflightFailed, PreflightPassed, PreflightStarted

from .tables import Base, CheckpointRow, JobRow, NodeRow
from .views import JobView, NodeView, evolve_job, evolve_node, freed, held_nodes

SCHEMA = 1  # raise it when a view changes its shape: the model is then rebuilt from the log


def open_engine(path: Path | None) -> Engine:
    """SQLite in a file with a write-ahead log, or in memory."""
    if path is None:
        from sqlalchemy.pool import StaticPool

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
        self.seq = 0
        Base.metadata.create_all(engine)

    def position(self) -> Position:
        """Where to go on reading the log."""
        with Session(self._engine) as session:
            row = session.get(CheckpointRow, 1)
            if row is None or row.schema != SCHEMA:
                return START
            self.seq = row.seq
            return Position(row.seq, row.event_id)

    def clear(self) -> None:
        """Forget everything; the log has it all."""
        with Session(self._engine) as session, session.begin():
            for table in (JobRow, NodeRow, CheckpointRow):
                session.execute(delete(table))
        self.seq = 0

    def fold(self, burst: Sequence[Recorded]) -> None:
        """Fold events in order, in one transaction with the checkpoint."""
        with Session(self._engine) as session, session.begin():
            for recorded in burst:
                _fold_one(session, recorded)
            last = burst[-1]
            row = CheckpointRow(one=1, seq=last.seq, event_id=last.envelope.id, schema=SCHEMA)
            session.merge(row)

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
        with Session(self._engine) as session:
            row = session.get(JobRow, job_id)
            return JobView.model_validate_json(row.view) if row else None

    def jobs(self, states: Sequence[str], limit: int, before: int | None) -> list[tuple[int, JobView]]:
        """Newest first, as (place, view); `before` is the place after which to go on."""
        query = select(JobRow).order_by(JobRow.submitted_seq.desc()).limit(limit)
        if states:
            query = query.where(JobRow.state.in_(states))
        if before is not None:
            query = query.where(JobRow.submitted_seq < before)
        with Session(self._engine) as session:
            rows = session.scalars(query).all()
            return [(r.submitted_seq, JobView.model_validate_json(r.view)) for r in rows]

    def count(self) -> int:
        with Session(self._engine) as session:
            return session.scalar(select(func.count()).select_from(JobRow)) or 0

    def nodes(self) -> list[NodeView]:
        with Session(self._engine) as session:
            rows = session.scalars(select(NodeRow).order_by(NodeRow.name)).all()
            return [NodeView.model_validate_json(r.view) for r in rows]

    def node(self, name: str) -> NodeView | None:
        with Session(self._engine) as session:
            row = session.get(NodeRow, name)
            return NodeView.model_validate_json(row.view) if row else None


def _fold_one(session: Session, recorded: Recorded) -> None:
    event = recorded.event
    view: JobView | None = None
    if isinstance(event, JobEvent | PreflightPassed | PreflightFailed | PreflightStarted):
        view = _fold_job(session, event.job_id, recorded)
    if isinstance(event, NodeEvent):
        _fold_node(session, event.node, recorded)
    for node, holder in held_nodes(recorded).items():
        _hold(session, node, add=holder)
    gone = freed(recorded)
    if gone is not None:
        of_attempt = (n for a in (view.attempts if view else ()) for n in a.nodes)
        for name in {gone[0]} if gone[0] else set(of_attempt):
            _hold(session, name, drop=gone[1])


def _fold_job(session: Session, job_id: str, recorded: Recorded) -> JobView | None:
    row = session.get(JobRow, job_id)
    before = JobView.model_validate_json(row.view) if row else None
    after = evolve_job(before, recorded)
    if after is not None and after is not before:
        if row is None:
            row = JobRow(id=job_id, submitted_seq=recorded.seq)
            session.add(row)
        row.state, row.experiment, row.view = after.state, after.experiment_name, after.model_dump_json()
    return after


def _fold_node(session: Session, name: str, recorded: Recorded) -> None:
    row = session.get(NodeRow, name)
    before = NodeView.model_validate_json(row.view) if row else None
    after = evolve_node(before, recorded)
    if after is None or after is before:
        return
    if row is None:
        row = NodeRow(name=name)
        session.add(row)
    row.view = after.model_dump_json()


def _hold(session: Session, name: str, *, add: str | None = None, drop: str | None = None) -> None:
    row = session.get(NodeRow, name)
    if row is None:
        return
    view = NodeView.model_validate_json(row.view)
    holds = tuple(h for h in view.holds if h != drop) + ((add,) if add else ())
    if holds != view.holds:
        row.view = view.model_copy(update={"holds": holds}).model_dump_json()
