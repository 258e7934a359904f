"""Builds the history of the demo: a GPU falls off the bus in mid-training and the job resumes on other nodes.

The scheduler's own core decides; everything else is told by hand. `python -m tests.replay.history FILE` writes it. A
golden file is never rewritten once it was released: a changed history gets a new file.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from stoker_proto import (
    AllReduceSum,
    AttemptExited,
    AttemptPlaced,
    AttemptPrepared,
    AttemptProgressed,
    AttemptReleased,
    AttemptStarted,
    CheckpointSaved,
    CheckResult,
    Event,
    FindingRecorded,
    Gpu,
    JobFailureAttributed,
    JobFinished,
    JobSpec,
    JobSubmitted,
    LeaderElected,
    LogsSealed,
    MirrorCompleted,
    NodeJoined,
    NodeQuarantined,
    NodeReady,
    NodeScanned,
    PreflightPassed,
    PreflightReported,
    PreflightStarted,
    RankExit,
    Recorded,
    RunMirrored,
    SealedStream,
    SelfTested,
    StopReason,
    problem,
    seal,
    to_line,
)
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler

BEGAN = datetime(2026, 12, 1, 2, 0, tzinfo=UTC)
JOB = "01KC0QX5E8M3T7V9W2Y4Z6A8BC"
SPEC = JobSpec.model_validate(
    {
        "experiment_name": "chargpt",
        "compute": {"accelerator_type": "GPU_2xSIM", "num_accelerators": 4},
        "code_source": {"root_path": "."},
        "entrypoint": "train.py",
        "parameters": {"max_steps": 240, "optimizer": {"name": "adamw", "lr": 3e-4}, "seed": 1},
        "metric": {"name": "loss", "direction": "minimize"},
        "outputs": {"checkpoints": {"keep": 3, "resume": "auto"}},
        "labels": {"stage": "demo"},
    }
)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def epoch(node: str) -> str:
    return f"boot-{digest(node)[:12]}"


def gpus(node: str) -> tuple[Gpu, ...]:
    made = (f"GPU-sim-{node}-{i}" for i in range(2))
    return tuple(
        Gpu(uuid=uuid, index=i, model="SIM", name="Simulated GPU", memory_bytes=16 * 2**30)
        for i, uuid in enumerate(made)
    )


def checks(node: str) -> tuple[CheckResult, ...]:
    return tuple(CheckResult(check="gpu_present", status="ok", entity=gpu.uuid) for gpu in gpus(node))


class History:
    """A log in the making: whoever tells something, the scheduler decides until it has nothing more to say."""

    def __init__(self) -> None:
        self.records: list[Recorded] = []
        self._ms = 0
        self._scheduler = Scheduler(Timing())
        self._leads = False

    def _append(self, source: str, event: Event, id: str | None, actor: str | None = None) -> Recorded:
        seq = len(self.records) + 1
        moment = BEGAN + timedelta(milliseconds=self._ms)
        told = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        envelope = seal(event, id=id or f"01KC0R{seq:020d}", source=source, time=told, actor=actor or source)
        recorded = Recorded(seq=seq, at_ms=int(moment.timestamp() * 1000) + 1, envelope=envelope, event=event)
        self.records.append(recorded)
        self._scheduler.evolve(recorded)
        return recorded

    def tell(
        self, source: str, *events: Event, after_ms: int = 3, id: str | None = None, actor: str | None = None
    ) -> None:
        for event in events:
            self._ms += after_ms
            self._append(source, event, id, actor)
            self._decide()

    def lead(self, service: str, holder: str) -> None:
        self.tell(holder, LeaderElected(service=service, holder=holder))
        if service == "scheduler":
            self._leads = True
            self._decide()

    def _decide(self) -> None:
        while self._leads:
            decisions = self._scheduler.decide(self.records[-1].at_ms)
            if not decisions:
                return
            for decision in decisions:
                self._ms += 2
                self._append("scheduler-1", decision.event, decision.id)

    def placed(self) -> AttemptPlaced:
        return next(r.event for r in reversed(self.records) if isinstance(r.event, AttemptPlaced))


def join(history: History, node: str) -> None:
    joined = NodeJoined(
        node=node, boot_epoch=epoch(node), gpus=gpus(node), cpus=8, memory_bytes=32 * 2**30, simulated=True
    )
    history.tell(f"launcher/{node}", joined, id=f"joined:{node}:{epoch(node)}")
    began = len(history.records)
    tested = SelfTested(
        node=node, boot_epoch=epoch(node), cause="joined", began_seq=began, passed=True, results=checks(node)
    )
    history.tell(f"health/{node}", tested, after_ms=400)
    history.tell("health/node-1", NodeReady(node=node, boot_epoch=epoch(node), rule="self-test", reason="passed"))


def start(history: History, placed: AttemptPlaced, resume_step: int | None) -> None:
    """Preparation, preflight and start of an attempt."""
    number, fence = placed.attempt, placed.fence
    nodes = [a.node for a in placed.allocations]
    resume = {} if resume_step is None else {"resume_path": f"checkpoints/{JOB}/step-{resume_step}"}
    for rank, node in enumerate(nodes):
        meeting = {"master_addr": "127.0.0.1", "master_port": 23456, "resume_step": resume_step, **resume}
        prepared = AttemptPrepared(job_id=JOB, attempt=number, node=node, fence=fence, **(meeting if rank == 0 else {}))
        history.tell(f"launcher/{node}", prepared, id=f"prepared:{JOB}:{number}:{node}", after_ms=8)
    if placed.preflight == "required":
        preflight(history, number, nodes)
    for rank, node in enumerate(nodes):
        begun = AttemptStarted(
            job_id=JOB, attempt=number, node=node, fence=fence, ranks=(2 * rank, 2 * rank + 1), resume_step=resume_step
        )
        history.tell(f"launcher/{node}", begun, id=f"started:{JOB}:{number}:{node}", after_ms=12)


def preflight(history: History, number: int, nodes: Sequence[str]) -> None:
    for rank, node in enumerate(nodes):
        meeting = {"master_addr": "127.0.0.1", "master_port": 23400} if rank == 0 else {}
        entered = PreflightStarted(node=node, boot_epoch=epoch(node), job_id=JOB, attempt=number, round=1, **meeting)
        history.tell(f"health/{node}", entered)
    for rank, node in enumerate(nodes):
        sums = tuple(AllReduceSum(rank=r, slots=(0, 1, 2, 3), seconds=0.021) for r in (2 * rank, 2 * rank + 1))
        reported = PreflightReported(
            node=node, boot_epoch=epoch(node), job_id=JOB, attempt=number, round=1, results=checks(node), sums=sums
        )
        history.tell(f"health/{node}", reported, after_ms=60)
    passed = PreflightPassed(job_id=JOB, attempt=number, nodes=tuple(nodes))
    history.tell("health/node-1", passed, id=f"preflight:{JOB}:{number}")


def train(history: History, placed: AttemptPlaced, steps: Sequence[int], saved: Sequence[int]) -> None:
    """Steps reached, and checkpoints of some of them."""
    head = placed.allocations[0].node
    for step in steps:
        progressed = AttemptProgressed(job_id=JOB, attempt=placed.attempt, step=step)
        history.tell(f"launcher/{head}", progressed, after_ms=2500)
        if step in saved:
            checkpoint = CheckpointSaved(
                job_id=JOB, attempt=placed.attempt, step=step, path=f"checkpoints/{JOB}/step-{step}", bytes=843_216
            )
            history.tell(f"launcher/{head}", checkpoint, after_ms=40, id=f"saved:{JOB}:{placed.attempt}:{step}")


def seal_logs(history: History, placed: AttemptPlaced) -> None:
    for rank, allocation in enumerate(placed.allocations):
        node = allocation.node
        names = [f"rank-{r}.{kind}" for r in (2 * rank, 2 * rank + 1) for kind in ("stdout", "stderr")]
        if rank == 0:
            names.append("rank-0.metrics")
        streams = tuple(
            SealedStream(stream=name, digest=digest(f"{placed.attempt} {name}"), lines=120, bytes=4096)
            for name in names
        )
        logs = LogsSealed(job_id=JOB, attempt=placed.attempt, node=node, fence=placed.fence, streams=streams)
        history.tell(f"launcher/{node}", logs, id=f"sealed:{JOB}:{placed.attempt}:{node}", after_ms=15)


def leave(
    history: History, placed: AttemptPlaced, node: str, ranks: tuple[RankExit, ...], asked: StopReason | None = None
) -> None:
    """A node's part of the attempt ends and frees its GPUs."""
    failed = any(rank.code != 0 for rank in ranks)
    exited = AttemptExited(
        job_id=JOB, attempt=placed.attempt, node=node, fence=placed.fence,
        outcome="infra_comm" if failed else "ok", asked=asked, ranks=ranks,
        before_stop=tuple(rank.rank for rank in ranks) if asked is None else (),
    )  # fmt: skip
    history.tell(f"launcher/{node}", exited, id=f"exited:{JOB}:{placed.attempt}:{node}", after_ms=20)


