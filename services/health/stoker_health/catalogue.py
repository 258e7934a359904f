"""What an answer of a check means: how bad, what to do and whose fault, from the catalogues."""

from __future__ import annotations

from typing import Any

from stoker_proto import CheckResult
from stoker_proto.nodes import Severity

from .nvlink5 import decode
from .recovery import announced
from .xids import ActionName, Xid, xid

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
    """The result with its severity and action, when it does not bring them already."""
    if result.status != "bad" or result.severity != "info":
        return result
    if result.check == "xid" and isinstance(result.value, float):
        return result.model_copy(update=_of_xid(xid(int(result.value)), result.excerpt))
    if result.check == "row_remap" and result.value == "failure":
        return result.model_copy(update={"severity": "fatal", "action": "inspect"})
    severity, action = CHECKS.get(result.check, ("suspect", "none"))
    return result.model_copy(update={"severity": severity, "action": action})


def _of_xid(row: Xid, text: str) -> dict[str, Any]:
    """What the code means, and what its line in the kernel's log adds: NVML tells the bare code."""
    told: dict[str, Any] = {"severity": row.severity, "action": row.action, "blame": row.blame}
    told["detail"] = f"XID {row.code}: {row.meaning}"
    if row.role == "carrier" and (needs := announced(text)):
        told |= {"severity": needs.severity, "action": needs.action}
        told["detail"] = f"XID {row.code}: {row.meaning}: {needs.name}"
    if row.role == "link" and (link := decode(row.code, text)):
        told["detail"] = f"XID {row.code}: {row.meaning}: {link.name}"
        if link.action == "none":
            told |= {"severity": "info", "action": "none"}
        elif link.action == "reset_gpu":
            told |= {"severity": "degraded", "action": "reset_gpu"}
    return told
