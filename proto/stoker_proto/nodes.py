"""Node events: inventory, findings, preflight and verdicts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from . import subjects
from .envelope import Event, Frozen

Verdict = Literal["validating", "ready", "suspect", "degraded", "quarantined", "unknown"]
CheckStatus = Literal["ok", "bad", "not_supported", "error", "not_applicable"]
Severity = Literal["info", "suspect", "degraded", "fatal"]


class Gpu(Frozen):
    """One GPU as the launcher found it. `model` is the short name that job specs use, e.g. H100 or SIM."""

    uuid: str
    index: int
    model: str
    name: str
    memory_bytes: int


class NodeEvent(Event):
    node: str
    verb: ClassVar[str]

    def subject(self) -> str:
        return subjects.node_event(self.node, self.verb)


class NodeJoined(NodeEvent):
    """A launcher is up. A new `boot_epoch` proves that nothing from an earlier one still runs there."""

    type_name: ClassVar[str] = "stoker.node.joined.v1"
    writer: ClassVar[str] = "launcher"
    verb: ClassVar[str] = "joined"
    boot_epoch: str
    gpus: tuple[Gpu, ...]
    cpus: int
    memory_bytes: int
    simulated: bool
    labels: dict[str, str] = Field(default_factory=dict)


class CheckResult(Frozen):
    """One check's answer. Healthy, not supported and could not measure are three different answers.

    `entity` is a GPU's uuid, `node`, or a part of it such as `nic:mlx5_0/1`, `link:GPU-1:3`, `mount:/data`; `value` and
    `detail` are what was measured, `excerpt` the raw lines it was read from. `loaded` tells whether the device worked
    at that time, and `blame` whose fault such an answer is by itself.
    """

    check: str
    status: CheckStatus
    entity: str = "node"
    severity: Severity = "info"
    value: float | str | None = None
    detail: str = ""
    action: Literal["none", "restart_app", "reset_gpu", "reboot", "drain", "inspect"] = "none"
    blame: Literal["user", "node", "network", "unknown"] = "unknown"
    loaded: bool | None = None
    excerpt: str = Field(default="", max_length=512)


class FindingRecorded(NodeEvent):
    """A check answered bad, or could not measure. `finding_id` is the same for the same fault, so it counts once."""

    type_name: ClassVar[str] = "stoker.node.finding_recorded.v1"
    writer: ClassVar[str] = "health"
    verb: ClassVar[str] = "finding_recorded"
    boot_epoch: str
    finding_id: str
    result: CheckResult


class NodeScanned(NodeEvent):
    """The agent looked at its devices after an attempt failed there; every finding before it is already in the log."""

    type_name: ClassVar[str] = "stoker.node.scanned.v1"
    writer: ClassVar[str] = "health"
    verb: ClassVar[str] = "scanned"
    boot_epoch: str
    job_id: str
    attempt: int


class SelfTested(NodeEvent):
    """The node's own test (device checks and an all-reduce over its own GPUs), asked for by `cause`.

    `began_seq` is how far its agent had read the log when the test began: a fault after that is not covered by it.
    """

    type_name: ClassVar[str] = "stoker.node.self_tested.v1"
    writer: ClassVar[str] = "health"
    verb: ClassVar[str] = "self_tested"
    boot_epoch: str
    cause: Literal["joined", "retest"]
    began_seq: int = 0
    passed: bool
    results: tuple[CheckResult, ...]


class PreflightStarted(NodeEvent):
    """A node entered the gang's preflight. The head node adds the rendezvous; a new round replaces the last."""

    type_name: ClassVar[str] = "stoker.node.preflight_started.v1"
    writer: ClassVar[str] = "health"
    verb: ClassVar[str] = "preflight_started"
    boot_epoch: str
    job_id: str
    attempt: int
    round: int
    master_addr: str | None = None
    master_port: int | None = None


class AllReduceSum(Frozen):
    """What one probe rank read back: slot i is rank i's own contribution, so a wrong slot names its owner."""

    rank: int
    slots: tuple[int, ...]
    seconds: float


class PreflightReported(NodeEvent):
    """One node's part of a gang's preflight: device checks, and what its probe ranks read from the all-reduce."""

    type_name: ClassVar[str] = "stoker.node.preflight_reported.v1"
    writer: ClassVar[str] = "health"
    verb: ClassVar[str] = "preflight_reported"
    boot_epoch: str
    job_id: str
    attempt: int
    round: int
    results: tuple[CheckResult, ...]
    sums: tuple[AllReduceSum, ...] = ()
    error: str | None = None


class PreflightPassed(Event):
    """The gang may start: every node's checks and the all-reduce over all of them were right."""

    type_name: ClassVar[str] = "stoker.attempt.preflight_passed.v1"
    writer: ClassVar[str] = "health"
    job_id: str
    attempt: int
    nodes: tuple[str, ...]

    def subject(self) -> str:
        return subjects.job_event(self.job_id, "preflight_passed")


class PreflightFailed(Event):
    """The gang may not start. `nodes` are the ones at fault; empty when the fault could not be pinned on a node."""

    type_name: ClassVar[str] = "stoker.attempt.preflight_failed.v1"
    writer: ClassVar[str] = "health"
    job_id: str
    attempt: int
    nodes: tuple[str, ...]
    detail: str

    def subject(self) -> str:
        return subjects.job_event(self.job_id, "preflight_failed")


class VerdictEvent(NodeEvent):
    """A node's health has changed. All verdicts of a node share one subject, on which their order is guarded."""

    verb: ClassVar[str] = "verdict"
    verdict: ClassVar[Verdict]
    boot_epoch: str
    rule: str
    reason: str
    evidence: tuple[str, ...] = ()


class NodeReady(VerdictEvent):
    """The node passed its self-test in this boot epoch and takes work."""

    type_name: ClassVar[str] = "stoker.node.ready.v1"
    writer: ClassVar[str] = "health"
    verdict: ClassVar[Verdict] = "ready"


class NodeSuspected(VerdictEvent):
    """Something points at the node, not enough to act; it still takes work."""

    type_name: ClassVar[str] = "stoker.node.suspected.v1"
    writer: ClassVar[str] = "health"
    verdict: ClassVar[Verdict] = "suspect"


class NodeDegraded(VerdictEvent):
    """No new work; what runs there goes on."""

    type_name: ClassVar[str] = "stoker.node.degraded.v1"
    writer: ClassVar[str] = "health"
    verdict: ClassVar[Verdict] = "degraded"


class NodeQuarantined(VerdictEvent):
    """Fatal evidence: no new work, and what runs there is stopped and moved."""

    type_name: ClassVar[str] = "stoker.node.quarantined.v1"
    writer: ClassVar[str] = "health"
    verdict: ClassVar[Verdict] = "quarantined"


class NodeReleased(VerdictEvent):
    """A re-test that began after the last fault passed: the node takes work again."""

    type_name: ClassVar[str] = "stoker.node.released.v1"
    writer: ClassVar[str] = "health"
    verdict: ClassVar[Verdict] = "ready"


class NodeUnknown(VerdictEvent):
    """The node is silent: no new work; what runs there is left alone until it is proven lost."""

    type_name: ClassVar[str] = "stoker.node.unknown.v1"
    writer: ClassVar[str] = "health"
    verdict: ClassVar[Verdict] = "unknown"


class RetestRequested(NodeEvent):
    """An operator asked for a re-test of the node, for example after a repair."""

    type_name: ClassVar[str] = "stoker.node.retest_requested.v1"
    writer: ClassVar[str] = "gateway"
    verb: ClassVar[str] = "retest_requested"
    reason: str = ""
