"""The words of Stoker: events, job spec, problems, subjects. Every service knows this package and no other service.

A *job* is what was asked for; its spec never changes. An *attempt* is one try at it. A *gang* is all ranks of an
attempt, placed together or not at all. An *allocation* is an attempt's hold on named GPUs of a node at a boot epoch,
and the only ledger of capacity and cost.

Job
    queued     JobSubmitted puts it here, at a place in the queue that it keeps for ever.
    active     a Place decision held: an attempt owns GPUs (AttemptPlaced).
    queued     again when the attempt ended by preemption or by a fault of the platform (JobRequeued). Such a job keeps
               its place; one that was preempted as often as jobs may be is boosted (JobBoosted): first in its class.
    succeeded, failed, cancelled, expired   final (JobFinished). CancelRequested wins over any new attempt.

    A queued job may be gated: on hold (HoldRequested until HoldReleased), behind jobs that must be over first, outside
    its window (WindowClosed until WindowOpened), or beyond its array's limit. A gated job starts nothing.
    A queued gang may have a *claim* (Claim in a DecisionBatch): GPUs kept for it, free ones and such as come free. It
    ends when the gang is placed, gated or over, or by Unclaim when its nodes stop working or a higher job goes first.

Cluster
    ClusterConfigured replaces the whole configuration: queues with quotas, priority classes, windows, numbers. Each has
    the version after the last; what does not is refused by the log, so two writers cannot undo each other.

Attempt, on each of its nodes
    placed     AttemptPlaced. The launcher reads its node's desired state and prepares.
    prepared   AttemptPrepared: code and environment are there; the head node names the rendezvous and the checkpoint.
    preflight  unless the nodes' last one is fresh: PreflightStarted, PreflightReported, then PreflightPassed or
               PreflightFailed from the health leader. Nothing starts before every node is prepared and it passed.
    running    AttemptStarted, then AttemptProgressed and CheckpointSaved.
    draining   a Stop decision: signal, grace, kill, the whole process group. One that is preempted names the job it
               gives way to and the rule, and comes in one batch with that job's claim.
    exited     AttemptExited with how each rank ended. A failure that nobody asked for is blamed by health
               (JobFailureAttributed) before the scheduler retries or gives up.
    released   AttemptReleased, the launcher's proof that the GPUs are free; or NodeJoined with a new boot epoch,
               which proves it for everything before; or a Fence decision for a node silent longer than launchers keep
               jobs. Only this gives GPUs back.

Node
    validating   NodeJoined; no work until SelfTested has passed.
    ready        NodeReady, or NodeReleased after quarantine.
    suspect      NodeSuspected: still takes work.
    degraded     NodeDegraded: no new work; what runs goes on.
    quarantined  NodeQuarantined on fatal evidence; what runs is moved. Left only by a re-test, begun after the last
                 fault, that passed.
    unknown      NodeUnknown: silent.

Facts are past participles. A request is a fact too (CancelRequested). A DecisionBatch is what the scheduler wants; its
fold voids each action whose preconditions no longer hold when it lands, whole gangs together, and what held is then
announced as AttemptPlaced, JobRequeued, JobBoosted or JobFinished, so that no other reader needs the void rule.
"""

