"""A simulated cluster around the scheduler's core: decisions land in order, and what they order comes true."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from stoker_proto import (
    Action,
    Allocation,
    AttemptExited,
    AttemptReleased,
    AttemptStarted,
    CheckpointSaved,
    DecisionBatch,
    Event,
    Gpu,
    JobSpec,
    JobSubmitted,
    LogsSealed,
    NodeJoined,
    NodeReady,
    Place,
    RankExit,
    Recorded,
    SelfTested,
)
from stoker_scheduler.announce import announcements
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.state import State

GIB = 1 << 30
DONE = (RankExit(rank=0, code=0),)


def job_spec(gpus: int = 1, nodes: int = 1, model: str = "ANY", minutes: float | None = None, **more: Any) -> JobSpec:
    """A job of so many GPUs on each of so many nodes; more fields of `compute` by their names."""
    compute = {"accelerator_type": f"GPU_{gpus}x{model}", "num_accelerators": gpus * nodes} | more
    limits = {} if minutes is None else {"timeout_minutes": minutes}
    body = {"experiment_name": "bench", "compute": compute, "command": "true", "limits": limits}
    return JobSpec.model_validate(body)


def joining(name: str, model: str, gpus: int, labels: dict[str, str]) -> tuple[Event, ...]:
    """What a node tells when it comes, until it takes work."""
    found = tuple(Gpu(uuid=f"{name}-{i}", index=i, model=model, name=model, memory_bytes=80 * GIB) for i in range(gpus))
    return (
        NodeJoined(
            node=name, boot_epoch="b", gpus=found, cpus=128, memory_bytes=1024 * GIB, labels=labels, simulated=True
        ),
        SelfTested(node=name, boot_epoch="b", cause="joined", passed=True, results=()),
        NodeReady(node=name, boot_epoch="b", rule="self-test", reason="passed"),
    )  # fmt: skip


class World:
    """The scheduler, its log's clock, and launchers that obey at once."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(Timing())
        self.at_ms = 1_000_000
        self.events = 0
        self._filled = 0

    @property
    def state(self) -> State:
        return self.scheduler.state

    def fold(self, event: Event) -> None:
        self.events += 1
        self.scheduler.evolve(Recorded(self.events, self.at_ms, b"", event))

    def submit(self, job_id: str, spec: JobSpec) -> None:
        self.fold(JobSubmitted(job_id=job_id, spec=spec, spec_hash="0"))

    def join(self, name: str, model: str = "SIM", gpus: int = 8, **labels: str) -> None:
        for event in joining(name, model, gpus, labels):
            self.fold(event)

    def land(self, actions: Iterable[Action]) -> None:
        """A decision arrives: it is announced, and what it placed starts."""
        actions = tuple(actions)
        self.fold(DecisionBatch(based_on_seq=self.state.seq, actions=actions))
        for _, event in announcements(self.state):
            self.fold(event)
        for action in actions:
            if isinstance(action, Place):
                self.start(action.job_id)

    def start(self, job_id: str) -> None:
        for told in self._parts(job_id):
            self.fold(AttemptStarted.model_validate(told | {"ranks": (0,)}))

    def save(self, job_id: str) -> None:
        attempt = self.state.jobs[job_id].attempt
        assert attempt is not None
        self.fold(CheckpointSaved(job_id=job_id, attempt=attempt.number, step=1, path="/", bytes=1))

    def end(self, job_id: str) -> None:
        """All of it exits, by itself or as asked, frees its GPUs and seals its logs."""
        attempt = self.state.jobs[job_id].attempt
        assert attempt is not None
        outcome = "ok" if attempt.stop is None else "preempted"
        for told in self._parts(job_id):
            self.fold(AttemptExited.model_validate(told | {"outcome": outcome, "asked": attempt.stop, "ranks": DONE}))
            self.fold(AttemptReleased.model_validate(told | {"proof": "gone"}))
            self.fold(LogsSealed.model_validate(told | {"streams": ()}))

    def _parts(self, job_id: str) -> list[dict[str, Any]]:
        attempt = self.state.jobs[job_id].attempt
        if attempt is None:
            return []
        told = {"job_id": job_id, "attempt": attempt.number, "fence": attempt.fence}
        return [told | {"node": part.allocation.node} for part in attempt.parts if part.released_ms is None]

    def stopping(self) -> list[str]:
        """Jobs that were told to stop and have not stopped."""
        found = []
        for job_id in self.state.active:
            attempt = self.state.jobs[job_id].attempt
            if attempt is not None and attempt.stop is not None and not attempt.released:
                found.append(job_id)
        return found

    def fill(self, names: list[str], rng: random.Random, specs: list[JobSpec]) -> None:
        """Let running jobs hold every GPU of these nodes, without a scheduler that would have to find them."""
        at, free, actions = 0, 8, []
        sizes = [(s, s.compute.per_node, s.compute.nodes) for s in specs]
        while at < len(names):
            room = len(names) - at
            fitting = [s for s, gpus, nodes in sizes if gpus <= free and nodes <= room and (nodes == 1 or free == 8)]
            spec = rng.choice(fitting)
            job_id = f"run-{self._filled:06d}"
            self._filled += 1
            taken = []
            for rank in range(spec.compute.nodes):
                name = names[at + rank]
                gpus = tuple(f"{name}-{8 - free + i}" for i in range(spec.compute.per_node))
                taken.append(Allocation(node=name, boot_epoch="b", gpus=gpus, node_rank=rank))
            self.submit(job_id, spec)
            actions.append(Place(job_id=job_id, attempt=1, allocations=tuple(taken), preflight="fresh"))
            free -= spec.compute.per_node
            if not free or spec.compute.nodes > 1:
                at, free = at + spec.compute.nodes, 8
        for first in range(0, len(actions), 400):
            self.land(actions[first : first + 400])
