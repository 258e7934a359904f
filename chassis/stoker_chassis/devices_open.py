"""Chooses a node's devices: simulated when a folder for them is given, else real through NVML."""

from __future__ import annotations

from pathlib import Path

from .device import Devices
from .device_nvml import NvmlDevices
from .device_simulated import SimulatedDevices


def open_devices(node: str, sim_dir: Path | None, sim_gpus: int) -> Devices:
    return SimulatedDevices(node, sim_dir, sim_gpus) if sim_dir else NvmlDevices()
