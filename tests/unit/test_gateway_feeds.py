"""Events and log lines come without a gap or a repeat, from wherever a client stopped, and end with the job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from stoker_chassis.memory import memory_bus
from stoker_gateway.streams import job_events, last_lines, log_lines
from stoker_proto import (
    FindingRecorded,
    LogsSealed,
    MirrorCompleted,
    NodeQuarantined,
    PreflightStarted,
    SealedStream,
)
from stoker_proto.nodes import CheckResult
from tests.builders import joined, started, submitted
from tests.unit.gateway_api import Gateway, gateway
from tests.unit.test_gateway_views import finished, placed
from tests.waiting import take

SSE = {"Accept": "text/event-stream"}


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(memory_bus(tmp_path / "blobs")) as api:
        await api.say(joined("n1"), submitted("j"))
        yield api


def messages(answer: httpx.Response) -> list[dict[str, str]]:
    """The server-sent events in a whole answer."""
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    found = []
    for block in answer.text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append(fields)
    return found


async def lines(api: Gateway, headers: dict[str, str] | None = None, **params: Any) -> list[dict[str, Any]]:
    answer = await api.http.get("/v1/jobs/j/logs", params=params, headers=headers)
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def seal(api: Gateway, folder: Path, **streams: str) -> None:
    """Put whole streams into the blob store and say so; `rank_0_stdout` is rank 0's standard output."""
    sealed = []
    for name, text in streams.items():
        path = folder / name
        path.write_bytes(text.encode())
        digest = await api.bus.blobs.put(path)
        _, rank, kind = name.split("_")
        sealed.append(SealedStream(stream=f"rank-{rank}.{kind}", digest=digest, lines=1, bytes=len(text)))
    await api.say(LogsSealed(job_id="j", attempt=1, node="n1", fence=1, streams=tuple(sealed)))


async def test_a_jobs_events_are_a_list_in_pages(api: Gateway) -> None:
    await api.say(
        placed("j", 1, "n1"), submitted("other"), finished("j", 1), MirrorCompleted(job_id="j", run_id="r", points=0)
    )
    whole = (await api.http.get("/v1/jobs/j/events")).json()
    assert [e["seq"] for e in whole["events"]] == [2, 3, 5, 6]
    assert whole["events"][0]["type"] == "stoker.job.submitted.v1"
    assert (whole["last"], whole["more"]) == (6, False)
    first = (await api.http.get("/v1/jobs/j/events", params={"limit": 2})).json()
    assert (first["last"], first["more"]) == (3, True)
    rest = (await api.http.get("/v1/jobs/j/events", params={"after": 3})).json()
    assert [e["seq"] for e in rest["events"]] == [5, 6]
    everything = (await api.http.get("/v1/events", params={"limit": 4})).json()
    assert ([e["seq"] for e in everything["events"]], everything["more"]) == ([1, 2, 3, 4], True)


async def test_a_stream_of_events_ends_with_the_job_and_resumes_after_what_was_seen(api: Gateway) -> None:
    following = asyncio.create_task(api.http.get("/v1/jobs/j/events", headers=SSE))
    await api.say(placed("j", 1, "n1"))
    await api.say(started("j", 1, "n1", 1), finished("j", 1))
    seen = messages(await asyncio.wait_for(following, 10))
    assert [m["id"] for m in seen] == ["2", "3", "4", "5"]
    assert seen[-1]["event"] == "stoker.job.finished.v1"
    assert json.loads(seen[0]["data"])["seq"] == 2
    again = messages(await api.http.get("/v1/jobs/j/events", headers=SSE | {"Last-Event-ID": "3"}))
    assert again == seen[2:]
    by_query = messages(await api.http.get("/v1/jobs/j/events", headers=SSE, params={"after": 3}))
    assert by_query == again


async def test_a_client_that_comes_back_after_the_end_is_not_kept_waiting(api: Gateway) -> None:
    last = await api.say(placed("j", 1, "n1"), finished("j", 1))
    await api.say(MirrorCompleted(job_id="j", run_id="r", points=0))
    rest = await api.http.get("/v1/jobs/j/events", headers=SSE | {"Last-Event-ID": str(last)}, timeout=5)
    assert [m["event"] for m in messages(rest)] == ["stoker.job.mirror_completed.v1"]


async def test_no_event_is_lost_or_repeated_at_any_point_of_resumption(api: Gateway) -> None:
    await api.say(placed("j", 1, "n1"), *(started("j", 1, "n1", n) for n in range(20)), finished("j", 1))
    seqs = [r.seq async for r in job_events(api.bus, api.views, "j", 0)]
    for cut in range(len(seqs)):
        assert [r.seq async for r in job_events(api.bus, api.views, "j", seqs[cut])] == seqs[cut + 1 :]


