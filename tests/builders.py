"""Builders for tests: a log kept in a list, and events with sensible defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker_proto import (
    AttemptExited,
    AttemptReleased,
    AttemptStarted,
    Event,
    Gpu,
    JobSpec,
    JobSubmitted,
    LogsSealed,
    NodeJoined,
    NodeReady,
    Outcome,
    RankExit,
    Recorded,
    StopReason,
    seal,
)


@dataclass
class ListLog:
    """Events in order, each at its sequence and log time."""

    at_ms: int = 1_000_000
    records: list[Recorded] = field(default_factory=list)

    def append(self, event: Event) -> Recorded:
        seq = len(self.records) + 1
        envelope = seal(event, id=f"e{seq}", source="test", time="2026-01-01T00:00:00Z", actor="test")
        recorded = Recorded(seq=seq, at_ms=self.at_ms, envelope=envelope, event=event)
        self.records.append(recorded)
        return recorded


IN_COMPUTE = ("queue", "priority_class", "priority", "within", "gpu_fraction", "also_accept", "cpus_per_node")


def spec(nodes: int = 1, per_node: int = 2, model: str = "SIM", **more: Any) -> JobSpec:
    """A small job; fields of compute are named like the others."""
    compute = {"accelerator_type": f"GPU_{per_node}x{model}", "num_accelerators": nodes * per_node}
    compute |= {name: more.pop(name) for name in IN_COMPUTE if more.get(name) is not None}
    body: dict[str, Any] = {"experiment_name": "exp", "compute": compute, "entrypoint": "train.py"}
    return JobSpec.model_validate(body | {name: value for name, value in more.items() if name not in IN_COMPUTE})


def submitted(job_id: str, **spec_fields: Any) -> JobSubmitted:
    return JobSubmitted(job_id=job_id, spec=spec(**spec_fields), spec_hash="h")


def joined(
    node: str, gpus: int = 2, epoch: str = "b1", model: str = "SIM", labels: dict[str, str] | None = None
) -> NodeJoined:
    return NodeJoined(
        node=node,
        boot_epoch=epoch,
        gpus=tuple(Gpu(uuid=f"{node}-gpu-{i}", index=i, model=model, name=model, memory_bytes=1) for i in range(gpus)),
        cpus=4,
        memory_bytes=1,
        labels=labels or {},
        simulated=True,
    )


def ready(node: str, epoch: str = "b1") -> NodeReady:
    return NodeReady(node=node, boot_epoch=epoch, rule="self-test", reason="passed")


def started(job_id: str, attempt: int, node: str, fence: int) -> AttemptStarted:
    return AttemptStarted(job_id=job_id, attempt=attempt, node=node, fence=fence, ranks=(0, 1))


def exited(
    job_id: str, attempt: int, node: str, fence: int, outcome: Outcome = "ok", asked: StopReason | None = None
) -> AttemptExited:
    code = 0 if outcome == "ok" else 1
    return AttemptExited(
        job_id=job_id, attempt=attempt, node=node, fence=fence, outcome=outcome, asked=asked,
        ranks=(RankExit(rank=0, code=code),), before_stop=() if asked else (0,),
    )  # fmt: skip


def released(job_id: str, attempt: int, node: str, fence: int) -> AttemptReleased:
    return AttemptReleased(job_id=job_id, attempt=attempt, node=node, fence=fence, proof="process group gone")


def sealed(job_id: str, attempt: int, node: str, fence: int) -> LogsSealed:
    return LogsSealed(job_id=job_id, attempt=attempt, node=node, fence=fence, streams=())
