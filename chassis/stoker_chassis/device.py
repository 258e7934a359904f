"""The `Devices` port: the GPUs of one node, real (NVML) or simulated, behind the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker_proto import CheckResult, Gpu, GpuSample


@dataclass(frozen=True)
class Poll:
    """One look at all devices: what the checks answered and what was measured."""

    results: tuple[CheckResult, ...]
    samples: tuple[GpuSample, ...]


class Devices(Protocol):
    simulated: bool

    def inventory(self) -> tuple[Gpu, ...]:
        """The GPUs that the node should have, by index. Raises DevicesUnavailable when they cannot be listed."""
        ...

    def poll(self) -> Poll:
        """Run the passive checks on every GPU. Never hangs: a wedged driver answers `error` after a deadline."""
        ...

    def holders(self, uuid: str) -> tuple[int, ...] | None:
        """Processes that hold the GPU; None when that cannot be told."""
        ...

    def opened(self, uuid: str, pid: int) -> None:
        """A process of ours opened the GPU. Real drivers know by themselves; simulated ones are told."""
        ...

    def environment(self, uuids: Sequence[str]) -> dict[str, str]:
        """Environment variables that make exactly these GPUs visible to a process, in this order."""
        ...


class DevicesUnavailable(Exception):
    """The node's GPUs cannot be listed at all; the message says why and what to do."""