async def test_following_sleeps_while_news_of_the_job_lie_on_other_subjects(
    api: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    read = api.bus.log.read

    def counted(after: int = 0, subject: str = ">") -> AsyncIterator[Any]:
        nonlocal reads
        reads += 1
        return read(after, subject)

    monkeypatch.setattr(api.bus.log, "read", counted)
    following = job_events(api.bus, api.views, "j", 0)
    await take(following, 1)
    waiting = asyncio.ensure_future(anext(following))
    await api.say(PreflightStarted(node="n1", boot_epoch="b1", job_id="j", attempt=1, round=1))
    await api.say(started("j", 1, "n1", 1))
    assert (await asyncio.wait_for(waiting, 5)).seq == 4
    assert reads < 6


async def test_lines_name_where_they_come_from_and_can_be_narrowed(api: Gateway) -> None:
    await api.print("j", 0, 0, "step 1", "step 2")
    await api.print("j", 1, 0, "other rank")
    await api.print("j", 0, 2, "step 3")
    found = await lines(api)
    assert found[0] == {
        "cursor": "1.0", "attempt": 1, "node": "n1", "rank": 0, "stream": "stdout", "number": 0, "line": "step 1",
    }  # fmt: skip
    assert [(x["rank"], x["number"]) for x in found] == [(0, 0), (0, 1), (1, 0), (0, 2)]
    assert [x["line"] for x in await lines(api, rank=1)] == ["other rank"]
    assert [x["line"] for x in await lines(api, tail=2)] == ["other rank", "step 3"]
    assert await lines(api, tail=0) == []


async def test_every_cursor_continues_with_the_very_next_line(api: Gateway) -> None:
    for first in range(0, 12, 3):
        await api.print("j", 0, first, *(f"line {first + i}" for i in range(3)))
    found = await lines(api)
    for at, line in enumerate(found):
        assert await lines(api, after=line["cursor"]) == found[at + 1 :]
        assert await lines(api, {"Last-Event-ID": line["cursor"]}) == found[at + 1 :]


@pytest.mark.parametrize("cursor", ["x", "1", "0.0", "-1.0", "1.2.3", "²._", "9" * 30 + ".0"])
async def test_a_cursor_that_is_none_is_refused(api: Gateway, cursor: str) -> None:
    refused = await api.http.get("/v1/jobs/j/logs", params={"after": cursor})
    assert refused.json()["code"] == "invalid_request"


async def test_following_ends_after_the_last_line_of_the_finished_job(api: Gateway) -> None:
    await api.print("j", 0, 0, "before")
    following = asyncio.create_task(api.http.get("/v1/jobs/j/logs", params={"follow": 1}, headers=SSE))
    await api.say(placed("j", 1, "n1"))
    await api.print("j", 0, 1, "while it runs")
    await api.print("j", 0, 2, "last words")
    await api.say(finished("j", 1))
    seen = messages(await asyncio.wait_for(following, 10))
    assert [m["event"] for m in seen] == ["line"] * 3 + ["end"]
    assert [json.loads(m["data"])["line"] for m in seen[:3]] == ["before", "while it runs", "last words"]
    resumed = await api.http.get(
        "/v1/jobs/j/logs", params={"follow": 1}, headers=SSE | {"Last-Event-ID": seen[1]["id"]}
    )
    assert messages(resumed) == seen[2:]


async def test_a_live_follower_sees_each_line_when_it_comes(api: Gateway) -> None:
    following = log_lines(api.bus, api.views, "j", None, None, follow=True)
    for number in range(5):
        await api.print("j", 0, number, f"line {number}")
        assert [x["line"] for x in await take(following, 1)] == [f"line {number}"]
    await api.say(placed("j", 1, "n1"), finished("j", 1))
    assert [x async for x in following] == []


async def test_tail_and_follow_together_give_the_end_and_what_comes(api: Gateway) -> None:
    await api.print("j", 0, 0, "a", "b", "c")
    following = last_lines(api.bus, api.views, "j", None, None, 1, follow=True)
    assert [x["line"] for x in await take(following, 1)] == ["c"]
    await api.print("j", 0, 3, "d")
    await api.say(placed("j", 1, "n1"), finished("j", 1))
    assert [x["line"] async for x in following] == ["d"]
    assert [x["line"] for x in await lines(api, tail=3, follow=1)] == ["b", "c", "d"]


async def test_lines_that_telemetry_forgot_come_from_the_sealed_copies(api: Gateway, tmp_path: Path) -> None:
    await api.say(placed("j", 1, "n1"))
    await seal(api, tmp_path, rank_0_stdout="a\rb\r\nc\nd", rank_0_metrics='{"key": 1}\n', rank_1_stderr="Traceback\n")
    await api.say(finished("j", 1))
    gone = await lines(api)
    assert [(x["rank"], x["stream"], x["number"], x["line"]) for x in gone] == [
        (0, "stdout", 0, "a"), (0, "stdout", 1, "b"), (0, "stdout", 2, "c"), (0, "stdout", 3, "d"),
        (1, "stderr", 0, "Traceback"),
    ]  # fmt: skip
    assert [x["line"] for x in await lines(api, rank=1)] == ["Traceback"]
    assert [x["line"] for x in await lines(api, tail=2)] == ["d", "Traceback"]
    # Only the front of one stream is forgotten: nothing is told twice.
    await api.print("j", 0, 2, "c", "d")
    await api.print("j", 1, 0, "Traceback", stream="stderr")
    assert [(x["rank"], x["number"]) for x in await lines(api)] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


async def test_a_copy_that_is_gone_is_said_and_does_not_hide_the_rest(api: Gateway, tmp_path: Path) -> None:
    lost = SealedStream(stream="rank-0.stdout", digest="f" * 64, lines=7, bytes=70)
    await api.say(LogsSealed(job_id="j", attempt=1, node="n1", fence=1, streams=(lost,)))
    await seal(api, tmp_path, rank_1_stdout="kept\n")
    assert ["7 lines are gone" in x["line"] or x["line"] for x in await lines(api)] == [True, "kept"]


async def test_waiting_ends_when_the_job_is_over_or_has_changed(api: Gateway) -> None:
    over = asyncio.create_task(api.http.get("/v1/jobs/j", params={"wait": 20}))
    changed = asyncio.create_task(api.http.get("/v1/jobs/j", params={"wait": 20, "until": "changed", "seq": 2}))
    await api.say(placed("j", 1, "n1"))
    assert (await asyncio.wait_for(changed, 5)).json()["state"] == "active"
    assert not over.done()
    await api.say(finished("j", 1))
    assert (await asyncio.wait_for(over, 5)).json()["state"] == "succeeded"
    assert (await api.http.get("/v1/jobs/j", params={"wait": 0.05, "until": "mirrored"})).json()["mirrored"] is False


async def test_lists_are_newest_first_in_pages_and_by_state(api: Gateway) -> None:
    await api.say(submitted("j2"), submitted("j3"), placed("j2", 1, "n1"))
    first = (await api.http.get("/v1/jobs", params={"limit": 2})).json()
    assert [j["job_id"] for j in first["jobs"]] == ["j3", "j2"]
    rest = (await api.http.get("/v1/jobs", params={"limit": 2, "cursor": first["next"]})).json()
    assert ([j["job_id"] for j in rest["jobs"]], rest["next"]) == (["j"], None)
    active = (await api.http.get("/v1/jobs?state=active&state=failed")).json()
    assert [j["job_id"] for j in active["jobs"]] == ["j2"]


async def test_cancelling_is_asked_once_and_leaves_a_finished_job_alone(api: Gateway) -> None:
    for _ in range(2):
        answer = await api.http.post("/v1/jobs/j:cancel", json={"reason": "wrong data"})
        assert (answer.status_code, answer.json()["cancelling"]) == (202, True)
    await api.say(finished("j", 0, "cancelled", "cancelled"))
    assert (await api.http.post("/v1/jobs/j:cancel")).json()["state"] == "cancelled"
    types = [e["type"] for e in (await api.http.get("/v1/jobs/j/events")).json()["events"]]
    assert types.count("stoker.job.cancel_requested.v1") == 1


async def test_a_job_that_another_gateway_just_accepted_is_known(tmp_path: Path) -> None:
    bus = memory_bus(tmp_path / "blobs")
    async with gateway(bus) as one, gateway(bus) as two:
        job_id = await one.submit()
        assert (await two.http.post(f"/v1/jobs/{job_id}:cancel")).json()["cancelling"] is True


async def test_the_explanation_is_the_reason_or_the_problem(api: Gateway) -> None:
    await api.say(placed("j", 1, "n1"), finished("j", 1, "failed", "user_error"))
    told = (await api.http.get("/v1/jobs/j/explanation")).json()
    assert (told["state"], told["reasons"], told["problem"]["code"]) == ("failed", [], "exit_code")


async def test_the_timeline_holds_the_faults_of_the_jobs_nodes_while_it_was_there(api: Gateway) -> None:
    def fault(node: str, told: str) -> FindingRecorded:
        result = CheckResult(check="xid", status="bad", entity="gpu-0", severity="fatal", detail=told)
        return FindingRecorded(node=node, boot_epoch="b1", finding_id=told, result=result)

    await api.say(fault("n1", "before"), placed("j", 1, "n1"), fault("n2", "elsewhere"), fault("n1", "XID 79"))
    await api.say(NodeQuarantined(node="n1", boot_epoch="b1", rule="xid", reason="XID 79"))
    await api.say(finished("j", 1, "failed", "infra_gpu"), fault("n1", "after"))
    story = (await api.http.get("/v1/jobs/j/timeline")).json()["timeline"]
    assert [line["what"] for line in story] == ["submitted", "placed", "fault", "quarantined", "finished"]
    assert story[2]["detail"] == "XID 79 on n1 (gpu-0)"
    assert [line["seq"] for line in story] == sorted(line["seq"] for line in story)


async def test_nodes_and_the_request_for_a_retest(api: Gateway) -> None:
    (node,) = (await api.http.get("/v1/nodes")).json()["nodes"]
    assert (node["node"], node["verdict"], len(node["gpus"])) == ("n1", "validating", 2)
    assert (await api.http.post("/v1/nodes/n1:retest", json={"reason": "new card"})).status_code == 202
    last = (await api.http.get("/v1/events")).json()["events"][-1]
    assert (last["type"], last["data"]["reason"]) == ("stoker.node.retest_requested.v1", "new card")
