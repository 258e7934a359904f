"""Job and attempt events, and what a placement is."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from . import subjects
from .envelope import Event, Frozen
from .problems import Problem
from .spec import JobSpec

Outcome = Literal[
    "ok", "user_error", "oom", "infra_gpu", "infra_comm", "infra_node", "infra_storage", "preempted", "cancelled",
    "timeout", "lost", "launch_rejected", "preflight_failed", "sdc_suspect",
]  # fmt: skip
JobState = Literal["queued", "active", "succeeded", "failed", "cancelled", "expired"]
StopReason = Literal[
    "cancelled", "peer_failed", "node_quarantined", "preflight_failed", "timeout", "lost", "preempted",
    "window_closed", "deadline",
]  # fmt: skip
PreemptRule = Literal["higher_class", "reclaim", "claim_due"]


class Allocation(Frozen):
    """An attempt's hold on named GPUs of one node at one boot epoch.

    `milli` is the share of each GPU in thousandths; `cpu_milli` and `memory_mib` are host cores and memory set aside.
    """

    node: str
    boot_epoch: str
    gpus: tuple[str, ...]
    node_rank: int
    milli: int = 1000
    cpu_milli: int = 0
    memory_mib: int = 0


class Reason(Frozen):
    """Why a job waits: a code, a sentence, and the numbers behind it. The first reason in a list binds."""

    code: str
    message: str
    facts: dict[str, str | int | float | list[str]] = Field(default_factory=dict)
    blockers: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()


class JobEvent(Event):
    job_id: str
    verb: ClassVar[str]

    def subject(self) -> str:
        return subjects.job_event(self.job_id, self.verb)


class AttemptEvent(JobEvent):
    attempt: int


class JobSubmitted(JobEvent):
    """The gateway accepted a job. `code` is the SHA-256 of its code tree's archive in the blob store."""

    type_name: ClassVar[str] = "stoker.job.submitted.v1"
    writer: ClassVar[str] = "gateway"
    verb: ClassVar[str] = "submitted"
    spec: JobSpec
    spec_hash: str
    code: str | None = None
    idempotency_key: str | None = None
    fingerprint: str | None = None
    array_id: str | None = None
    array_index: int | None = None


class CancelRequested(JobEvent):
    """Somebody asked to cancel the job. It wins over every new attempt, in every state that is not final."""

    type_name: ClassVar[str] = "stoker.job.cancel_requested.v1"
    writer: ClassVar[str] = "gateway"
    verb: ClassVar[str] = "cancel_requested"
    reason: str = ""


class HoldRequested(JobEvent):
    """Somebody put the job on hold: it starts no new attempt until it is released. What runs goes on."""

    type_name: ClassVar[str] = "stoker.job.hold_requested.v1"
    writer: ClassVar[str] = "gateway"
    verb: ClassVar[str] = "hold_requested"
    reason: str = ""


class HoldReleased(JobEvent):
    """The job may start again."""

    type_name: ClassVar[str] = "stoker.job.hold_released.v1"
    writer: ClassVar[str] = "gateway"
    verb: ClassVar[str] = "hold_released"
    reason: str = ""


class PriorityChanged(JobEvent):
    """The job has another priority inside its queue and class; a higher number goes first."""

    type_name: ClassVar[str] = "stoker.job.priority_changed.v1"
    writer: ClassVar[str] = "gateway"
    verb: ClassVar[str] = "priority_changed"
    priority: int


class JobBoosted(JobEvent):
    """The job goes first inside its queue and class from here on, and is not preempted again.

    It has waited longer than its queue lets jobs wait, or was preempted as often as a job may be.
    """

    type_name: ClassVar[str] = "stoker.job.boosted.v1"
    writer: ClassVar[str] = "scheduler"
    verb: ClassVar[str] = "boosted"
    cause: Literal["waited", "preempted"]


class PendingReasonChanged(JobEvent):
    """Why the job waits has changed; the first reason binds."""

    type_name: ClassVar[str] = "stoker.job.pending_reason_changed.v1"
    writer: ClassVar[str] = "scheduler"
    verb: ClassVar[str] = "pending_reason_changed"
    reasons: tuple[Reason, ...]


class AttemptPlaced(AttemptEvent):
    """A Place decision held: the attempt owns these GPUs. `fence` is the sequence of the decision.

    `preflight` is `fresh` when the nodes passed one together lately and nothing was found since, else `required`.
    """

    type_name: ClassVar[str] = "stoker.attempt.placed.v1"
    writer: ClassVar[str] = "scheduler"
    verb: ClassVar[str] = "attempt_placed"
    fence: int
    allocations: tuple[Allocation, ...]
    preflight: Literal["fresh", "required"]


