"""Every verb of `stoker`: what it prints for people, the one JSON document for programs, and its exit code."""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path

import pytest

from stoker import Client, cli
from stoker_proto import PendingReasonChanged, Reason, problem
from tests.builders import joined, ready
from tests.integration.cli import Said, Stoker, finished, gateway, placed, spec, stoker
from tests.unit.client_gateway import TOKEN, Gateway

__all__ = ["gateway", "spec", "stoker"]


def submit(stoker: Stoker, spec: Path, *more: str) -> str:
    said = stoker("submit", str(spec), "-o", "json", *more)
    assert said.code == 0, said
    return str(said.document["job_id"])


def test_submit_sends_the_code_and_says_the_jobs_id(stoker: Stoker, spec: Path, gateway: Gateway) -> None:
    said = stoker("submit", str(spec))
    assert (said.code, said.err) == (0, "")
    with Client(gateway.url, TOKEN) as client:
        job = client.get(said.out.strip())
        assert job["state"] == "queued"
        assert client._call("HEAD", f"/v1/blobs/{job['code']}").status_code == 200


def test_the_same_key_is_the_same_job_and_another_spec_under_it_a_conflict(stoker: Stoker, spec: Path) -> None:
    first = submit(stoker, spec, "--idempotency-key", "k1")
    assert submit(stoker, spec, "--idempotency-key", "k1") == first
    said = stoker("submit", str(spec), "--idempotency-key", "k1", "--override", "parameters.lr=1", "-o", "json")
    assert said.code == 6
    assert said.document["problem"]["code"] == "idempotency_key_reused"


def test_an_override_changes_what_is_submitted(stoker: Stoker, spec: Path) -> None:
    changes = ("--override", "parameters.lr=0.5", "--override", "experiment_name=other")
    job = stoker("get", submit(stoker, spec, *changes), "-o", "json").document
    assert job["spec"]["parameters"] == {"lr": 0.5}
    assert job["experiment_name"] == "other"


def test_an_invalid_spec_is_refused_with_every_mistake_its_line_and_a_suggestion(stoker: Stoker, spec: Path) -> None:
    spec.write_text(spec.read_text().replace("num_accelerators", "num_acelerators") + "labels: 3\n")
    for verb in ("validate", "submit"):
        said = stoker(verb, str(spec))
        assert (said.code, said.out) == (2, "")
        assert "line 4: /compute/num_acelerators" in said.err
        assert "did you mean 'num_accelerators'" in said.err
        assert "line 7: /labels" in said.err
    told = stoker("validate", str(spec), "-o", "json")
    assert told.code == 2
    assert {e["pointer"] for e in told.document["problem"]["errors"]} >= {"/compute/num_acelerators", "/labels"}


def test_validate_creates_nothing(stoker: Stoker, spec: Path) -> None:
    before = stoker("list", "-o", "json").document
    said = stoker("validate", str(spec))
    assert said.code == 0
    assert said.out.startswith("valid; spec hash")
    assert stoker("validate", str(spec), "-o", "json").document["spec"]["limits"]["max_retries"] == 3
    assert stoker("list", "-o", "json").document == before


@pytest.mark.parametrize("lost", ["spec", "code"])
def test_a_file_that_is_not_there_is_a_usage_problem(stoker: Stoker, spec: Path, lost: str) -> None:
    if lost == "spec":
        spec.unlink()
    else:
        (spec.parent / "code" / "train.py").unlink()
    said = stoker("submit", str(spec))
    assert said.code == 2
    assert "Traceback" not in said.err


def test_usage_errors_exit_2_and_leave_stdout_alone(stoker: Stoker) -> None:
    for arguments in (["submit"], ["get", "j", "-o", "xml"], ["nothing"], ["list", "--limit", "many"]):
        said = stoker(*arguments)
        assert (said.code, said.out) == (2, ""), arguments


