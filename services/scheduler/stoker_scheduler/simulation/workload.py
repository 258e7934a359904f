"""What a simulation is about: jobs with their arrivals and true durations, nodes, and what people did meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stoker_proto import Cluster, ClusterConfigured, Event, Gpu, JobSpec, NodeJoined, NodeReady

START_MS = 1_767_571_200_000  # traces tell no date: their time 0 is a Monday's midnight, 2026-01-05 UTC
MS_IN_MINUTE = 60_000
MIB = 1 << 20
EPOCH = "boot-1"


class Work(NamedTuple):
    """A job as it will really go: when it comes, and how long it takes when nothing disturbs it.

    `launch_ms` lies between its placement and its start, `release_ms` between its exit and its GPUs being free.
    """

    job_id: str
    at_ms: int
    spec: JobSpec
    duration_ms: int
    launch_ms: int = 0
    release_ms: int = 0
    array_id: str | None = None
    array_index: int | None = None


class Happening(NamedTuple):
    """An event from outside the simulation: a node that joins or fails, a configuration, a wish of somebody.

    With `breaks` all that runs on the node of the event is gone, and nobody there will say so.
    """

    at_ms: int
    event: Event
    breaks: bool = False


class Kind(NamedTuple):
    """Nodes of one make."""

    name: str
    gpus: int
    model: str
    cpus: int
    memory_bytes: int


@dataclass(frozen=True)
class Workload:
    """All that comes from outside, in order of time; `notes` say what of the input was left out, and why."""

    works: tuple[Work, ...]
    happenings: tuple[Happening, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def start_ms(self) -> int:
        return min([work.at_ms for work in self.works] + [told.at_ms for told in self.happenings], default=START_MS)

    def plus(self, happenings: tuple[Happening, ...]) -> Workload:
        """The same jobs, with these things happening too; at one instant, these first."""
        merged = sorted((*happenings, *self.happenings), key=lambda told: told.at_ms)
        return Workload(self.works, tuple(merged), self.notes)


def gpus_of(kind: Kind) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(uuid=f"{kind.name}-gpu-{index}", index=index, model=kind.model, name=kind.model, memory_bytes=0)
        for index in range(kind.gpus)
    )


def joining(kinds: list[Kind], at_ms: int) -> tuple[Happening, ...]:
    """The nodes join and are ready."""
    told = []
    for kind in kinds:
        joined = NodeJoined(
            node=kind.name, boot_epoch=EPOCH, gpus=gpus_of(kind), cpus=kind.cpus, memory_bytes=kind.memory_bytes,
            simulated=True,
        )  # fmt: skip
        ready = NodeReady(node=kind.name, boot_epoch=EPOCH, rule="simulated", reason="simulated nodes are healthy")
        told += [Happening(at_ms, joined), Happening(at_ms, ready)]
    return tuple(told)


def alike(count: int, gpus: int, model: str) -> list[Kind]:
    """So many nodes of one kind, with cores and memory for whatever is asked."""
    digits = len(str(count))
    return [Kind(f"node-{n:0{digits}}", gpus, model, 4096, 1 << 46) for n in range(1, count + 1)]


def configured(cluster: Cluster, at_ms: int) -> Happening:
    return Happening(at_ms, ClusterConfigured(version=1, cluster=cluster, reason="simulated"))


def with_limits(work: Work) -> Work:
    """The same job, with its true duration as its time limit."""
    # A limit is a float of minutes: half a millisecond more keeps it from being cut off below the duration.
    return _limited(work, (work.duration_ms + 0.5) / MS_IN_MINUTE)


def without_limits(work: Work) -> Work:
    """The same job; nobody says how long it takes."""
    return _limited(work, None)


def _limited(work: Work, minutes: float | None) -> Work:
    limits = work.spec.limits.model_copy(update={"timeout_minutes": minutes})
    return work._replace(spec=work.spec.model_copy(update={"limits": limits}))
