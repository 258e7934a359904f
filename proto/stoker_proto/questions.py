"""What services ask the scheduler, and what it answers: from its state, by the code that decides.

Questions change nothing and are not in the log; `seq` says as of which event an answer is true.
"""

from __future__ import annotations

from pydantic import Field

from .envelope import Frozen
from .jobs import PreemptRule, Reason
from .spec import JobSpec


class ExplainAsked(Frozen):
    """Why does this job wait?"""

    job_id: str


class Displaced(Frozen):
    """A job that would be preempted, and what that would waste."""

    job_id: str
    queue: str
    priority_class: str
    rule: PreemptRule
    lost_gpu_seconds: float


class Explained(Frozen):
    """Reasons in the order in which they bind. `starts_ms` is an estimate on the log's clock; `ahead` counts jobs."""

    seq: int
    at_ms: int
    job_id: str
    state: str
    reasons: tuple[Reason, ...] = ()
    starts_ms: int | None = None
    ahead: int = 0
    displaces: tuple[Displaced, ...] = ()


class PlanAsked(Frozen):
    """What would become of this job, were it submitted now?"""

    spec: JobSpec


class Planned(Frozen):
    """`starts` is now, later, or never (as the cluster is); `nodes` where, when it is now."""

    seq: int
    at_ms: int
    starts: str
    nodes: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    starts_ms: int | None = None
    ahead: int = 0
    displaces: tuple[Displaced, ...] = ()


class WaitingShape(Frozen):
    """Jobs of one shape that wait in one queue for the same reason."""

    shape: str
    priority_class: str
    jobs: int
    gpus: float
    first_job: str
    waiting_ms: int
    reason: str
    message: str


class QueueStatus(Frozen):
    """One queue: GPUs held and asked for, itself and the queues below it. `share` is in thousandths of the cluster."""

    name: str
    parent: str | None
    weight: int
    nominal: float | None
    limit: float | None
    lend: float | None
    used: float
    borrowed: float
    lent: float
    used_by_model: dict[str, float] = Field(default_factory=dict)
    active_jobs: int
    waiting_jobs: int
    waiting_gpus: float
    share: int
    past_gpu_hours: float
    window_open: bool = True
    shapes: tuple[WaitingShape, ...] = ()


class QueuesTold(Frozen):
    """All queues, parents before children."""

    seq: int
    at_ms: int
    version: int
    gpus: float
    gpus_free: float
    gpus_claimed: float
    queues: tuple[QueueStatus, ...]
