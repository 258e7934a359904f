"""The `stoker` command. With `-o json` stdout holds exactly one JSON document, or JSON lines when it streams.

Exit codes: 0 ok, 1 the job failed, 2 usage or invalid spec, 3 not authorised, 5 not found, 6 conflict, 7 try again,
8 the wait timed out, 9 the job was cancelled, or you said no.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker_proto import Cluster, JobSpec, Problem, ProblemError, problem

from . import cli_cluster, cli_reliability, cli_requests
from .client import Client
from .interrupt import interruptible
from .overrides import override
from .render import (
    clock,
    jobs_table,
    nodes_table,
    print_job,
    print_problem,
    print_reasons,
    styled,
    timeline_table,
)
from .render_cluster import estimate, print_displaced, print_plan
from .shell import Format, Output, Why, emit, err, optional, out, show, stream

EXIT_OF_KIND = {"USER": 2, "AUTH": 3, "NOT_FOUND": 5, "CONFLICT": 6, "TRANSIENT": 7, "INFRA": 7, "INTERNAL": 1}
EXIT_OF_STATE = {"succeeded": 0, "failed": 1, "expired": 1, "cancelled": 9}
TIMED_OUT = 8

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Stoker: GPU jobs that survive bad GPUs.")
app.command()(cli_cluster.apply)
app.command()(cli_reliability.reliability)
cli_requests.register(app)
app.add_typer(cli_cluster.queue_app, name="queue")
app.add_typer(cli_cluster.class_app, name="class")
app.add_typer(cli_cluster.window_app, name="window")

JobId = Annotated[str, typer.Argument(help="the job's id")]
SpecFile = Annotated[Path, typer.Argument(help="the job spec, a YAML file")]


@app.command()
def up(
    nodes: Annotated[int | None, typer.Option(help="simulated nodes (3)")] = None,
    gpus: Annotated[int | None, typer.Option(help="simulated GPUs per node (2)")] = None,
    scenario: Annotated[Path | None, typer.Option(help="planned faults, a YAML file")] = None,
    data: Annotated[Path, typer.Option(help="the folder that holds everything")] = Path("stoker-data"),
    port: Annotated[int, typer.Option(help="the gateway's port; 0 takes a free one")] = 0,
    output: Output = Format.table,
) -> None:
    """Run the whole system on this machine until Ctrl-C; on real GPUs when there are some and no shape is asked for."""
    told = {"ready": lambda card: emit(card.model_dump())} if output is Format.json else {}
    optional("stoker_local.up", "The local system", "local").up(
        nodes=nodes, gpus=gpus, scenario=scenario, data=data, port=port, **told
    )


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="leave everything running afterwards")] = False,
    data: Annotated[Path | None, typer.Option(help="keep the data in this folder")] = None,
    output: Output = Format.table,
) -> None:
    """Watch a training job survive a GPU that falls off the bus; exits 0 only if all of it truly happened."""
    local = optional("stoker_local.demo", "The local system", "local")
    raise typer.Exit(local.demo(keep=keep, data=data, as_json=output is Format.json))


@app.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
def simulate(
    args: Annotated[list[str] | None, typer.Argument(help="given to the simulator; --help says what it takes")] = None,
) -> None:
    """Schedule a trace or a past log on simulated nodes under any cluster configuration, in minutes instead of days."""
    simulator = optional("stoker_scheduler.simulation.command", "The simulator", "scheduler")
    raise typer.Exit(simulator.main(args or []))


@app.command()
def validate(file: SpecFile, output: Output = Format.table) -> None:
    """Name every mistake in a spec; nothing is created."""
    with Client() as client:
        checked = client.validate(file)
    show(output, checked, lambda: out.print(f"valid; spec hash {checked['spec_hash']}"))


@app.command()
def submit(
    file: SpecFile,
    watch: Annotated[
        bool, typer.Option("--watch", help="follow the job to its end; the exit code is the job's")
    ] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="the same key and spec give the same job")] = None,
    override_: Annotated[list[str] | None, typer.Option("--override", help="field.path=value, repeatable")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only say when and where it would start, and at whose cost")
    ] = False,
    output: Output = Format.table,
) -> None:
    """Submit a job, or an array of jobs, and say its id."""
    spec: Path | dict[str, Any] = override(file, override_) if override_ else file
    with Client() as client:
        if dry_run:
            told = client.plan(spec)
            show(output, told, lambda: print_plan(out, told["plan"]))
            return
        if watch and client.validate(spec)["spec"]["array"] is not None:
            raise ProblemError(problem("invalid_request", "An array cannot be watched; submit it without --watch"))
        job = client.submit(spec, code_root=file.resolve().parent, idempotency_key=idempotency_key)
        if not watch:
            show(output, job, lambda: out.print(job["array_id"] or job["job_id"]))
            return
        if output is Format.table:
            err.print(f"submitted {job['job_id']}")
        with interruptible():
            code = _watch(client, job["job_id"], output)
        raise typer.Exit(code)


def _watch(client: Client, job_id: str, output: Format) -> int:
    """Follow a job to its end, with its progress; events as JSON lines for programs."""
    if output is Format.json:
        for event in client.events(job_id, follow=True):
            emit(event)
        return EXIT_OF_STATE.get(client.wait(job_id)["state"], 1)
    told, known = 0, 0
    with err.status(f"{job_id} is queued") as status:
        while True:
            job = client.wait(job_id, timeout=1.0)
            lines = client.timeline(job_id) if job["seq"] != known else []
            for line in lines[told:]:
                err.print(f"{clock(line['at_ms'])}  {line['what']:<16} {line['detail']}", markup=False, highlight=False)
            told, known = max(told, len(lines)), job["seq"]
            step = f", step {job['step']}" if job["step"] is not None else ""
            status.update(f"{job_id} is {job['state']}{step}")
            if job["state"] in EXIT_OF_STATE:
                break
    print_job(out, client.get(job_id))
    return EXIT_OF_STATE[job["state"]]


@app.command("list")
def list_(
    state: Annotated[str | None, typer.Option(help="queued, active, succeeded, failed, cancelled or expired")] = None,
    limit: Annotated[int, typer.Option(help="how many, newest first")] = 20,
    cursor: Annotated[str | None, typer.Option(help="`next` of the page before")] = None,
    array: Annotated[str | None, typer.Option(help="only the jobs of this array")] = None,
    output: Output = Format.table,
) -> None:
    """List jobs, newest first."""
    with Client() as client:
        page = client.list(state=state, limit=limit, cursor=cursor, array=array)
    show(output, page, lambda: out.print(jobs_table(page["jobs"])))


@app.command()
def get(job_id: JobId, output: Output = Format.table) -> None:
    """Show one job."""
    with Client() as client:
        job = client.get(job_id)
    show(output, job, lambda: print_job(out, job))


@app.command()
def wait(
    job_id: JobId,
    timeout: Annotated[float | None, typer.Option(help="seconds; without it for as long as it takes")] = None,
    output: Output = Format.table,
) -> None:
    """Wait for a job's end; the exit code is the job's, or 8 when the time is over first."""
    with interruptible(), err.status(f"waiting for {job_id}"), Client() as client:
        job = client.wait(job_id, timeout=timeout)
    show(output, job, lambda: print_job(out, job))
    raise typer.Exit(EXIT_OF_STATE.get(job["state"], TIMED_OUT))


@app.command()
def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="until the job's last line")] = False,
    rank: Annotated[int | None, typer.Option(help="only this rank")] = None,
    tail: Annotated[int | None, typer.Option(help="only the last lines")] = None,
    output: Output = Format.table,
) -> None:
    """Print a job's log lines, each with its rank."""
    with Client() as client:
        rows = client.logs(job_id, follow=follow, rank=rank, tail=tail)
        stream(output, rows, lambda r: f"[{r['node']}/{r['rank']}] {r['line']}")


