"""How the cluster is shared: queues, priority classes, windows and the numbers that the scheduler goes by.

The whole configuration is one versioned event, so a change is all or nothing and every version can be read back.
Queues form a tree. A queue's `nominal` is what it is guaranteed, `limit` what it may never exceed, and `lend` how much
of an unused nominal the others may borrow; borrowed GPUs are given back by preemption. Without a nominal a queue is
never above it, so it borrows nothing and nothing is taken back from it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from . import subjects
from .envelope import Event
from .spec import Label, Model, Name, Strict

Gpus = Annotated[float, Field(ge=0, le=10_000_000, description="GPUs; thousandths are allowed")]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
Clock = Annotated[str, StringConstraints(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$")]
Zone = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$")]


class Quota(Strict):
    """What a queue may hold, in GPUs."""

    nominal: Gpus | None = Field(None, description="guaranteed; none: no guarantee and nothing counts as borrowed")
    limit: Gpus | None = Field(None, description="never more than this")
    lend: Gpus | None = Field(None, description="how much of an unused nominal others may borrow; none: all of it")

    @model_validator(mode="after")
    def _ordered(self) -> Quota:
        if self.limit is not None and self.nominal is not None and self.limit < self.nominal:
            raise ValueError(f"limit {self.limit:g} is below nominal {self.nominal:g}")
        if self.lend is not None and self.nominal is None:
            raise ValueError("lend needs a nominal to lend from")
        if self.lend is not None and self.nominal is not None and self.lend > self.nominal:
            raise ValueError(f"lend {self.lend:g} is more than nominal {self.nominal:g}")
        return self


class Queue(Strict):
    """One place to wait in, and its share of the GPUs."""

    name: Name
    parent: Name | None = None
    weight: int = Field(1, ge=1, le=1_000_000, description="its part of what is left, beside its siblings")
    gpus: Quota = Field(Quota(), description="over all models together")
    models: dict[Model, Quota] = Field(default_factory=dict, description="for one GPU model alone")
    window: Name | None = Field(None, description="its jobs start only while this window is open")
    max_wait_minutes: float | None = Field(
        None, gt=0, description="a job that has waited so long goes first and is not overtaken inside its queue"
    )
    min_run_minutes: float | None = Field(
        None, ge=0, description="its jobs are not preempted before; none: as in scheduling"
    )


class PriorityClass(Strict):
    """What a class of jobs may do to others, and they to it."""

    name: Name
    value: int = Field(ge=-1_000_000, le=1_000_000, description="a higher number goes first")
    preemptible: bool = True
    grace_seconds: float | None = Field(
        None, ge=0, le=3600, description="from the checkpoint signal to SIGKILL, at most; none: the job's own"
    )
    may_borrow: bool = True


class Window(Strict):
    """A stretch of the week on somebody's wall clock. An end at or before the start is on the next day."""

    name: Name
    zone: Zone = Field(description="IANA time zone, such as Europe/Berlin")
    days: tuple[Day, ...] = Field(min_length=1, description="on which it opens")
    start: Clock = Field(description="HH:MM")
    end: Clock = Field(description="HH:MM; 00:00 is midnight, the end of the day")
    on_close: Literal["preempt", "finish"] = Field("preempt", description="what becomes of jobs still running")


class Scheduling(Strict):
    """The numbers that decisions go by."""

    min_run_minutes: float = Field(1, ge=0, description="an attempt is not preempted before it has run so long")
    first_checkpoint_minutes: float = Field(
        10, ge=0, description="nor, when it keeps checkpoints, before its first one, up to this long"
    )
    max_preemptions: int = Field(3, ge=1, le=1000, description="then the job is boosted and not preempted again")
    preempt_after_seconds: float = Field(0, ge=0, description="wait so long for natural ends before preempting")
    preemptions_per_minute: int = Field(600, ge=1, description="in the whole cluster")
    reservations: int = Field(8, ge=0, le=1000, description="blocked gangs of a GPU model that have GPUs kept for them")
    reserve_after_seconds: float = Field(0, ge=0, description="a gang that has waited so long gets a reservation")
    half_life_hours: float = Field(24, gt=0, le=8760, description="in which past usage loses half its weight")
    shortest_charge_seconds: float = Field(60, ge=0, description="what the shortest job counts in past usage")