class JobRequeued(AttemptEvent):
    """The attempt ended without ending the job, which waits again at its old place in the queue."""

    type_name: ClassVar[str] = "stoker.job.requeued.v1"
    writer: ClassVar[str] = "scheduler"
    verb: ClassVar[str] = "requeued"
    outcome: Outcome
    cause: str
    exclude_nodes: tuple[str, ...] = ()
    not_before_ms: int = 0


class JobFinished(JobEvent):
    """The job is over. `gpu_ms` is GPU time held by all its attempts, by the log's clock."""

    type_name: ClassVar[str] = "stoker.job.finished.v1"
    writer: ClassVar[str] = "scheduler"
    verb: ClassVar[str] = "finished"
    state: Literal["succeeded", "failed", "cancelled", "expired"]
    outcome: Outcome
    attempts: int
    gpu_ms: int
    problem: Problem | None = None


class AttemptPrepared(AttemptEvent):
    """A node holds code and environment and is ready to start its ranks.

    The head node (node rank 0) adds where the ranks meet and which checkpoint all of them resume from.
    """

    type_name: ClassVar[str] = "stoker.attempt.prepared.v1"
    writer: ClassVar[str] = "launcher"
    verb: ClassVar[str] = "attempt_prepared"
    node: str
    fence: int
    master_addr: str | None = None
    master_port: int | None = None
    resume_path: str | None = None
    resume_step: int | None = None


class AttemptStarted(AttemptEvent):
    """A node forked its ranks."""

    type_name: ClassVar[str] = "stoker.attempt.started.v1"
    writer: ClassVar[str] = "launcher"
    verb: ClassVar[str] = "attempt_started"
    node: str
    fence: int
    ranks: tuple[int, ...]
    resume_step: int | None = None


class AttemptProgressed(AttemptEvent):
    """The training step reached, told at the first step and then sparsely: what stopping the attempt would lose."""

    type_name: ClassVar[str] = "stoker.attempt.progressed.v1"
    writer: ClassVar[str] = "launcher"
    verb: ClassVar[str] = "attempt_progressed"
    step: int


class CheckpointSaved(AttemptEvent):
    """A complete checkpoint is durable."""

    type_name: ClassVar[str] = "stoker.attempt.checkpoint_saved.v1"
    writer: ClassVar[str] = "launcher"
    verb: ClassVar[str] = "checkpoint_saved"
    step: int
    path: str
    bytes: int


class RankExit(Frozen):
    """How one rank ended. For a command the rank is the node rank. `error` is the exception's last traceback lines."""

    rank: int
    code: int | None = None
    signal: int | None = None
    error_type: str | None = None
    error: str | None = None
    stderr_tail: tuple[str, ...] = ()


class AttemptExited(AttemptEvent):
    """All processes of the attempt on this node are gone. Ranks stand in the order in which they ended.

    `asked` is set when the platform stopped it; ranks in `before_stop` ended by themselves before that. What ended
    within the grace for a reason of its own keeps its own outcome: `ok`, `user_error` or `oom`.
    """

    type_name: ClassVar[str] = "stoker.attempt.exited.v1"
    writer: ClassVar[str] = "launcher"
    verb: ClassVar[str] = "attempt_exited"
    node: str
    fence: int
    outcome: Outcome
    asked: StopReason | None = None
    ranks: tuple[RankExit, ...] = ()
    before_stop: tuple[int, ...] = ()
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether it failed by itself: unasked, or within the grace that a stop gave it."""
        return self.outcome in ("user_error", "oom") or (self.asked is None and self.outcome != "ok")


class AttemptReleased(AttemptEvent):
    """Proof that the node's GPUs are free again: process group gone, device free. Only this gives GPUs back."""

    type_name: ClassVar[str] = "stoker.attempt.released.v1"
    writer: ClassVar[str] = "launcher"
    verb: ClassVar[str] = "attempt_released"
    node: str
    fence: int
    proof: str


class SealedStream(Frozen):
    """A finished stream, whole, in the blob store. `stream` is `rank-3.stdout`, `rank-3.stderr` or `rank-0.metrics`."""

    stream: str
    digest: str
    lines: int
    bytes: int


class LogsSealed(AttemptEvent):
    """Every log and metric stream of the attempt on this node is in the blob store, whole."""

    type_name: ClassVar[str] = "stoker.attempt.logs_sealed.v1"
    writer: ClassVar[str] = "launcher"
    verb: ClassVar[str] = "logs_sealed"
    node: str
    fence: int
    streams: tuple[SealedStream, ...]