def release(history: History, placed: AttemptPlaced, node: str) -> None:
    freed = AttemptReleased(
        job_id=JOB, attempt=placed.attempt, node=node, fence=placed.fence, proof="process group gone, devices free"
    )
    history.tell(f"launcher/{node}", freed, id=f"released:{JOB}:{placed.attempt}:{node}", after_ms=10)


def lose_gpu(history: History, placed: AttemptPlaced) -> None:
    """XID 79 on the second node: finding, quarantine, both nodes' ranks end, and the blame."""
    head, bad = (a.node for a in placed.allocations)
    uuid = placed.allocations[1].gpus[0]
    lost = CheckResult(
        check="xid", status="bad", entity=uuid, severity="fatal", value=79.0,
        detail="XID 79: the GPU has fallen off the bus", action="reboot",
    )  # fmt: skip
    finding_id = digest(f"{bad} {epoch(bad)} xid {uuid} 79")[:16]
    found = FindingRecorded(node=bad, boot_epoch=epoch(bad), finding_id=finding_id, result=lost)
    history.tell(f"health/{bad}", found, after_ms=310, id=f"finding:{finding_id}")
    verdict = NodeQuarantined(
        node=bad, boot_epoch=epoch(bad), rule="fatal-finding", reason=lost.detail, evidence=(finding_id,)
    )
    history.tell("health/node-1", verdict)
    aborted = RankExit(rank=2, signal=6, stderr_tail=("CUDA error: device unavailable",))
    cascade = RankExit(
        rank=3, code=1, error_type="RuntimeError", error="RuntimeError: Connection closed by peer [127.0.0.1]:41234"
    )
    leave(history, placed, bad, (aborted, cascade))
    release(history, placed, bad)
    leave(history, placed, head, (RankExit(rank=0, signal=9), RankExit(rank=1, signal=9)), asked="node_quarantined")
    release(history, placed, head)
    for node in (head, bad):
        scanned = NodeScanned(node=node, boot_epoch=epoch(node), job_id=JOB, attempt=placed.attempt)
        history.tell(f"health/{node}", scanned)
    blamed = JobFailureAttributed(
        job_id=JOB, attempt=placed.attempt, outcome="infra_gpu", blame="node", confidence="established", node=bad,
        first_rank=2, evidence=(finding_id,), retry=True, exclude_nodes=(bad,),
        problem=problem("gpu_fault", f"{lost.detail} on {bad}", facts={"node": bad, "gpu": uuid}),
    )  # fmt: skip
    history.tell("health/node-1", blamed, id=f"attributed:{JOB}:{placed.attempt}")
    seal_logs(history, placed)


