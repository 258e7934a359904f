"""The client against a server that follows a script: what is tried again, what is not, and streams that break."""

from __future__ import annotations

import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from stoker import Client, ProblemError
from stoker_proto import problem
from tests.unit.client_gateway import Answer, Script, scripted

AWAY = Answer(503, problem("log_unavailable", "the log is away", retry_after_s=0.05).model_dump_json())
HUNG_UP = Answer(0)
SPEC = {
    "experiment_name": "e",
    "compute": {"accelerator_type": "GPU_1xANY", "num_accelerators": 1},
    "command": "true",
}
VALID = Answer(200, json.dumps({"spec": SPEC, "spec_hash": "h"}))
JOB = Answer(201, json.dumps({"job_id": "job-1", "state": "queued"}))


def client(script: Script, seconds: float = 5.0) -> Client:
    return Client(script.url, "t", retry_seconds=seconds)


def sse(*messages: tuple[str, str, Any], cut: bool = False) -> Answer:
    text = "".join(
        f": heartbeat\r\n\r\nid: {id}\r\nevent: {name}\r\ndata: {json.dumps(data)}\r\n\r\n"
        for id, name, data in messages
    )
    return Answer(200, text, "text/event-stream", cut)


def test_a_submission_is_retried_through_outages_with_one_and_the_same_key() -> None:
    with scripted(VALID, AWAY, HUNG_UP, Answer(502, "<html>proxy</html>", "text/html"), JOB) as script:
        assert client(script).submit(SPEC)["job_id"] == "job-1"
    keys = [headers["Idempotency-Key"] for what, headers in script.asked if what == "POST /v1/jobs"]
    assert len(keys) == 4
    assert len(set(keys)) == 1


def test_two_submissions_without_a_key_have_two_keys_and_a_given_key_is_kept() -> None:
    with scripted(VALID, JOB, VALID, JOB, VALID, JOB) as script, client(script) as c:
        c.submit(SPEC)
        c.submit(SPEC)
        c.submit(SPEC, idempotency_key="mine")
    one, two, three = [h["Idempotency-Key"] for what, h in script.asked if what == "POST /v1/jobs"]
    assert one != two
    assert three == "mine"


def test_the_token_of_the_spec_is_the_key() -> None:
    named = Answer(200, json.dumps({"spec": SPEC | {"idempotency_token": "tok"}, "spec_hash": "h"}))
    with scripted(named, JOB) as script:
        client(script).submit(SPEC)
    assert script.asked[-1][1]["Idempotency-Key"] == "tok"


def test_a_refusal_is_raised_at_once_with_the_servers_problem() -> None:
    refusal = problem("not_found", "There is no job x", next_actions=("look at the list",))
    with scripted(Answer(404, refusal.model_dump_json())) as script:
        with pytest.raises(ProblemError) as told:
            client(script).get("x")
        assert told.value.problem == refusal
        assert len(script.asked) == 1


def test_an_outage_longer_than_the_patience_is_a_retryable_problem_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scripted(AWAY) as script, caplog.at_level(logging.WARNING), pytest.raises(ProblemError) as told:
        client(script, seconds=0.3).nodes()
    assert told.value.problem.retryable
    assert len(script.asked) > 2
    assert len(caplog.records) == 1


def test_nobody_at_the_address_is_a_problem_that_says_so() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(ProblemError, match="cannot be reached") as told:
        Client(url, "t", retry_seconds=0.2).nodes()
    assert told.value.problem.code == "log_unavailable"


def test_an_address_without_a_scheme_is_refused_at_once() -> None:
    with pytest.raises(ProblemError, match="http"):
        Client("localhost:8750", "t")


def test_a_proxy_in_the_environment_is_not_asked_for_a_gateway_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with scripted(Answer(200, '{"nodes": []}')) as script:
        assert client(script, seconds=0).nodes() == []


def test_every_call_carries_the_token() -> None:
    with scripted(Answer(200, '{"nodes": []}')) as script:
        client(script).nodes()
    assert script.asked[0][1]["Authorization"] == "Bearer t"


def test_wait_asks_again_until_the_job_is_over() -> None:
    running, done = {"state": "active", "mirrored": False}, {"state": "succeeded", "mirrored": False}
    with scripted(Answer(200, json.dumps(running)), AWAY, Answer(200, json.dumps(done))) as script:
        assert client(script).wait("j") == done
    assert "wait=30" in script.asked[0][0]


