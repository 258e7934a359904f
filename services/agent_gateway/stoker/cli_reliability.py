"""`stoker reliability`: what failures will cost a job, before it is submitted."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated

import typer

from stoker_proto import ProblemError, problem

from .reliability import ASSUMED_RATE, Reliability, forecast
from .render_cluster import span
from .shell import Format, Output, out, show


def reliability(
    gpus: Annotated[int, typer.Option(help="how many GPUs the job holds")],
    days: Annotated[float, typer.Option(help="how long it trains")],
    rate: Annotated[float | None, typer.Option(help="failures a GPU-year, as 0.01; 1 % is assumed without it")] = None,
    save_seconds: Annotated[float, typer.Option(help="how long a checkpoint stops training")] = 60.0,
    restart_seconds: Annotated[float, typer.Option(help="from a failure until it trains again")] = 600.0,
    output: Output = Format.table,
) -> None:
    """Say how likely a job is interrupted, how often to checkpoint, and what share of its time will train."""
    used = ASSUMED_RATE if rate is None else rate
    _refuse("--gpus", gpus, gpus > 0, "above 0")
    _refuse("--days", days, days > 0, "above 0")
    _refuse("--rate", used, used >= 0, "0 or more")
    _refuse("--save-seconds", save_seconds, save_seconds > 0, "above 0")
    _refuse("--restart-seconds", restart_seconds, restart_seconds >= 0, "0 or more")
    told = forecast(gpus, days, used, save_s=save_seconds, restart_s=restart_seconds)
    source = "assumed" if rate is None else "given"
    document = {"rate_per_gpu_year": used, "rate_source": source, **asdict(told)}
    show(output, document, lambda: _print(told, f"rate: {used:.3g} failures a GPU-year ({source})"))


def _refuse(flag: str, value: float, holds: bool, wanted: str) -> None:
    if not holds or not math.isfinite(value):
        raise ProblemError(problem("invalid_request", f"{flag} is {value:g}; give a number {wanted}."))


def _print(told: Reliability, rate: str) -> None:
    interval = told.checkpoint_interval_s
    for line in (
        rate,
        f"failure probability: {told.failure_probability:.1%}",
        f"expected interruptions: {told.expected_interruptions:.2f}",
        f"best checkpoint interval: {'-' if interval is None else span(interval * 1000)}",
        f"expected goodput: {told.expected_goodput:.1%}",
    ):
        out.print(line, markup=False, highlight=False)
