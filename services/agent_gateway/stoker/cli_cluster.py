"""`stoker apply`, `queue`, `class` and `window`: how the cluster is shared, as a whole and entry by entry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .client import Client
from .edits import Edit, field, found, model_quota, name, number, put, quota, remove
from .render_cluster import changes_lines, classes_table, print_queue, queues_table, windows_table
from .shell import Format, Output, Why, err, out, show

DECLINED = 9

queue_app = typer.Typer(help="Queues: their shares, quotas and what waits in them.")
class_app = typer.Typer(no_args_is_help=True, help="Priority classes: who goes before whom, and who may be preempted.")
window_app = typer.Typer(no_args_is_help=True, help="Windows: the hours of the week in which jobs may start.")

QueueName = Annotated[str, typer.Argument(metavar="NAME", help="the queue's name")]
ClassName = Annotated[str, typer.Argument(metavar="NAME", help="the class's name")]
WindowName = Annotated[str, typer.Argument(metavar="NAME", help="the window's name")]


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", help="the cluster configuration, a YAML file")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would change")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask before it is applied")] = False,
    reason: Why = "",
    output: Output = Format.table,
) -> None:
    """Put a cluster configuration in force, whole, after showing what it changes."""
    with Client() as client:
        told = client.cluster_diff(file)
        if dry_run:
            show(output, told, lambda: _print_diff(told))
            return
        if output is Format.table:
            _print_diff(told)
            if told["diff"] and not yes and not _agreed(told["version"] + 1):
                err.print("nothing was changed")
                raise typer.Exit(DECLINED)
        configured = client.configure(file, version=told["version"], reason=reason)
    show(output, configured, lambda: out.print(f"version {configured['version']} is in force"))


def _print_diff(told: dict[str, Any]) -> None:
    for line in changes_lines(told["diff"]) or [f"no difference from version {told['version']}"]:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _agreed(version: int) -> bool:
    try:
        return typer.confirm(f"Apply as version {version}?", err=True)
    except typer.Abort:  # nobody there to answer
        err.print()
        return False


def _edit(change: Edit, reason: str, output: Format) -> None:
    with Client() as client:
        told = client.edit_cluster(change, reason)

    def table() -> None:
        for line in changes_lines(told["diff"]):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        out.print(f"version {told['version']} is in force" + ("" if told["changed"] else "; nothing to change"))

    show(output, told, table)


@queue_app.callback(invoke_without_command=True)
def queue(context: typer.Context, output: Output = Format.table) -> None:
    """List queues."""
    if context.invoked_subcommand is None:
        list_queues(output)


@queue_app.command("list")
def list_queues(output: Output = Format.table) -> None:
    """List queues with their shares, what they hold, borrow and lend, and what waits."""
    with Client() as client:
        told = client.queues()
    show(output, told, lambda: out.print(queues_table(told)))


@queue_app.command("show")
def show_queue(queue_name: QueueName, output: Output = Format.table) -> None:
    """Show one queue, and the jobs that wait in it by shape and reason."""
    with Client() as client:
        one = found(client.queues()["queues"], "queue", queue_name)
    show(output, one, lambda: print_queue(out, one))


@queue_app.command("set")
def set_queue(
    queue_name: QueueName,
    parent: Annotated[str | None, typer.Option(help="the queue above it; none: at the top")] = None,
    weight: Annotated[str | None, typer.Option(help="its part of what is left, beside its siblings")] = None,
    nominal: Annotated[str | None, typer.Option(help="GPUs that it is guaranteed")] = None,
    limit: Annotated[str | None, typer.Option(help="GPUs that it never exceeds")] = None,
    lend: Annotated[str | None, typer.Option(help="GPUs of an unused nominal that others may borrow")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="the same for one GPU model, as H100=nominal:8,limit:8; repeatable")
    ] = None,
    window: Annotated[str | None, typer.Option(help="its jobs start only while this window is open")] = None,
    max_wait: Annotated[str | None, typer.Option(help="minutes after which a job goes first in it")] = None,
    min_run: Annotated[str | None, typer.Option(help="minutes before which its jobs are not preempted")] = None,
    reason: Why = "",
    output: Output = Format.table,
) -> None:
    """Add a queue or change what is named of it; `none` clears a value."""
    edits: list[Edit] = []
    for key, named in (("parent", parent), ("window", window)):
        edits += [field(key, name(named))] if named is not None else []
    for key, flag, told in (
        ("weight", "--weight", weight), ("max_wait_minutes", "--max-wait", max_wait),
        ("min_run_minutes", "--min-run", min_run),
    ):  # fmt: skip
        edits += [field(key, number(flag, told))] if told is not None else []
    for key, told in (("nominal", nominal), ("limit", limit), ("lend", lend)):
        edits += [quota(key, number(f"--{key}", told))] if told is not None else []
    edits += map(model_quota, model or ())
    _edit(put("queues", queue_name, edits), reason, output)


@queue_app.command("delete")
def delete_queue(queue_name: QueueName, reason: Why = "", output: Output = Format.table) -> None:
    """Remove a queue in which no unfinished job is left."""
    _edit(remove("queues", "queue", queue_name), reason, output)


@class_app.command("list")
def list_classes(output: Output = Format.table) -> None:
    """List priority classes, the highest first."""
    _list("classes", classes_table, output)


@class_app.command("set")
def set_class(
    class_name: ClassName,
    value: Annotated[str | None, typer.Option(help="a higher number goes first")] = None,
    preemptible: Annotated[bool | None, typer.Option("--preemptible/--no-preemptible")] = None,
    grace: Annotated[str | None, typer.Option(help="seconds from the checkpoint signal to SIGKILL, at most")] = None,
    may_borrow: Annotated[bool | None, typer.Option("--may-borrow/--no-may-borrow")] = None,
    reason: Why = "",
    output: Output = Format.table,
) -> None:
    """Add a priority class or change what is named of it; `none` clears a value."""
    edits: list[Edit] = []
    for key, flag, told in (("value", "--value", value), ("grace_seconds", "--grace", grace)):
        edits += [field(key, number(flag, told))] if told is not None else []
    for key, given in (("preemptible", preemptible), ("may_borrow", may_borrow)):
        edits += [field(key, given)] if given is not None else []
    _edit(put("classes", class_name, edits), reason, output)


@class_app.command("delete")
def delete_class(class_name: ClassName, reason: Why = "", output: Output = Format.table) -> None:
    """Remove a priority class that no unfinished job has."""
    _edit(remove("classes", "class", class_name), reason, output)


@window_app.command("list")
def list_windows(output: Output = Format.table) -> None:
    """List windows."""
    _list("windows", windows_table, output)


@window_app.command("set")
def set_window(
    window_name: WindowName,
    zone: Annotated[str | None, typer.Option(help="IANA time zone, such as Europe/Berlin")] = None,
    days: Annotated[str | None, typer.Option(help="days on which it opens, as sat,sun")] = None,
    start: Annotated[str | None, typer.Option(help="HH:MM")] = None,
    end: Annotated[str | None, typer.Option(help="HH:MM; at or before the start it is on the next day")] = None,
    on_close: Annotated[str | None, typer.Option(help="preempt or finish what still runs")] = None,
    reason: Why = "",
    output: Output = Format.table,
) -> None:
    """Add a window or change what is named of it."""
    given = {"zone": zone, "days": days.split(",") if days else None, "start": start, "end": end, "on_close": on_close}
    edits = [field(key, value) for key, value in given.items() if value is not None]
    _edit(put("windows", window_name, edits), reason, output)


@window_app.command("delete")
def delete_window(window_name: WindowName, reason: Why = "", output: Output = Format.table) -> None:
    """Remove a window that no queue and no unfinished job needs."""
    _edit(remove("windows", "window", window_name), reason, output)


def _list(part: str, table: Any, output: Format) -> None:
    with Client() as client:
        told = client.cluster()
    entries = told["cluster"][part]
    show(output, {"version": told["version"], part: entries}, lambda: out.print(table(entries)))
