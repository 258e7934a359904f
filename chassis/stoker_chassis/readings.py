"""What one look at a node's devices read: each answer a value, or the return code that stands in its place.

Adapters gather readings and judge nothing; the checks of the health service judge them. A question that a device does
not know keeps its code, so that healthy, not supported and could not measure stay three different answers.

Names of GPU readings: `present` (True, or the code that says lost), `architecture` (NVML's enum), `ecc_mode` (current,
pending), `ecc_uncorrected`, `ecc_uncorrected_total`, `ecc_corrected` (since boot, since made, since boot), `sram_ecc`
(threshold exceeded, uncorrected total), `remapped_rows` (corrected, uncorrected, pending, failure), `remap_histogram`
(max, high, partial, low, none), `retired_pages` (single-bit, double-bit), `retired_pages_pending`, `temperature`,
`temperature_slowdown`, `temperature_max`, `memory_temperature`, `memory_temperature_max` (C), `clock_reasons`,
`clock_reasons_supported` (bit masks), `power`, `power_limit`, `power_limit_default` (W), `sm_clock`, `sm_clock_max`
(MHz), `nvlink_active` (one 0 or 1 a link), `nvlink_recoveries`, `nvlink_receive_errors`, `nvlink_replays` (one count
a link), `pcie_width`, `pcie_width_max`, `pcie_generation`, `pcie_generation_max`, `pcie_generation_max_gpu`,
`pcie_replays`, `pcie_fatal`, `pcie_non_fatal`, `pcie_corrected` (counts), `fabric` (state, status, health summary),
`persistence` (0 or 1), `processes` (pids), `memory_used`, `memory_total` (bytes), `inforom` (True), `recovery_action`
(the driver's number), `mig_mode` (current, pending), `utilization` (0 to 1), `performance_state` (0 is P0).

Names of node readings: `init` (True), `count`, `driver_version`, `library_version`, `pci_gpus` (display and 3D
controllers of the vendor on the PCI bus; absent where the bus cannot be read).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = bool | int | float | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """A value, or why there is none: the driver's return code, or words when it is not the driver that said no."""

    value: Value | None = None
    code: int = 0
    error: str = ""

    @property
    def known(self) -> bool:
        return self.value is not None


@dataclass(frozen=True, slots=True)
class Readings:
    """One look: readings by name, of the node and of each GPU by uuid, and the node's monotonic second it was made."""

    at_s: float
    node: Mapping[str, Reading] = field(default_factory=dict)
    gpus: Mapping[str, Mapping[str, Reading]] = field(default_factory=dict)

    def gpu(self, uuid: str, name: str) -> Reading:
        """The reading, or one that was never made: could not measure, not healthy."""
        return self.gpus.get(uuid, {}).get(name, Reading(error="not read"))
