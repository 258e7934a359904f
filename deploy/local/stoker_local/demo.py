"""`stoker demo`: a training job on two nodes survives a GPU that falls off the bus, and the log proves it.

The story is told by the events alone: the demo exits 0 only when the log holds every step of it, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stoker import Client
from stoker_chassis.jetstream import connect
from stoker_proto import (
    AttemptPlaced,
    AttemptProgressed,
    AttemptStarted,
    CheckpointSaved,
    Event,
    FindingRecorded,
    JobFailureAttributed,
    JobFinished,
    JobRequeued,
    JobSubmitted,
    MetricBatch,
    MirrorCompleted,
    NodeQuarantined,
    PreflightPassed,
    ProblemError,
    Recorded,
    RunMirrored,
    problem,
    subjects,
)

from .scenario import Fault, Scenario
from .supervisor import Plan, System, running
from .up import ended_by_signals, playing

EXAMPLE = Path("examples/chargpt/job.yaml")
LIMIT_S = 600


@dataclass(frozen=True)
class Chapter:
    """One line of the story: what must have happened, and how the log says it."""

    title: str
    at_ms: int
    detail: str


def tell(records: list[Recorded], job_id: str) -> tuple[list[Chapter], list[str]]:
    """The story of the job from its events, and what is missing from it."""
    ours = [r for r in records if getattr(r.event, "job_id", job_id) == job_id]
    chapters: list[Chapter] = []
    missing: list[str] = []
    cursor = 0

    def next_of(title: str, kind: type[Event], detail: str, **wanted: object) -> Recorded | None:
        nonlocal cursor
        for at in range(cursor, len(ours)):
            event = ours[at].event
            if isinstance(event, kind) and all(getattr(event, k) == v for k, v in wanted.items()):
                cursor = at + 1
                told = detail.format(e=event)
                chapters.append(Chapter(title, ours[at].at_ms, told))
                return ours[at]
        missing.append(title)
        return None

    next_of("submitted", JobSubmitted, "{e.spec.compute.num_accelerators} GPUs, {e.spec.experiment_name}")
    placed = next_of("placed", AttemptPlaced, "attempt 1", attempt=1)
    next_of("preflight", PreflightPassed, "the all-reduce over all ranks gave the right sums", attempt=1)
    next_of("started", AttemptStarted, "on {e.node}", attempt=1)
    next_of("first step", AttemptProgressed, "step {e.step}", attempt=1)
    saved = next_of("checkpoint", CheckpointSaved, "step {e.step}", attempt=1)
    fault = next_of("fault", FindingRecorded, "{e.result.check} on {e.node}: {e.result.detail}")
    next_of("quarantined", NodeQuarantined, "{e.node}: {e.reason}")
    # The quarantine may stop the gang before a rank's own end is reported: then nothing failed unasked, and nobody
    # needs to be blamed for it.
    if any(isinstance(r.event, JobFailureAttributed) for r in ours):
        told = "{e.outcome}, blame {e.blame}: {e.problem.detail}"
        next_of("blamed", JobFailureAttributed, told, attempt=1, retry=True)
    next_of("requeued", JobRequeued, "{e.cause}", attempt=1)
    again = next_of("placed again", AttemptPlaced, "attempt 2", attempt=2)
    resumed = next_of("resumed", AttemptStarted, "at step {e.resume_step} on {e.node}", attempt=2)
    next_of("finished", JobFinished, "{e.state} after {e.attempts} attempts", state="succeeded")
    if placed and again and fault:
        bad = fault.event.node  # type: ignore[attr-defined]
        if bad not in {a.node for a in placed.event.allocations}:  # type: ignore[attr-defined]
            missing.append("the fault lay on a node of the gang")
        if bad in {a.node for a in again.event.allocations}:  # type: ignore[attr-defined]
            missing.append("the second attempt avoids the node that failed")
    if resumed and saved and not (resumed.event.resume_step or 0) > 0:  # type: ignore[attr-defined]
        missing.append("the second attempt resumed from a checkpoint")
    return chapters, missing


@dataclass(frozen=True)
class Loss:
    """What the fault cost."""

    steps: int
    seconds: float
    gpu_seconds: float


def lost(records: list[Recorded], job_id: str, last_step: int) -> Loss:
    """Steps done again, seconds from the fault to the resumed ranks, and GPU time held in all."""
    ours = [r for r in records if getattr(r.event, "job_id", None) == job_id]
    fault_ms = next(r.at_ms for r in records if isinstance(r.event, FindingRecorded))
    resumed = next(r for r in ours if isinstance(r.event, AttemptStarted) and r.event.attempt == 2)
    assert isinstance(resumed.event, AttemptStarted)
    finished = next(r.event for r in ours if isinstance(r.event, JobFinished))
    steps = max(0, last_step - (resumed.event.resume_step or 0))
    return Loss(steps, (resumed.at_ms - fault_ms) / 1000, finished.gpu_ms / 1000)


@dataclass(frozen=True)
class Story:
    """What happened to the job; it is whole when nothing is missing."""

    job_id: str
    chapters: tuple[Chapter, ...]
    missing: tuple[str, ...]
    loss: Loss | None
    mlflow_url: str


async def _demo(keep: bool, data: Path, console: Console, as_json: bool) -> int:
    if not EXAMPLE.exists():
        detail = f"{EXAMPLE} is not here; run the demo from the root of a checkout"
        raise ProblemError(problem("invalid_request", detail))
    # Simulated nodes even where there are real GPUs: those cannot be made to fail, and one machine is one node.
    plan = Plan(data=data, nodes=3, gpus_per_node=2)
    fault = Fault(kind="xid", code=79, gpu=0, node="last", after_checkpoints=2, delay_seconds=1.5)
    scenario = Scenario(faults=(fault,))
    with ended_by_signals(), console.status("Starting the local system") as status:

        def starting(line: str) -> None:
            status.update(f"Starting the local system: {line.strip()}")

        def training(what: str) -> None:
            status.update(f"Training: {what}")

        async with running(plan, starting) as system, playing(scenario, system):
            story = await _train(system, console, training)
            status.stop()
            if as_json:
                print(json.dumps(asdict(story)), flush=True)
            else:
                _print(console, story)
            if keep:
                console.print(f"\nEverything keeps running in {system.layout.data}. Ctrl-C stops it.")
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
    return 1 if story.missing else 0


async def _train(system: System, console: Console, say: Callable[[str], None]) -> Story:
    """Submit the example, follow the log to the end of its mirror, and tell its story."""
    with Client(system.card.url, system.card.token) as client:
        job_id = str((await asyncio.to_thread(client.submit, EXAMPLE))["job_id"])
    console.print(f"Submitted [bold]{job_id}[/bold]")
    records: list[Recorded] = []
    run_url, last_step = "", 0
    async with asyncio.timeout(LIMIT_S), connect(system.card.nats_url, "demo") as bus:
        async for recorded in bus.log.follow():
            records.append(recorded)
            event = recorded.event
            if getattr(event, "job_id", None) == job_id:
                say(type(event).__name__)
            if isinstance(event, RunMirrored) and event.job_id == job_id:
                run_url = event.url
            if isinstance(event, MirrorCompleted) and event.job_id == job_id:
                break
        async for sample in bus.telemetry.follow(subjects.metric(job_id, 1), wait=False):
            points = MetricBatch.model_validate_json(sample.payload).points
            last_step = max([last_step, *(p.step for p in points)])
    chapters, missing = tell(records, job_id)
    loss = None if missing else lost(records, job_id, last_step)
    return Story(job_id, tuple(chapters), tuple(missing), loss, run_url)


def _print(console: Console, story: Story) -> None:
    table = Table(title="What happened, from the log", title_justify="left")
    for column in ("after", "what", "detail"):
        table.add_column(column, justify="right" if column == "after" else "left")
    for chapter in story.chapters:
        after = (chapter.at_ms - story.chapters[0].at_ms) / 1000
        table.add_row(f"{after:.2f} s", chapter.title, escape(chapter.detail))
    console.print(table)
    for what in story.missing:
        console.print(f"[red]did not happen:[/red] {what}")
    if story.loss is not None:
        cost = story.loss
        console.print(f"\nLost to the fault: {cost.steps} steps done again,", end=" ")
        console.print(f"{cost.seconds:.1f} s from the fault to the resumed ranks.")
        console.print(f"GPU time held: {cost.gpu_seconds:.0f} GPU-seconds.")
    console.print(f"MLflow: {story.mlflow_url}", soft_wrap=True)


def demo(*, keep: bool = False, data: Path | None = None, as_json: bool = False) -> int:
    """Run the demo; 0 only when all of it truly happened, 130 when it was interrupted.

    Without `data` the folder is temporary unless everything is kept. With `as_json` stdout holds the story as one JSON
    document.
    """
    console = Console(stderr=as_json)
    try:
        if data or keep:
            return asyncio.run(_demo(keep, data or Path("stoker-data"), console, as_json))
        with tempfile.TemporaryDirectory(prefix="stoker-demo-") as folder:
            return asyncio.run(_demo(keep, Path(folder), console, as_json))
    except asyncio.CancelledError:
        return 130
