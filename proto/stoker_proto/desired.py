"""Desired state of a node: what its launcher makes true. A projection of the log, rewritten whole, never a command."""

from __future__ import annotations

from typing import Literal

from .envelope import Frozen
from .jobs import Allocation, StopReason
from .spec import JobSpec


class Assignment(Frozen):
    """One attempt's part on this node. `fence` is its decision's sequence; the highest one wins."""

    job_id: str
    attempt: int
    fence: int
    want: Literal["run", "stop"]
    stop_reason: StopReason | None = None
    grace_ms: int = 10_000
    spec: JobSpec
    code: str | None = None
    allocations: tuple[Allocation, ...]
    preflight: Literal["fresh", "required"]
    array_id: str | None = None
    array_index: int | None = None

    def here(self, node: str) -> Allocation:
        return next(a for a in self.allocations if a.node == node)

    @property
    def head(self) -> Allocation:
        return next(a for a in self.allocations if a.node_rank == 0)


class NodeAssignments(Frozen):
    """Everything that a node should run or stop, as of sequence `seq` of the log."""

    node: str
    seq: int
    attempts: tuple[Assignment, ...] = ()