def test_wait_gives_the_job_as_it_is_when_the_time_is_over() -> None:
    running = {"state": "active", "mirrored": False}
    with scripted(Answer(200, json.dumps(running))) as script:
        began = time.monotonic()
        assert client(script).wait("j", timeout=0.1) == running
        assert time.monotonic() - began < 5


def test_followed_events_go_on_after_the_last_seen_one_when_the_connection_breaks() -> None:
    first = sse(("3", "stoker.job.submitted.v1", {"seq": 3}), ("5", "stoker.attempt.placed.v1", {"seq": 5}), cut=True)
    second = sse(("9", "stoker.job.finished.v1", {"seq": 9}), ("10", "stoker.run.mirrored.v1", {"seq": 10}))
    with scripted(first, AWAY, HUNG_UP, second) as script:
        assert [e["seq"] for e in client(script).events("j", follow=True, after=2)] == [3, 5, 9]
    assert [headers["Last-Event-ID"] for _, headers in script.asked] == ["2", "5", "5", "5"]


def test_a_stream_that_cannot_come_back_is_a_problem_after_the_patience_is_over() -> None:
    with scripted(sse(("3", "x", {"seq": 3}), cut=True), AWAY) as script:
        rows = client(script, seconds=0.3).events(follow=True)
        assert next(rows) == {"seq": 3}
        with pytest.raises(ProblemError, match="the log is away"):
            next(rows)


def test_a_refused_stream_is_a_problem_at_once() -> None:
    with scripted(Answer(404, problem("not_found", "There is no job j").model_dump_json())) as script:
        with pytest.raises(ProblemError, match="no job j"):
            list(client(script).events("j", follow=True))
        assert len(script.asked) == 1


def test_a_stream_that_a_stopping_gateway_ends_goes_on_after_it() -> None:
    active = Answer(200, json.dumps({"state": "active"}))
    done = sse(("9", "stoker.job.finished.v1", {"seq": 9}))
    with scripted(sse(("3", "x", {"seq": 3})), active, done) as script:
        assert [e["seq"] for e in client(script).events("j", follow=True)] == [3, 9]
    assert script.asked[2][1]["Last-Event-ID"] == "3"


def test_following_a_job_that_is_over_ends_with_what_is_left() -> None:
    rest = Answer(200, json.dumps({"events": [{"seq": 12}], "last": 12, "more": False}))
    with scripted(sse(), Answer(200, json.dumps({"state": "failed"})), rest) as script:
        assert [e["seq"] for e in client(script).events("j", follow=True, after=9)] == [12]


def test_events_are_read_page_by_page() -> None:
    pages = [{"events": [{"seq": 1}, {"seq": 2}], "last": 2, "more": True}, {"events": [], "last": 2, "more": False}]
    with scripted(*(Answer(200, json.dumps(p)) for p in pages)) as script:
        assert [e["seq"] for e in client(script).events()] == [1, 2]
    assert [what for what, _ in script.asked] == ["GET /v1/events?after=0", "GET /v1/events?after=2"]


def test_followed_logs_end_with_the_last_line_and_repeat_none_after_a_break() -> None:
    one, two, three = ({"cursor": f"7.{n}", "line": str(n)} for n in range(3))
    broken, ended = sse(("7.0", "line", one), cut=True), sse(("7.1", "line", two))
    with scripted(broken, ended, sse(("7.2", "line", three), ("", "end", {}))) as script:
        assert list(client(script).logs("j", follow=True)) == [one, two, three]
    assert [headers.get("Last-Event-ID") for _, headers in script.asked] == [None, "7.0", "7.1"]


def test_a_followed_tail_is_asked_for_once_and_after_a_break_nothing_is_left_out() -> None:
    old, new = {"cursor": "4.0", "line": "old"}, {"cursor": "5.0", "line": "new"}
    with scripted(sse(("4.0", "line", old), cut=True), sse(("5.0", "line", new), ("", "end", {}))) as script:
        assert list(client(script).logs("j", follow=True, tail=1, rank=1)) == [old, new]
    assert script.asked[0][0] == "GET /v1/jobs/j/logs?rank=1&tail=1&follow=1"
    assert script.asked[1][0] == "GET /v1/jobs/j/logs?rank=1&follow=1"


def test_a_spec_may_be_named_by_a_text(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a: 1\n")
    with scripted(VALID, JOB) as script:
        assert client(script).submit(str(tmp_path / "job.yaml"))["job_id"] == "job-1"


def test_a_spec_that_cannot_be_read_is_a_problem_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with scripted(VALID) as script:
        for name in ("missing", "binary", "."):
            with pytest.raises(ProblemError, match="cannot be read"):
                client(script).submit(tmp_path / name)
        assert script.asked == []
