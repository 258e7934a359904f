"""The figures of a simulation as tables for people and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from .measure import Result, Waits


def as_json(result: Result, notes: tuple[str, ...]) -> str:
    body: dict[str, Any] = asdict(result)
    for name in ("waits_by_class", "waits_by_queue", "waits_by_gpus"):
        body[name] = {group: waits._asdict() for group, waits in getattr(result, name).items()}
    body["waits"] = result.waits._asdict()
    body["over_time"] = [point._asdict() for point in result.over_time]
    return json.dumps(body | {"notes": list(notes)}, indent=2)


def show(console: Console, result: Result) -> None:
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column()
    for name, value in _facts(result):
        facts.add_row(name, value)
    console.print(facts)
    table = Table(box=None, pad_edge=False, title="queue time: submission to first start", title_justify="left")
    for column in ("", "jobs", "mean", "p50", "p99", "max"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("all", *_cells(result.waits))
    for label, groups in (
        ("class", result.waits_by_class), ("queue", result.waits_by_queue), ("GPUs", result.waits_by_gpus),
    ):  # fmt: skip
        if len(groups) > 1:
            for group, waits in groups.items():
                table.add_row(f"{label} {group}", *_cells(waits))
    console.print(table)


def _facts(result: Result) -> list[tuple[str, str]]:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in result.outcomes.items()) or "none"
    going = result.jobs - result.finished - result.never_started
    waiting = f", {going} not over" if going else ""
    waiting += f", {result.never_started} never started" if result.never_started else ""
    stops = "".join(f", {count} stopped: {name}" for name, count in result.other_stops.items())
    return [
        ("nodes", f"{result.nodes}, {result.gpus:g} GPUs"),
        ("jobs", f"{result.jobs}; over: {outcomes}{waiting}"),
        ("allocation", f"{result.allocation:.1%} of GPU time held"),
        ("utilisation", f"{result.utilisation:.1%} of GPU time of use"),
        ("fragmentation", f"{result.fragmentation:.1%} of GPU time idle on nodes partly in use"),
        ("preemptions", f"{result.preemptions} of {result.preempted_jobs} jobs{stops}"),
        ("wasted", f"{result.wasted_gpu_s / 3600:,.1f} GPU-hours of work done and lost"),
        ("mean slowdown", f"{result.mean_slowdown:.2f}"),
        ("makespan", duration(result.makespan_s)),
    ]


def _cells(waits: Waits) -> tuple[str, ...]:
    return (str(waits.jobs), *(duration(value) for value in waits[1:]))


def duration(seconds: float) -> str:
    """Seconds as people say it."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"