@app.command()
def explain(job_id: JobId, output: Output = Format.table) -> None:
    """Say why a job waits and when it may start, or why it failed and whose fault that was."""
    with Client() as client:
        told = client.explain(job_id)

    def table() -> None:
        out.print(f"{job_id} is {styled(told['state'])}" + (estimate(told) if told["at_ms"] else ""))
        print_reasons(out, told["reasons"])
        print_displaced(out, told["displaces"])
        if told["unanswered"]:
            known = f"this is what it said last, at event {told['as_of_seq']}" if told["reasons"] else ""
            out.print(f"({told['unanswered']['detail']}{'; ' + known if known else ''})", markup=False, highlight=False)
        if told["problem"]:
            print_problem(out, Problem.model_validate(told["problem"]))

    show(output, told, table)


@app.command()
def timeline(job_id: JobId, output: Output = Format.table) -> None:
    """Tell a job's story from the log."""
    with Client() as client:
        lines = client.timeline(job_id)
    show(output, {"job_id": job_id, "timeline": lines}, lambda: out.print(timeline_table(lines)))


@app.command()
def nodes(output: Output = Format.table) -> None:
    """List nodes with their health and what they hold."""
    with Client() as client:
        found = client.nodes()
    show(output, {"nodes": found}, lambda: out.print(nodes_table(found)))


@app.command()
def retest(
    node: Annotated[str, typer.Argument(help="the node's name")],
    reason: Why = "",
    output: Output = Format.table,
) -> None:
    """Ask for a re-test of a node, after a repair; a quarantined one is released when it passes."""
    with Client() as client:
        view = client.retest(node, reason)
    show(output, view, lambda: out.print(f"re-test of {node} asked for (now {view['verdict']})"))


@app.command()
def events(
    job_id: Annotated[str | None, typer.Argument(help="only this job's events")] = None,
    after: Annotated[int, typer.Option(help="only after this sequence")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on as they come")] = False,
    output: Output = Format.table,
) -> None:
    """Print events of the log in order."""
    with Client() as client:
        rows = client.events(job_id, after=after, follow=follow)
        stream(output, rows, lambda r: f"{r['seq']:>7}  {clock(r['at_ms'])}  {r['type']:<44} {r['actor']}")


@app.command()
def schema(
    cluster: Annotated[bool, typer.Option("--cluster", help="of the cluster configuration instead")] = False,
    output: Output = Format.json,
) -> None:
    """Print the JSON Schema of the job spec; it is JSON in either format."""
    emit((Cluster if cluster else JobSpec).model_json_schema())


def main() -> None:
    """Run the command; a Problem goes to stderr for people, to stdout as the one document for programs."""
    arguments = sys.argv[1:]
    as_json = any(a in ("json", "-ojson", "--output=json") for a in arguments)
    try:
        app()
    except ProblemError as error:
        if as_json:
            emit({"problem": error.problem.model_dump(mode="json", exclude_none=True)})
        else:
            print_problem(err, error.problem)
        sys.exit(EXIT_OF_KIND[error.problem.kind])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
