"""What people see: every word that a machine or a user wrote, as it was written."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from stoker.render import jobs_table, nodes_table, print_job, print_problem, print_reasons, timeline_table
from stoker_proto import Evidence, FieldError, problem

TRICKY = "bad [red]x[/tmp/a] :smile: [/]"


def console(width: int = 200) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=width, emoji=False), text


def job(**more: Any) -> dict[str, Any]:
    attempt = {"number": 1, "state": "released", "nodes": ["node-1"], "resume_step": 7, "outcome": "user_error"}
    return {
        "job_id": "job-0123456789abcdef", "experiment_name": "e", "state": "failed", "cancelling": False,
        "spec": {"compute": {"accelerator_type": "GPU_2xANY", "num_accelerators": 4, "priority_class": "NORMAL"}},
        "actor": "user/admin", "submitted_ms": 1_000, "finished_ms": 9_000, "gpu_ms": 16_000, "step": 12,
        "queue": "default", "priority": 0, "boosted": False, "held": False, "array_id": None, "array_index": None,
        "checkpoint_step": 10, "attempts": [attempt], "mlflow_url": "http://m/#/x", "reasons": [],
        "problem": problem("python_exception", TRICKY).model_dump(mode="json"),
    } | more  # fmt: skip


def test_a_job_is_shown_with_its_attempts_and_its_problem() -> None:
    out, text = console()
    print_job(out, job())
    shown = text.getvalue()
    for part in ("job-0123456789abcdef", "failed", "4 GPUs as GPU_2xANY", "resumed at step 7: user_error",
                 "step       12 (checkpoint at 10)", "16 GPU-seconds", "http://m/#/x", TRICKY):  # fmt: skip
        assert part in shown


def test_brackets_in_messages_are_no_markup() -> None:
    out, text = console()
    reason = {"code": "no_capacity", "message": TRICKY, "blockers": [TRICKY], "actions": [TRICKY]}
    print_reasons(out, [reason, reason])
    out.print(jobs_table([job(reasons=[reason]), job()]))
    out.print(timeline_table([{"at_ms": 1, "what": TRICKY, "detail": TRICKY}]))
    node = {"node": "n", "verdict": "ready", "gpus": [{"model": "SIM"}], "holds": ["j/1"], "reason": TRICKY}
    out.print(nodes_table([node]))
    assert text.getvalue().count(TRICKY) == 6 + 2 + 2 + 1


def test_ids_are_whole_on_a_narrow_terminal() -> None:
    out, text = console(width=60)
    long = job(experiment_name="e" * 100)
    out.print(jobs_table([long, long]))
    lines = text.getvalue().splitlines()
    assert len(lines) == 3, "a job is a line"
    assert all(line.startswith("job-0123456789abcdef ") and " failed " in line for line in lines[1:])


def test_queues_are_named_in_the_list_only_when_there_are_several() -> None:
    for jobs, named in (([job(), job()], False), ([job(), job(queue="vision")], True)):
        out, text = console()
        out.print(jobs_table(jobs))
        assert ("queue" in text.getvalue()) == named
        assert ("vision" in text.getvalue()) == named


def test_a_problem_says_where_what_and_what_to_do() -> None:
    out, text = console()
    hinted = FieldError(
        pointer="/compute/gpus", code="unknown_field", message="no such field", line=3, suggestion="num"
    )
    whole = FieldError(pointer="", code="invalid", message="not YAML")
    seen = (Evidence(stream="rank-0.stderr", line="KeyError: 'x'"),)
    told = problem("invalid_spec", "2 mistakes", errors=(hinted, whole), evidence=seen, next_actions=("mend it",))
    print_problem(out, told)
    assert text.getvalue().splitlines() == [
        "The job spec is not valid (invalid_spec, origin: user)",
        "2 mistakes",
        "  line 3: /compute/gpus: no such field (try num)",
        "  /: not YAML",
        "  rank-0.stderr | KeyError: 'x'",
        "  -> mend it",
    ]
