"""One event of every type, as a line of an exported log: `python -m tests.replay.samples` writes the missing files.

What is in `corpus` stays as it is: it stands for logs that were written long ago.
"""

from __future__ import annotations

from pathlib import Path

from stoker_proto import (
    REGISTRY,
    CancelRequested,
    CheckResult,
    Cluster,
    ClusterConfigured,
    DecisionBatch,
    Event,
    Fence,
    Finish,
    HoldReleased,
    HoldRequested,
    JobBoosted,
    JobFinished,
    NodeDegraded,
    NodeReleased,
    NodeSuspected,
    NodeUnknown,
    PendingReasonChanged,
    Place,
    PreflightFailed,
    PreflightReported,
    PriorityChanged,
    Queue,
    Quota,
    Reason,
    Recorded,
    Requeue,
    RetestRequested,
    Scheduling,
    Stop,
    Window,
    WindowClosed,
    WindowOpened,
    problem,
    seal,
    to_line,
)
from tests.replay.history import JOB, epoch, xid79

FOLDER = Path(__file__).parent / "corpus"
CLUSTER = Cluster(
    queues=(
        Queue(name="default", window="weekend", max_wait_minutes=600),
        Queue(name="vision", gpus=Quota(nominal=8, limit=16, lend=4), models={"H100": Quota(nominal=4)}, weight=2),
        Queue(name="vision-agents", parent="vision", gpus=Quota(limit=4), min_run_minutes=5),
    ),
    windows=(Window(name="weekend", zone="Europe/Berlin", days=("sat", "sun"), start="00:00", end="00:00"),),
    labels={"node-1": {"rack": "r1"}},
    scheduling=Scheduling(reservations=2),
)


def told_by_hand() -> list[Event]:
    """Types that the history of the demo lacks or shows only in part."""
    refused = problem("python_exception", "ValueError: bad batch", instance=f"/v1/jobs/{JOB}", next_actions=("fix it",))
    place = next(
        action
        for recorded in xid79()
        if isinstance(recorded.event, DecisionBatch)
        for action in recorded.event.actions
        if isinstance(action, Place)
    )
    reason = Reason(
        code="nodes_busy", message="2 nodes of 3 are free", facts={"free": 2, "share": 0.5, "nodes": ["node-1"]},
        blockers=("01KC0QX5E8M3T7V9W2Y4Z6A8BD",), actions=("wait",),
    )  # fmt: skip
    wrong = CheckResult(
        check="allreduce", status="bad", severity="fatal", value="3", detail="slot 3 is 7", action="inspect"
    )
    node, boot = "node-2", epoch("node-2")
    verdict = {"node": node, "boot_epoch": boot, "reason": "told by a test", "evidence": ("f-1",)}
    return [
        CancelRequested(job_id=JOB, reason="not needed any more"),
        PendingReasonChanged(job_id=JOB, reasons=(reason,)),
        JobFinished(job_id=JOB, state="failed", outcome="user_error", attempts=1, gpu_ms=12_000, problem=refused),
        DecisionBatch(
            based_on_seq=41,
            actions=(
                place,
                Stop(job_id=JOB, attempt=1, reason="timeout", grace_ms=10_000),
                Requeue(
                    job_id=JOB, attempt=1, outcome="infra_gpu", cause="XID 79", charged=True, exclude_nodes=(node,),
                    not_before_ms=1_796_090_412_795,
                ),
                Finish(job_id=JOB, state="failed", outcome="user_error", problem=refused),
                Fence(job_id=JOB, attempt=1, node=node),
            ),
        ),
        PreflightFailed(job_id=JOB, attempt=1, nodes=(node,), detail="slot 3 is 7"),
        PreflightReported(
            node=node, boot_epoch=boot, job_id=JOB, attempt=1, round=2, results=(wrong,), error="no answer in time"
        ),
        RetestRequested(node=node, reason="the card was replaced"),
        NodeSuspected(**verdict, rule="slow-link"),
        NodeDegraded(**verdict, rule="degraded-finding"),
        NodeReleased(**verdict, rule="retest"),
        NodeUnknown(**verdict, rule="silence"),
        HoldRequested(job_id=JOB, reason="the data is not there yet"),
        HoldReleased(job_id=JOB, reason="it is there"),
        PriorityChanged(job_id=JOB, priority=10),
        JobBoosted(job_id=JOB, cause="waited"),
        ClusterConfigured(version=2, cluster=CLUSTER, reason="a second team"),
        WindowOpened(window="weekend", at_ms=1_796_515_200_000, zones="2026a"),
        WindowClosed(window="weekend", at_ms=1_796_688_000_000, zones="2026a"),
    ]  # fmt: skip


def fullness(recorded: Recorded) -> tuple[int, int]:
    """How much of its type an event shows."""
    values = recorded.envelope.data.values()
    return sum(value not in (None, [], {}, "") for value in values), len(str(recorded.envelope.data))


def samples() -> dict[str, str]:
    """The fullest event of every type, as a line."""
    history = xid79()
    records: dict[str, Recorded] = {}
    for recorded in history:
        known = records.get(recorded.envelope.type)
        if known is None or fullness(recorded) > fullness(known):
            records[recorded.envelope.type] = recorded
    for number, event in enumerate(told_by_hand(), start=len(history) + 1):
        sealed = seal(
            event, id=f"01KC0R{number:020d}", source=event.writer, time="2026-12-01T02:05:00.000Z", actor="alice",
            onbehalfof="bob", causationid=history[0].envelope.id,
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )  # fmt: skip
        records[event.type_name] = Recorded(seq=number, at_ms=history[-1].at_ms + number, envelope=sealed, event=event)
    return {name: to_line(recorded) for name, recorded in records.items()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    lines = samples()
    for name in REGISTRY:
        file = FOLDER / f"{name}.json"
        if not file.exists():
            file.write_text(lines[name] + "\n")


if __name__ == "__main__":
    main()
