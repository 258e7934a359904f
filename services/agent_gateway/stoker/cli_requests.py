"""`stoker cancel`, `hold`, `release` and `priority`: what may be asked of a job that is in, or of a whole array."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .client import Client
from .shell import Format, Output, Why, out, show

UNFINISHED = ("queued", "active")
JobsId = Annotated[str, typer.Argument(help="the id of a job, or of an array")]


def register(app: typer.Typer) -> None:
    for command in (cancel, hold, release):
        app.command()(command)
    app.command(context_settings={"ignore_unknown_options": True})(priority)  # a number may begin with a minus


def cancel(job_id: JobsId, reason: Why = "", output: Output = Format.table) -> None:
    """Ask for the end of a job, or of all jobs of an array. It is over when `stoker get` says cancelled."""
    with Client() as client:
        told = client.cancel(job_id, reason)
    over = "state" in told and told["state"] not in UNFINISHED
    _done(output, told, "is already over" if over else "is being cancelled")


def hold(job_id: JobsId, reason: Why = "", output: Output = Format.table) -> None:
    """Let a job, or all jobs of an array, start no new attempt until it is released; what runs goes on."""
    with Client() as client:
        told = client.hold(job_id, reason)
    _done(output, told, "is held")


def release(job_id: JobsId, reason: Why = "", output: Output = Format.table) -> None:
    """Let a held job, or all held jobs of an array, start again."""
    with Client() as client:
        told = client.release(job_id, reason)
    _done(output, told, "is released")


def priority(
    job_id: JobsId,
    number: Annotated[int, typer.Argument(min=-1000, max=1000, help="a higher one goes first")],
    output: Output = Format.table,
) -> None:
    """Give a job, or all jobs of an array, another place inside queue and class."""
    with Client() as client:
        told = client.set_priority(job_id, number)
    _done(output, told, f"has priority {number}")


def _done(output: Format, told: dict[str, Any], what: str) -> None:
    if "jobs" in told:
        count = len(told["jobs"])
        line = f"{told['array_id']}: {count} unfinished job{'s' if count != 1 else ''}; each {what}"
    else:
        line = f"{told['job_id']} {what} ({told['state']})"
    show(output, told, lambda: out.print(line, markup=False, highlight=False))
