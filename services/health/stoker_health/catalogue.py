"""XIDs and checks as data: how bad, what to do, whose fault. Sources stand on each row.

N: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors). S: NVSentinel's mapping (github.com/NVIDIA/NVSentinel).
G: gpud's event types (github.com/leptonai/gpud). Where they disagree NVIDIA's catalogue decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker_proto import CheckResult
from stoker_proto.nodes import Severity

ActionName = Literal["none", "restart_app", "reset_gpu", "reboot", "inspect"]
Blame = Literal["user", "node", "network", "unknown"]


@dataclass(frozen=True)
class Xid:
    code: int
    meaning: str
    severity: Severity
    action: ActionName
    blame: Blame
    source: str


XIDS: dict[int, Xid] = {
    row.code: row
    for row in (
        Xid(8, "GPU stopped processing", "suspect", "restart_app", "unknown", "N"),
        Xid(13, "graphics engine exception", "info", "restart_app", "user", "N: restart app; S: non-fatal"),
        Xid(31, "MMU page fault", "info", "restart_app", "user", "N: restart app; S: non-fatal"),
        Xid(43, "channel reset after an application fault", "info", "none", "user", "N: ignore"),
        Xid(45, "preemptive cleanup after another fault", "info", "none", "unknown", "N: follow the other Xid"),
        Xid(46, "GPU timeout", "degraded", "reset_gpu", "node", "N: reset"),
        Xid(48, "double-bit ECC error", "degraded", "reset_gpu", "node", "N: workflow 48; S: fatal"),
        Xid(54, "auxiliary power missing", "fatal", "inspect", "node", "N: check mechanicals"),
        Xid(62, "micro-controller halt", "degraded", "reset_gpu", "node", "N: reset"),
        Xid(63, "row remap or page retirement recorded", "info", "none", "node", "N: ignore"),
        Xid(64, "row remap failed", "fatal", "inspect", "node", "N: reset; S: fatal; G: inspection"),
        Xid(74, "NVLink error", "degraded", "reset_gpu", "node", "N: NVLink workflow; S: fatal"),
        Xid(79, "GPU has fallen off the bus", "fatal", "reboot", "node", "N: restart bare metal; S: fatal"),
        Xid(92, "high rate of single-bit ECC errors", "suspect", "none", "node", "N: ignore"),
        Xid(94, "contained memory error", "suspect", "restart_app", "node", "N: restart app"),
        Xid(95, "uncontained memory error", "degraded", "reset_gpu", "node", "N: reset; S: fatal"),
        Xid(109, "context switch timeout", "degraded", "reset_gpu", "unknown", "N: reset; G: warn"),
        Xid(110, "security fault", "degraded", "reset_gpu", "node", "N: reset"),
        Xid(119, "GSP RPC timeout", "degraded", "reset_gpu", "node", "N: reset; S: fatal"),
        Xid(120, "GSP error", "degraded", "reset_gpu", "node", "N: reset; S: fatal"),
        Xid(136, "link training failed", "degraded", "reset_gpu", "node", "N: reset"),
        Xid(140, "unrecovered ECC error", "degraded", "reset_gpu", "node", "N: reset; S: fatal"),
        Xid(143, "GPU initialisation error", "fatal", "inspect", "node", "N: reset; G: inspection"),
        Xid(154, "recovery action changed", "info", "none", "unknown", "N: informational, names the action"),
        Xid(158, "GPU fatal timeout", "degraded", "reset_gpu", "node", "N: reset"),
    )
}

# What a check that answers bad means when the device's own answer did not say (source: the health checks of gpud and
# NVSentinel, and DCGM's policy for uncorrectable errors and row remaps).
CHECKS: dict[str, tuple[Severity, ActionName]] = {
    "gpu_present": ("fatal", "reboot"),
    "gpu_count": ("fatal", "reboot"),
    "driver": ("degraded", "reboot"),
    "ecc_uncorrectable": ("degraded", "reset_gpu"),
    "row_remap": ("degraded", "reset_gpu"),
    "recovery_action": ("degraded", "reset_gpu"),
    "nvml_answers": ("suspect", "none"),
    "allreduce_sum": ("fatal", "inspect"),
    "matmul_checksum": ("fatal", "inspect"),
}


def graded(result: CheckResult) -> CheckResult:
    """The result with its severity and action; an unknown XID is suspect, never ignored."""
    if result.status != "bad" or result.severity != "info":
        return result
    if result.check == "xid" and isinstance(result.value, float):
        row = XIDS.get(int(result.value))
        if row is None:
            return result.model_copy(update={"severity": "suspect", "action": "inspect"})
        detail = f"XID {row.code}: {row.meaning}"
        return result.model_copy(update={"severity": row.severity, "action": row.action, "detail": detail})
    if result.check == "row_remap" and result.value == "failure":
        return result.model_copy(update={"severity": "fatal", "action": "inspect"})
    severity, action = CHECKS.get(result.check, ("suspect", "none"))
    return result.model_copy(update={"severity": severity, "action": action})
