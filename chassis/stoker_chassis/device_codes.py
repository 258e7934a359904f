"""NVML return codes as data: what each says about the device, and nothing more than it says.

Source: NVIDIA NVML API reference (nvmlReturn_t), and what monitors in the field learned of each code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker_proto.nodes import CheckStatus


@dataclass(frozen=True)
class Code:
    """What a return code means: the check's status, how bad, and for whom."""

    name: str
    status: CheckStatus
    severity: Literal["info", "suspect", "degraded", "fatal"] = "info"
    scope: Literal["gpu", "node", "us"] = "gpu"
    action: Literal["none", "restart_app", "reset_gpu", "reboot", "inspect"] = "none"


CODES: dict[int, Code] = {
    1: Code("UNINITIALIZED", "error", scope="us"),
    2: Code("INVALID_ARGUMENT", "not_supported"),
    3: Code("NOT_SUPPORTED", "not_supported"),
    4: Code("NO_PERMISSION", "error", scope="node"),
    6: Code("NOT_FOUND", "not_supported"),
    7: Code("INSUFFICIENT_SIZE", "error", scope="us"),
    8: Code("INSUFFICIENT_POWER", "bad", "degraded", action="inspect"),
    9: Code("DRIVER_NOT_LOADED", "bad", "degraded", "node", "reboot"),
    10: Code("TIMEOUT", "error"),
    11: Code("IRQ_ISSUE", "error"),
    12: Code("LIBRARY_NOT_FOUND", "error", scope="node"),
    13: Code("FUNCTION_NOT_FOUND", "not_supported", scope="node"),
    14: Code("CORRUPTED_INFOROM", "bad", "fatal", action="inspect"),
    15: Code("GPU_IS_LOST", "bad", "fatal", action="reboot"),
    16: Code("RESET_REQUIRED", "bad", "degraded", action="reset_gpu"),
    17: Code("OPERATING_SYSTEM", "error"),
    18: Code("LIB_RM_VERSION_MISMATCH", "bad", "degraded", "node", "reboot"),
    19: Code("IN_USE", "error"),
    20: Code("MEMORY", "error"),
    21: Code("NO_DATA", "not_supported"),
    22: Code("VGPU_ECC_NOT_SUPPORTED", "not_supported"),
    23: Code("INSUFFICIENT_RESOURCES", "error"),
    24: Code("FREQ_NOT_SUPPORTED", "not_supported"),
    25: Code("ARGUMENT_VERSION_MISMATCH", "not_supported"),
    26: Code("DEPRECATED", "not_supported"),
    27: Code("NOT_READY", "error"),
    28: Code("GPU_NOT_FOUND", "bad", "fatal", action="reboot"),
    29: Code("INVALID_STATE", "error"),
    999: Code("UNKNOWN", "error"),
}


def meaning(code: int) -> Code:
    """The code's meaning; a code that is not in the table could not measure, and names itself."""
    return CODES.get(code, Code(f"CODE_{code}", "error"))