def xid79() -> list[Recorded]:
    history = History()
    history.lead("health", "health/node-1")
    history.lead("scheduler", "scheduler-1")
    for node in ("node-1", "node-2", "node-3"):
        join(history, node)
    history.tell(
        "gateway",
        JobSubmitted(
            job_id=JOB, spec=SPEC, spec_hash=digest(SPEC.model_dump_json()), code=digest("code tree"),
            idempotency_key="demo-1", fingerprint=digest("body"),
        ),
        after_ms=900, id=f"submitted:{JOB}", actor="alice",
    )  # fmt: skip
    mirrored = RunMirrored(job_id=JOB, experiment_id="1", run_id=digest("run")[:32], url="http://127.0.0.1:5000/#/r")
    history.tell("tracker", mirrored, id=f"mirrored:{JOB}:{mirrored.run_id}")

    first = history.placed()
    start(history, first, None)
    train(history, first, (1, 40, 80, 110), saved=(40, 80))
    lose_gpu(history, first)

    second = history.placed()
    start(history, second, 80)
    train(history, second, (81, 120, 160, 200, 240), saved=(120, 160, 200, 240))
    for rank, allocation in enumerate(second.allocations):
        leave(history, second, allocation.node, (RankExit(rank=2 * rank, code=0), RankExit(rank=2 * rank + 1, code=0)))
        release(history, second, allocation.node)
    seal_logs(history, second)
    assert isinstance(history.records[-1].event, JobFinished)
    done = MirrorCompleted(job_id=JOB, run_id=mirrored.run_id, points=350)
    history.tell("tracker", done, after_ms=200, id=f"mirror-completed:{JOB}:{mirrored.run_id}")
    return history.records


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(f"{to_line(recorded)}\n" for recorded in xid79()))