class JobFailureAttributed(AttemptEvent):
    """Whose fault a failed attempt was, and on what evidence. The scheduler retries or gives up on this."""

    type_name: ClassVar[str] = "stoker.attempt.failure_attributed.v1"
    writer: ClassVar[str] = "health"
    verb: ClassVar[str] = "failure_attributed"
    outcome: Outcome
    blame: Literal["user", "node", "network", "unknown"]
    confidence: Literal["established", "supported", "hypothesis"]
    node: str | None = None
    first_rank: int | None = None
    evidence: tuple[str, ...] = ()
    retry: bool
    exclude_nodes: tuple[str, ...] = ()
    problem: Problem


class RunMirrored(JobEvent):
    """The job has its MLflow run."""

    type_name: ClassVar[str] = "stoker.job.run_mirrored.v1"
    writer: ClassVar[str] = "tracker"
    verb: ClassVar[str] = "run_mirrored"
    experiment_id: str
    run_id: str
    url: str


class MirrorCompleted(JobEvent):
    """MLflow holds the finished job's status, metrics and logs, whole."""

    type_name: ClassVar[str] = "stoker.job.mirror_completed.v1"
    writer: ClassVar[str] = "tracker"
    verb: ClassVar[str] = "mirror_completed"
    run_id: str
    points: int
    rejects: tuple[str, ...] = ()


class Place(Frozen):
    """Start an attempt on these GPUs: the whole gang or nothing.

    `over` names waiting jobs whose claimed GPUs it may use, since it will be gone before they can start.
    """

    action: Literal["place"] = "place"
    job_id: str
    attempt: int
    allocations: tuple[Allocation, ...]
    preflight: Literal["fresh", "required"]
    over: tuple[str, ...] = ()


class Stop(Frozen):
    """Stop an attempt on every node that it was offered to. A preempted one: `by` which job, and by which `rule`."""

    action: Literal["stop"] = "stop"
    job_id: str
    attempt: int
    reason: StopReason
    grace_ms: int
    by: str | None = None
    rule: PreemptRule | None = None


class Requeue(Frozen):
    """End an attempt whose GPUs are free, and queue the job again. `charged` counts against max_retries."""

    action: Literal["requeue"] = "requeue"
    job_id: str
    attempt: int
    outcome: Outcome
    cause: str
    charged: bool
    exclude_nodes: tuple[str, ...] = ()
    not_before_ms: int = 0


class Finish(Frozen):
    """End a job."""

    action: Literal["finish"] = "finish"
    job_id: str
    state: Literal["succeeded", "failed", "cancelled", "expired"]
    outcome: Outcome
    problem: Problem | None = None


class Fence(Frozen):
    """Declare an attempt lost on a node that has been silent for longer than launchers keep jobs without the log."""

    action: Literal["fence"] = "fence"
    job_id: str
    attempt: int
    node: str


class Claim(Frozen):
    """Keep these GPUs for a waiting gang: free ones now, held ones as they come free. Nobody else is placed on them.

    `preempt` goes with the Stops that free them; `reserve` waits for natural ends. `starts_ms` is the estimate, on the
    log's clock; none when something that holds them has no time limit.
    """

    action: Literal["claim"] = "claim"
    job_id: str
    kind: Literal["preempt", "reserve"]
    allocations: tuple[Allocation, ...]
    starts_ms: int | None = None


class Unclaim(Frozen):
    """Give a claim up, and why."""

    action: Literal["unclaim"] = "unclaim"
    job_id: str
    cause: str


class Boost(Frozen):
    """Let a waiting job go first inside its queue and class."""

    action: Literal["boost"] = "boost"
    job_id: str
    cause: Literal["waited", "preempted"]


Action = Annotated[Place | Stop | Requeue | Finish | Fence | Claim | Unclaim | Boost, Field(discriminator="action")]


class DecisionBatch(Event):
    """What the scheduler decided at `based_on_seq`. The fold voids every action whose preconditions no longer hold."""

    type_name: ClassVar[str] = "stoker.scheduler.decisions.v1"
    writer: ClassVar[str] = "scheduler"
    based_on_seq: int
    actions: tuple[Action, ...]

    def subject(self) -> str:
        return subjects.DECISIONS


class LeaderElected(Event):
    """A process leads a service from here on. It decides nothing before it has read this event back."""

    type_name: ClassVar[str] = "stoker.service.leader_elected.v1"
    writer: ClassVar[str] = "any"
    service: str
    holder: str

    def subject(self) -> str:
        return subjects.service_event(self.service, "leader_elected")