DEFAULT_QUEUE = Queue(name="default")
DEFAULT_CLASSES = (
    PriorityClass(name="BEST_EFFORT", value=0),
    PriorityClass(name="NORMAL", value=100),
    PriorityClass(name="CRITICAL", value=200, preemptible=False),
)


class Cluster(Strict):
    """The whole configuration, as `stoker apply -f cluster.yaml` takes it."""

    apiVersion: Literal["v1"] = "v1"
    queues: tuple[Queue, ...] = (DEFAULT_QUEUE,)
    classes: tuple[PriorityClass, ...] = DEFAULT_CLASSES
    windows: tuple[Window, ...] = ()
    topology: tuple[Label, ...] = Field(
        ("rack", "rail"), description="node labels from the widest domain to the narrowest; a gang packs into one"
    )
    labels: dict[str, dict[Label, str]] = Field(
        default_factory=dict, description="labels by node name, over those that the nodes bring"
    )
    scheduling: Scheduling = Scheduling()

    @model_validator(mode="after")
    def _whole(self) -> Cluster:
        mistakes = [told for _, told in mistakes_of(self.model_dump())]
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self


def mistakes_of(raw: Any) -> list[tuple[tuple[str | int, ...], str]]:
    """What is wrong between the parts of a configuration, each with its path: for values of the right types."""
    found: list[tuple[tuple[str | int, ...], str]] = []
    for part in ("queues", "classes", "windows"):
        seen: dict[str, int] = {}
        for at, entry in enumerate(_entries(raw, part)):
            name = str(entry.get("name"))
            if name in seen:
                found.append(((part, at, "name"), f"{name!r} is there twice"))
            seen.setdefault(name, at)
    queues = {q.get("name"): q for q in _entries(raw, "queues")}
    windows = {w.get("name") for w in _entries(raw, "windows")}
    for at, queue in enumerate(_entries(raw, "queues")):
        parent, window = queue.get("parent"), queue.get("window")
        if parent is not None and parent not in queues:
            found.append((("queues", at, "parent"), f"there is no queue {parent!r}"))
        elif parent is not None and _in_circle(queue.get("name"), queues):
            found.append((("queues", at, "parent"), f"{queue.get('name')!r} is above itself"))
        if window is not None and window not in windows:
            found.append((("queues", at, "window"), f"there is no window {window!r}"))
    if isinstance(raw, dict) and "queues" in raw and not queues:
        found.append((("queues",), "at least one queue is needed"))
    if isinstance(raw, dict) and "classes" in raw and not _entries(raw, "classes"):
        found.append((("classes",), "at least one class is needed"))
    return found


def _entries(raw: Any, part: str) -> list[dict[str, Any]]:
    entries = raw.get(part) if isinstance(raw, dict) else None
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list | tuple) else []


def _in_circle(name: Any, queues: dict[Any, dict[str, Any]]) -> bool:
    at = queues[name].get("parent")
    for _ in range(len(queues)):
        if at is None or at not in queues:
            return False
        if at == name:
            return True
        at = queues[at].get("parent")
    return False


class ClusterConfigured(Event):
    """The cluster is shared by this configuration from here on. `version` rises by one."""

    type_name: ClassVar[str] = "stoker.cluster.configured.v1"
    writer: ClassVar[str] = "gateway"
    version: int
    cluster: Cluster
    reason: str = ""

    def subject(self) -> str:
        return subjects.CLUSTER


class WindowEvent(Event):
    window: str
    verb: ClassVar[str]

    def subject(self) -> str:
        return subjects.window_event(self.window, self.verb)


class WindowOpened(WindowEvent):
    """Jobs that wait for the window may start. `at_ms` is the calendar's instant, `zones` its data's version."""

    type_name: ClassVar[str] = "stoker.window.opened.v1"
    writer: ClassVar[str] = "scheduler"
    verb: ClassVar[str] = "opened"
    at_ms: int
    zones: str


class WindowClosed(WindowEvent):
    """No job of the window starts any more; those that run stop or finish, as the window says."""

    type_name: ClassVar[str] = "stoker.window.closed.v1"
    writer: ClassVar[str] = "scheduler"
    verb: ClassVar[str] = "closed"
    at_ms: int
    zones: str