def test_without_the_right_token_the_exit_code_is_3(stoker: Stoker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_TOKEN", "wrong")
    said = stoker("list")
    assert said.code == 3
    assert "Authorization" in said.err
    assert stoker("list", "-o", "json").document["problem"]["kind"] == "AUTH"


@pytest.mark.parametrize("verb", ["get", "cancel", "explain", "timeline", "wait", "logs", "events"])
def test_a_job_that_is_not_there_is_exit_code_5(stoker: Stoker, verb: str) -> None:
    said = stoker(verb, "job-nowhere", "-o", "json")
    assert said.code == 5
    assert said.document["problem"]["code"] == "not_found"
    assert stoker(verb, "job-nowhere").out == ""


def test_a_gateway_that_cannot_be_reached_is_exit_code_7(stoker: Stoker, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        monkeypatch.setenv("STOKER_URL", f"http://127.0.0.1:{sock.getsockname()[1]}")
    monkeypatch.setattr(cli, "Client", partial(Client, retry_seconds=0.2))
    said = stoker("nodes", "-o", "json")
    assert said.code == 7
    assert said.document["problem"]["retryable"]


def test_wait_tells_how_the_job_ended_by_its_exit_code(stoker: Stoker, spec: Path, gateway: Gateway) -> None:
    for state, code in (("succeeded", 0), ("failed", 1), ("expired", 1), ("cancelled", 9)):
        job_id = submit(stoker, spec)
        assert stoker("wait", job_id, "--timeout", "0.1", "-o", "json").code == 8
        gateway.tell(placed(job_id), finished(job_id, state))
        said = stoker("wait", job_id, "-o", "json")
        assert (said.code, said.document["state"], said.err) == (code, state, "")


def test_get_shows_a_failed_job_with_its_problem(stoker: Stoker, spec: Path, gateway: Gateway) -> None:
    job_id = submit(stoker, spec)
    told = problem("python_exception", "KeyError: '[/x]' on rank 0", next_actions=("read the traceback",))
    gateway.tell(placed(job_id), finished(job_id, "failed", told))
    for verb in ("get", "explain"):
        said = stoker(verb, job_id)
        assert said.code == 0
        for part in (job_id, "failed", "KeyError: '[/x]' on rank 0", "-> read the traceback"):
            assert part in said.out
    assert stoker("explain", job_id, "-o", "json").document["problem"]["origin"] == "user"


def test_explain_says_why_a_job_waits(stoker: Stoker, spec: Path, gateway: Gateway) -> None:
    job_id = submit(stoker, spec)
    reason = Reason(code="no_capacity", message="all GPUs [1 of 1] are held", blockers=("job-x",), actions=("wait",))
    gateway.tell(PendingReasonChanged(job_id=job_id, reasons=(reason,)))
    said = stoker("explain", job_id)
    for part in ("is queued", "no_capacity: all GPUs [1 of 1] are held", "blocked by job-x", "you may wait"):
        assert part in said.out
    assert stoker("explain", job_id, "-o", "json").document["reasons"][0]["code"] == "no_capacity"


def test_cancel_asks_and_a_job_that_is_over_stays_as_it_is(stoker: Stoker, spec: Path, gateway: Gateway) -> None:
    job_id = submit(stoker, spec)
    assert "is being cancelled" in stoker("cancel", job_id, "--reason", "typo").out
    assert stoker("cancel", job_id, "-o", "json").document["cancelling"] is True
    gateway.tell(finished(job_id, "cancelled"))
    assert "already over" in stoker("cancel", job_id).out


def test_list_goes_page_by_page_and_by_state(stoker: Stoker, spec: Path, gateway: Gateway) -> None:
    ids = [submit(stoker, spec) for _ in range(3)]
    gateway.tell(finished(ids[0], "cancelled"))
    page = stoker("list", "--limit", "2", "-o", "json").document
    assert [j["job_id"] for j in page["jobs"]] == ids[:0:-1]
    rest = stoker("list", "--limit", "1", "--cursor", page["next"], "-o", "json").document
    assert [j["job_id"] for j in rest["jobs"]] == ids[:1]
    shown = stoker("list", "--state", "cancelled").out
    assert ids[0] in shown
    assert ids[1] not in shown
    assert stoker("list", "--state", "odd").code == 2


def test_nodes_are_listed_with_their_health_and_tested_again_on_demand(stoker: Stoker, gateway: Gateway) -> None:
    gateway.tell(joined("node-9"), ready("node-9"))
    assert "node-9" in (shown := stoker("nodes").out)
    assert "ready" in shown
    assert "2 x SIM" in shown
    assert [n["node"] for n in stoker("nodes", "-o", "json").document["nodes"]] == ["node-9"]
    assert "re-test of node-9 asked for" in stoker("retest", "node-9", "--reason", "new cable").out
    assert stoker("retest", "node-9", "-o", "json").document["node"] == "node-9"
    assert stoker("retest", "nowhere", "-o", "json").code == 5
    types = [e["type"] for e in stoker("events", "-o", "json").lines]
    assert types.count("stoker.node.retest_requested.v1") == 2


def test_the_timeline_tells_the_story_in_order(stoker: Stoker, spec: Path, gateway: Gateway) -> None:
    job_id = submit(stoker, spec)
    gateway.tell(placed(job_id), finished(job_id))
    told = stoker("timeline", job_id, "-o", "json").document
    assert [line["what"] for line in told["timeline"]] == ["submitted", "placed", "finished"]
    shown = stoker("timeline", job_id).out
    assert "succeeded after 1 attempt(s)" in shown


def test_events_are_one_line_each_and_can_begin_after_a_sequence(stoker: Stoker, spec: Path, gateway: Gateway) -> None:
    job_id = submit(stoker, spec)
    gateway.tell(placed(job_id), finished(job_id))
    rows = stoker("events", job_id, "-o", "json").lines
    assert [r["type"].split(".")[2] for r in rows] == ["submitted", "placed", "finished"]
    later = stoker("events", job_id, "--after", str(rows[0]["seq"]), "-o", "json").lines
    assert later == rows[1:]
    followed = stoker("events", job_id, "--follow", "-o", "json")
    assert (followed.code, followed.lines) == (0, rows)
    assert "stoker.job.finished.v1" in stoker("events", job_id).out


def test_logs_by_rank_and_tail_and_as_they_were_written(stoker: Stoker, spec: Path, gateway: Gateway) -> None:
    job_id = submit(stoker, spec)
    gateway.tell(placed(job_id))
    gateway.say(job_id, "loss [bold]1[/bold] :smile:", "next")
    gateway.say(job_id, "other", rank=1)
    assert stoker("logs", job_id).out.splitlines() == [
        "[node-1/0] loss [bold]1[/bold] :smile:",
        "[node-1/0] next",
        "[node-1/1] other",
    ]
    assert [r["line"] for r in stoker("logs", job_id, "--rank", "1", "-o", "json").lines] == ["other"]
    assert [r["line"] for r in stoker("logs", job_id, "--tail", "2", "-o", "json").lines] == ["next", "other"]
    gateway.tell(finished(job_id))
    said = stoker("logs", job_id, "-f", "--tail", "1", "-o", "json")
    assert (said.code, [r["line"] for r in said.lines]) == (0, ["other"])


def test_every_verb_with_json_prints_one_document_and_nothing_on_stderr(stoker: Stoker, spec: Path) -> None:
    job_id = submit(stoker, spec)
    told: list[Said] = [
        stoker(*arguments, "-o", "json")
        for arguments in (
            ["validate", str(spec)], ["list"], ["get", job_id], ["explain", job_id], ["timeline", job_id], ["nodes"],
            ["cancel", job_id],
        )
    ]  # fmt: skip
    for said in told:
        assert isinstance(said.document, dict)
        assert said.err == ""
    assert json.loads(stoker("schema").out)["title"] == "JobSpec"
