"""How things look to people: tables and Problems on a terminal. What users and machines wrote is shown as it is."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from stoker_proto import Problem

STATE_STYLE = {
    "queued": "yellow", "active": "cyan", "succeeded": "green", "failed": "red", "cancelled": "magenta",
    "expired": "red", "ready": "green", "suspect": "yellow", "degraded": "red", "quarantined": "red",
    "validating": "cyan", "unknown": "magenta", "held": "magenta",
}  # fmt: skip


def styled(state: str) -> str:
    style = STATE_STYLE.get(state)
    return f"[{style}]{state}[/{style}]" if style else escape(state)


def clock(at_ms: int | None) -> str:
    return datetime.fromtimestamp(at_ms / 1000).strftime("%H:%M:%S") if at_ms else "-"


def job_state(job: dict[str, Any]) -> str:
    if job.get("cancelling"):
        return "cancelling"
    return "held" if job["held"] and job["state"] == "queued" else str(job["state"])


def table_of(*columns: str, yielding: tuple[str, ...]) -> Table:
    """On a narrow terminal the yielding columns give way to the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column not in yielding)
    return table


def cut(text: str) -> Text:
    """One line, however narrow."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def jobs_table(jobs: list[dict[str, Any]]) -> Table:
    queues = any(job["queue"] != "default" for job in jobs)
    columns = ("job", "experiment", *(("queue",) if queues else ()), "state", "GPUs", "step", "submitted", "why")
    table = table_of(*columns, yielding=("experiment", "why"))
    for job in jobs:
        why = job["problem"]["detail"] if job.get("problem") else ""
        why = job["reasons"][0]["message"] if job.get("reasons") else why
        table.add_row(
            job["job_id"], cut(job["experiment_name"]), *((escape(job["queue"]),) if queues else ()),
            styled(job_state(job)), str(job["spec"]["compute"]["num_accelerators"]),
            str(job["step"] if job["step"] is not None else "-"), clock(job["submitted_ms"]), cut(why),
        )  # fmt: skip
    return table


def nodes_table(nodes: list[dict[str, Any]]) -> Table:
    table = table_of("node", "health", "GPUs", "holds", "reason", yielding=("holds", "reason"))
    for node in nodes:
        models = sorted({g["model"] for g in node["gpus"]})
        table.add_row(
            escape(node["node"]), styled(node["verdict"]), escape(f"{len(node['gpus'])} x {'/'.join(models) or '-'}"),
            ", ".join(node["holds"]) or "-", escape(node["reason"] or ""),
        )  # fmt: skip
    return table


def timeline_table(lines: list[dict[str, Any]]) -> Table:
    table = table_of("after", "what", "detail", yielding=("detail",))
    table.columns[0].justify = "right"
    for line in lines:
        after = f"{(line['at_ms'] - lines[0]['at_ms']) / 1000:.2f} s"
        table.add_row(after, escape(line["what"]), escape(line["detail"]))
    return table


def print_job(console: Console, job: dict[str, Any]) -> None:
    console.print(f"[bold]{job['job_id']}[/bold]  {styled(job_state(job))}  {escape(job['experiment_name'])}")
    compute = job["spec"]["compute"]
    console.print(
        f"asked      {compute['num_accelerators']} GPUs as {compute['accelerator_type']}, {compute['priority_class']}"
    )
    told = [f"queue {job['queue']}", f"priority {job['priority']}"]
    told += [word for word in ("boosted", "held") if job[word]]
    told += [f"job {job['array_index']} of {job['array_id']}"] if job["array_id"] else []
    console.print("order      " + ", ".join(told), markup=False, highlight=False)
    console.print(f"submitted  {clock(job['submitted_ms'])} by {escape(job['actor'])}")
    for attempt in job["attempts"]:
        resumed = f", resumed at step {attempt['resume_step']}" if attempt.get("resume_step") is not None else ""
        ended = f": {attempt['outcome']}" if attempt.get("outcome") else ""
        console.print(
            f"attempt {attempt['number']}  {attempt['state']} on {escape(', '.join(attempt['nodes']))}{resumed}{ended}"
        )
    if job["step"] is not None:
        console.print(f"step       {job['step']} (checkpoint at {job['checkpoint_step']})")
    if job["finished_ms"]:
        console.print(f"finished   {clock(job['finished_ms'])}, {job['gpu_ms'] / 1000:.0f} GPU-seconds")
    if job["mlflow_url"]:
        console.print(f"MLflow     {escape(job['mlflow_url'])}", soft_wrap=True)
    print_reasons(console, job["reasons"])
    if job["problem"]:
        print_problem(console, Problem.model_validate(job["problem"]))


def print_reasons(console: Console, reasons: list[dict[str, Any]]) -> None:
    for place, reason in enumerate(reasons):
        lead = "waits because" if place == 0 else "         also"
        console.print(f"{lead} [yellow]{reason['code']}[/yellow]: {escape(reason['message'])}")
        for blocker in reason["blockers"]:
            console.print(f"               blocked by {escape(blocker)}")
        for action in reason["actions"]:
            console.print(f"               you may {escape(action)}")


def print_problem(console: Console, told: Problem) -> None:
    """What, where, how to fix."""
    console.print(f"[red bold]{told.title}[/red bold] ({told.code}, origin: {told.origin})")
    console.print(told.detail, markup=False)
    for error in told.errors:
        place = f"line {error.line}: " if error.line else ""
        hint = f" (try {error.suggestion})" if error.suggestion and error.suggestion not in error.message else ""
        console.print(f"  {place}{error.pointer or '/'}: {error.message}{hint}", markup=False)
    for line in told.evidence:
        console.print(f"  {line.stream} | {line.line}", markup=False)
    for action in told.next_actions:
        console.print(f"  -> {action}", markup=False)
