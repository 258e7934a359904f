"""Planned faults for simulated nodes: a YAML file in, faults injected when their moment comes.

faults:
  - {kind: xid, code: 79, gpu: 0, node: node-2, after_seconds: 20}
  - {kind: xid, code: 79, gpu: 0, node: last, after_checkpoints: 2, delay_seconds: 1}
    # last: the last node of that job's gang
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stoker_chassis.device_simulated import inject
from stoker_proto import AttemptPlaced, CheckpointSaved, ProblemError, Recorded, problem


class Fault(BaseModel):
    """One fault of one simulated GPU, and when it happens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["xid", "wrong_sum", "clear"]
    code: int | None = None
    gpu: int = 0
    node: str = Field(description="a node's name, or `last` for the last node of the job's gang")
    after_seconds: float | None = None
    after_checkpoints: int | None = None
    delay_seconds: float = Field(0.0, ge=0, description="how long after its moment")

    @model_validator(mode="after")
    def _one_moment(self) -> Fault:
        if (self.after_seconds is None) == (self.after_checkpoints is None):
            raise ValueError("give exactly one of after_seconds and after_checkpoints")
        if self.node == "last" and self.after_checkpoints is None:
            raise ValueError("node: last needs after_checkpoints, which names the job")
        return self


class Scenario(BaseModel):
    """All planned faults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: tuple[Fault, ...] = ()


def read_scenario(path: Path) -> Scenario:
    """Raises ProblemError when the file is not a scenario."""
    try:
        return Scenario.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ProblemError(problem("invalid_request", f"{path} is not a scenario: {error}")) from error


async def after_a_while(fault: Fault, sim: Path) -> None:
    """Inject a fault that goes by time."""
    assert fault.after_seconds is not None
    await asyncio.sleep(fault.after_seconds + fault.delay_seconds)
    inject(sim, fault.node, fault.gpu, fault.kind, fault.code)


async def at_checkpoints(faults: tuple[Fault, ...], sim: Path, events: AsyncIterator[Recorded]) -> None:
    """Inject faults that go by how many checkpoints a job has saved; each fault happens once."""
    waiting = list(faults)
    saved: dict[str, int] = {}
    gangs: dict[str, tuple[str, ...]] = {}
    async for recorded in events:
        event = recorded.event
        if isinstance(event, AttemptPlaced):
            gangs[event.job_id] = tuple(a.node for a in event.allocations)
        if isinstance(event, CheckpointSaved):
            saved[event.job_id] = saved.get(event.job_id, 0) + 1
            for fault in [f for f in waiting if f.after_checkpoints == saved[event.job_id]]:
                waiting.remove(fault)
                await asyncio.sleep(fault.delay_seconds)
                node = gangs[event.job_id][-1] if fault.node == "last" else fault.node
                inject(sim, node, fault.gpu, fault.kind, fault.code)
        if not waiting:
            return
