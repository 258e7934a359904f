"""What travels on TELEMETRY: log lines, metric points, device samples. Losing it never loses truth."""

from __future__ import annotations

from .envelope import Frozen


class LogBatch(Frozen):
    """Consecutive lines of one stream of one rank; `first` numbers the first line, from 0, so a gap or repeat shows."""

    job_id: str
    attempt: int
    node: str
    rank: int
    stream: str
    first: int
    lines: tuple[str, ...]


class Point(Frozen):
    """One metric value at one step; `time_ms` is the job's own clock. NaN and infinities travel as strings."""

    key: str
    value: float | str
    step: int
    time_ms: int


class MetricBatch(Frozen):
    """Consecutive metric points of one rank of an attempt; `first` numbers the first one, from 0."""

    job_id: str
    attempt: int
    rank: int
    first: int
    points: tuple[Point, ...]


class GpuSample(Frozen):
    uuid: str
    utilization: float | None = None
    memory_used_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None


class DeviceSample(Frozen):
    """One poll of a node's devices; also the node's heartbeat."""

    node: str
    boot_epoch: str
    gpus: tuple[GpuSample, ...]
