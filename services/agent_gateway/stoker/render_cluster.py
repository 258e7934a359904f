"""How queues, classes, windows, plans and changes look to people."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .render import cut, print_reasons, table_of

Row = dict[str, Any]


def gpus(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:g}"


def span(ms: float) -> str:
    """A stretch of time in the largest unit that tells it well."""
    seconds = ms / 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def queues_table(told: Row) -> Table:
    table = table_of(
        "queue", "share", "used", "nominal", "borrowed", "lent", "active", "waiting", "GPU-h", yielding=("queue",)
    )
    for column in table.columns[1:]:
        column.justify = "right"
    depth: dict[str | None, int] = {None: -1}
    for queue in told["queues"]:  # parents before children
        depth[queue["name"]] = depth.get(queue["parent"], -1) + 1
        closed = "" if queue["window_open"] else " (closed)"
        waiting = f"{queue['waiting_jobs']} ({gpus(queue['waiting_gpus'])})" if queue["waiting_jobs"] else "-"
        table.add_row(
            cut("  " * depth[queue["name"]] + queue["name"] + closed), f"{queue['share'] / 10:g} %",
            gpus(queue["used"]), gpus(queue["nominal"]), gpus(queue["borrowed"]), gpus(queue["lent"]),
            str(queue["active_jobs"]), waiting, f"{queue['past_gpu_hours']:.1f}",
        )  # fmt: skip
    table.caption = (
        f"{gpus(told['gpus'])} GPUs, {gpus(told['gpus_free'])} free, {gpus(told['gpus_claimed'])} claimed; used, "
        f"nominal, borrowed, lent in GPUs; active in jobs, waiting in jobs (GPUs); cluster version {told['version']}"
    )
    table.caption_justify = "left"
    return table


def print_queue(console: Console, queue: Row) -> None:
    above = f", below {escape(queue['parent'])}" if queue["parent"] else ""
    console.print(f"[bold]{escape(queue['name'])}[/bold]{above}, weight {queue['weight']}")
    lines = {
        "share": f"{queue['share'] / 10:g} % of the cluster",
        "used": f"{gpus(queue['used'])} GPUs in {queue['active_jobs']} jobs"
        + "".join(f", {gpus(amount)} {model}" for model, amount in queue["used_by_model"].items()),
        "nominal": f"{gpus(queue['nominal'])}, limit {gpus(queue['limit'])}, lends {gpus(queue['lend'])}",
        "borrowed": f"{gpus(queue['borrowed'])}, lent {gpus(queue['lent'])}",
        "past": f"{queue['past_gpu_hours']:.1f} GPU-hours",
        "waiting": f"{queue['waiting_jobs']} jobs for {gpus(queue['waiting_gpus'])} GPUs",
    } | ({} if queue["window_open"] else {"window": "closed"})
    for what, told in lines.items():
        console.print(f"{what:<9}  {told}", markup=False, highlight=False)
    if queue["shapes"]:
        table = table_of("waiting", "class", "jobs", "GPUs", "for", "first", "why", yielding=("why",))
        for shape in queue["shapes"]:
            table.add_row(
                escape(shape["shape"]), escape(shape["priority_class"]), str(shape["jobs"]), gpus(shape["gpus"]),
                span(shape["waiting_ms"]), escape(shape["first_job"]), escape(f"{shape['reason']}: {shape['message']}"),
            )  # fmt: skip
        console.print(table)


def classes_table(classes: list[Row]) -> Table:
    table = table_of("class", "value", "preemptible", "grace", "may borrow", yielding=())
    for entry in sorted(classes, key=lambda c: -c["value"]):
        grace = "as the job says" if entry["grace_seconds"] is None else f"{entry['grace_seconds']:g} s"
        table.add_row(
            escape(entry["name"]), str(entry["value"]), _yes(entry["preemptible"]), grace, _yes(entry["may_borrow"])
        )
    return table


def windows_table(windows: list[Row]) -> Table:
    table = table_of("window", "days", "from", "to", "zone", "when it closes", yielding=())
    for entry in windows:
        table.add_row(
            escape(entry["name"]), ", ".join(entry["days"]), entry["start"], entry["end"], escape(entry["zone"]),
            entry["on_close"],
        )  # fmt: skip
    return table


def changes_lines(changes: list[Row]) -> list[str]:
    """One line a difference: added, removed, or from what to what."""
    lines = []
    for change in changes:
        old, new = (json.dumps(change[side], ensure_ascii=False) for side in ("old", "new"))
        told = {"added": new, "removed": old, "changed": f"{old} -> {new}"}[change["kind"]]
        lines.append(f"{ {'added': '+', 'removed': '-', 'changed': '~'}[change['kind']] } {change['path']}  {told}")
    return lines


def print_plan(console: Console, plan: Row) -> None:
    starts = {
        "now": f"starts now on {', '.join(plan['nodes'])}",
        "later": "starts later" + estimate(plan),
        "never": "never starts, as the cluster is",
    }.get(plan["starts"], plan["starts"])
    console.print(starts, markup=False, highlight=False)
    print_reasons(console, plan["reasons"])
    print_displaced(console, plan["displaces"])


def estimate(told: Row) -> str:
    """When it may start, and behind how many jobs."""
    at, ahead = told["starts_ms"], told["ahead"]
    if at is not None and at <= told["at_ms"]:
        return ", about to start"
    when = "" if at is None else f", in about {span(at - told['at_ms'])}"
    return when + (f", behind {ahead} job{'s' if ahead != 1 else ''}" if ahead else "")


def print_displaced(console: Console, displaced: list[Row]) -> None:
    for victim in displaced:
        told = (
            f"preempts {victim['job_id']} ({victim['queue']}, {victim['priority_class']}; {victim['rule']}), "
            f"which loses {victim['lost_gpu_seconds']:.0f} GPU-seconds"
        )
        console.print(told, markup=False, highlight=False)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