from .cluster import (
    Cluster,
    ClusterConfigured,
    PriorityClass,
    Queue,
    Quota,
    Scheduling,
    Window,
    WindowClosed,
    WindowOpened,
)
from .codec import REGISTRY, decode, decode_event, decoder, encode, event_id, from_line, seal, to_line
from .desired import Assignment, NodeAssignments
from .envelope import Envelope, Event, Frozen, Recorded, Unknown
from .jobs import (
    Action,
    Allocation,
    AttemptExited,
    AttemptPlaced,
    AttemptPrepared,
    AttemptProgressed,
    AttemptReleased,
    AttemptStarted,
    Boost,
    CancelRequested,
    CheckpointSaved,
    Claim,
    DecisionBatch,
    Fence,
    Finish,
    HoldReleased,
    HoldRequested,
    JobBoosted,
    JobFailureAttributed,
    JobFinished,
    JobRequeued,
    JobState,
    JobSubmitted,
    LeaderElected,
    LogsSealed,
    MirrorCompleted,
    Outcome,
    PendingReasonChanged,
    Place,
    PreemptRule,
    PriorityChanged,
    RankExit,
    Reason,
    Requeue,
    RunMirrored,
    SealedStream,
    Stop,
    StopReason,
    Unclaim,
)
from .nodes import (
    AllReduceSum,
    CheckResult,
    FindingRecorded,
    Gpu,
    NodeDegraded,
    NodeJoined,
    NodeQuarantined,
    NodeReady,
    NodeReleased,
    NodeScanned,
    NodeSuspected,
    NodeUnknown,
    PreflightFailed,
    PreflightPassed,
    PreflightReported,
    PreflightStarted,
    RetestRequested,
    SelfTested,
    Verdict,
    VerdictEvent,
)
from .problems import CODES, Evidence, FieldError, Problem, ProblemError, problem
from .questions import (
    Displaced,
    ExplainAsked,
    Explained,
    PlanAsked,
    Planned,
    QueueStatus,
    QueuesTold,
    WaitingShape,
)
from .spec import After, Array, Compute, JobSpec, Schedule
from .telemetry import DeviceSample, GpuSample, LogBatch, MetricBatch, Point

__all__ = [
    "CODES",
    "REGISTRY",
    "Action",
    "After",
    "AllReduceSum",
    "Allocation",
    "Array",
    "Assignment",
    "AttemptExited",
    "AttemptPlaced",
    "AttemptPrepared",
    "AttemptProgressed",
    "AttemptReleased",
    "AttemptStarted",
    "Boost",
    "CancelRequested",
    "CheckResult",
    "CheckpointSaved",
    "Claim",
    "Cluster",
    "ClusterConfigured",
    "Compute",
    "DecisionBatch",
    "DeviceSample",
    "Displaced",
    "Envelope",
    "Event",
    "Evidence",
    "ExplainAsked",
    "Explained",
    "Fence",
    "FieldError",
    "FindingRecorded",
    "Finish",
    "Frozen",
    "Gpu",
    "GpuSample",
    "HoldReleased",
    "HoldRequested",
    "JobBoosted",
    "JobFailureAttributed",
    "JobFinished",
    "JobRequeued",
    "JobSpec",
    "JobState",
    "JobSubmitted",
    "LeaderElected",
    "LogBatch",
    "LogsSealed",
    "MetricBatch",
    "MirrorCompleted",
    "NodeAssignments",
    "NodeDegraded",
    "NodeJoined",
    "NodeQuarantined",
    "NodeReady",
    "NodeReleased",
    "NodeScanned",
    "NodeSuspected",
    "NodeUnknown",
    "Outcome",
    "PendingReasonChanged",
    "Place",
    "PlanAsked",
    "Planned",
    "Point",
    "PreemptRule",
    "PreflightFailed",
    "PreflightPassed",
    "PreflightReported",
    "PreflightStarted",
    "PriorityChanged",
    "PriorityClass",
    "Problem",
    "ProblemError",
    "Queue",
    "QueueStatus",
    "QueuesTold",
    "Quota",
    "RankExit",
    "Reason",
    "Recorded",
    "Requeue",
    "RetestRequested",
    "RunMirrored",
    "Schedule",
    "Scheduling",
    "SealedStream",
    "SelfTested",
    "Stop",
    "StopReason",
    "Unclaim",
    "Unknown",
    "Verdict",
    "VerdictEvent",
    "WaitingShape",
    "Window",
    "WindowClosed",
    "WindowOpened",
    "decode",
    "decode_event",
    "decoder",
    "encode",
    "event_id",
    "from_line",
    "problem",
    "seal",
    "to_line",
]
