"""An array is many jobs by one request: all of them, once each, whatever breaks on the way."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from stoker_chassis.eventlog import Appended, Expect, Unavailable
from stoker_chassis.memory import MemoryLog, memory_bus
from stoker_chassis.stores import Bus
from stoker_proto import CancelRequested, Envelope, JobSubmitted
from tests.builders import joined
from tests.unit.gateway_api import SPEC, Gateway, gateway
from tests.unit.test_gateway_views import finished

ARRAY = SPEC | {"array": {"size": 5, "at_once": 2}}
KEY = {"Idempotency-Key": "sweep-1"}


@pytest.fixture
def memory(tmp_path: Path) -> Bus:
    return memory_bus(tmp_path / "blobs")


async def submissions(bus: Bus) -> list[JobSubmitted]:
    return [r.event async for r in bus.log.read() if isinstance(r.event, JobSubmitted)]


async def post(api: Gateway, spec: dict[str, Any] = ARRAY, headers: dict[str, str] = KEY) -> Any:
    return await api.http.post("/v1/jobs", json={"spec": spec}, headers=headers)


async def test_an_array_is_a_job_for_each_index_under_one_id(memory: Bus) -> None:
    async with gateway(memory) as api:
        answer = await post(api, headers={})
        assert answer.status_code == 201
        array_id = answer.json()["array_id"]
        assert answer.json()["jobs"] == [f"{array_id}-{index}" for index in range(5)]
        told = await submissions(memory)
        assert [(e.job_id, e.array_id, e.array_index) for e in told] == [
            (f"{array_id}-{index}", array_id, index) for index in range(5)
        ]
        assert {e.spec.array.size if e.spec.array else 0 for e in told} == {5}
        job = (await api.http.get(f"/v1/jobs/{array_id}-3")).json()
        assert (job["array_id"], job["array_index"], job["state"]) == (array_id, 3, "queued")
        listed = (await api.http.get("/v1/jobs", params={"array": array_id, "limit": 3})).json()
        rest = (await api.http.get("/v1/jobs", params={"array": array_id, "cursor": listed["next"]})).json()
        assert [j["array_index"] for j in listed["jobs"] + rest["jobs"]] == [4, 3, 2, 1, 0]
        assert (await post(api, headers={})).json()["array_id"] != array_id


async def test_an_array_of_one_is_still_an_array(memory: Bus) -> None:
    async with gateway(memory) as api:
        answer = (await post(api, SPEC | {"array": {"size": 1}})).json()
    assert answer["jobs"] == [f"{answer['array_id']}-0"]


async def test_the_same_key_and_body_are_the_same_array_from_any_gateway_at_any_time(memory: Bus) -> None:
    async with gateway(memory) as one, gateway(memory) as two:
        answers = await asyncio.gather(*(post(api) for api in [one, two] * 5))
        assert sorted(a.status_code for a in answers) == [200] * 9 + [201]
        assert len({a.text for a in answers}) == 1
    async with gateway(memory) as api:
        again = await post(api)
        assert (again.status_code, again.headers["Idempotency-Replayed"]) == (200, "true")
        assert again.text == answers[0].text
    assert len(await submissions(memory)) == 5


class BreakingLog(MemoryLog):
    """Takes so many events more, then none."""

    left = 1_000

    async def append(self, envelope: Envelope, expect: Expect | None = None) -> Appended:
        if self.left == 0:
            raise Unavailable("the log is away")
        self.left -= 1
        return await super().append(envelope, expect)


@pytest.mark.parametrize("taken", [0, 1, 3, 4])
async def test_a_retry_completes_what_was_broken_off(memory: Bus, taken: int) -> None:
    log = BreakingLog()
    bus = dataclasses.replace(memory, log=log)
    async with gateway(bus) as api:
        log.left = taken
        broken = await post(api)
        assert (broken.status_code, broken.json()["code"]) == (503, "log_unavailable")
        log.left = 1_000
        assert len(await submissions(bus)) == taken
        done = await post(api)
        assert done.status_code == (201 if taken == 0 else 200)
        assert sorted(e.job_id for e in await submissions(bus)) == done.json()["jobs"]


async def test_a_key_stands_for_one_body_whether_array_or_job(memory: Bus) -> None:
    async with gateway(memory) as api:
        assert (await post(api)).status_code == 201
        for other in (ARRAY | {"array": {"size": 6}}, ARRAY | {"command": "x"}, SPEC):
            refused = await post(api, other)
            assert (refused.status_code, refused.json()["code"]) == (422, "idempotency_key_reused")
        assert (await post(api, SPEC, {"Idempotency-Key": "k2"})).status_code == 201
        assert (await post(api, ARRAY, {"Idempotency-Key": "k2"})).json()["code"] == "idempotency_key_reused"
    assert len(await submissions(memory)) == 6


async def test_two_bodies_under_one_key_at_once_never_mix(memory: Bus) -> None:
    async with gateway(memory) as one, gateway(memory) as two:
        bodies = [ARRAY, ARRAY | {"command": "python other.py"}] * 4
        answers = await asyncio.gather(*(post((one, two)[n % 2], body) for n, body in enumerate(bodies)))
    assert {a.status_code for a in answers} == {200, 201, 422}
    told = await submissions(memory)
    assert (len(told), len({e.fingerprint for e in told})) == (5, 1)


async def test_an_array_that_never_fits_is_refused_whole(memory: Bus) -> None:
    async with gateway(memory) as api:
        await api.say(joined("n1", gpus=1))
        assert (await post(api)).json()["code"] == "never_fits"
    assert await submissions(memory) == []


async def test_an_array_accepted_before_is_completed_though_it_would_be_refused_by_now(memory: Bus) -> None:
    async with gateway(memory) as api:
        first = await post(api)
        await api.say(joined("n1", gpus=1))
        assert (await post(api)).text == first.text


async def test_cancelling_an_array_cancels_all_of_it_that_is_not_over(memory: Bus) -> None:
    async with gateway(memory) as one, gateway(memory) as two:
        array_id = (await post(one)).json()["array_id"]
        await one.say(finished(f"{array_id}-0", 0))
        for _ in range(2):
            told = await two.http.post(f"/v1/jobs/{array_id}:cancel", json={"reason": "typo"})
            assert (told.status_code, told.json()["jobs"]) == (202, [f"{array_id}-{n}" for n in range(1, 5)])
        assert (await two.http.get(f"/v1/jobs/{array_id}-2")).json()["cancelling"] is True
    asked = [r.event async for r in memory.log.read() if isinstance(r.event, CancelRequested)]
    assert [(e.job_id, e.reason) for e in asked] == [(f"{array_id}-{n}", "typo") for n in range(1, 5)]


async def test_an_array_is_held_released_and_moved_as_a_whole(memory: Bus) -> None:
    async with gateway(memory) as api:
        array_id = (await post(api)).json()["array_id"]
        await api.http.post(f"/v1/jobs/{array_id}-1:hold")
        end = await memory.log.end()
        for verb, body, field, value, new in (
            ("hold", None, "held", True, 4), ("priority", {"priority": 7}, "priority", 7, 5),
            ("release", None, "held", False, 5),
        ):  # fmt: skip
            told = await api.http.post(f"/v1/jobs/{array_id}:{verb}", json=body)
            assert (told.status_code, len(told.json()["jobs"])) == (202, 5)
            jobs = (await api.http.get("/v1/jobs", params={"array": array_id})).json()["jobs"]
            assert {j[field] for j in jobs} == {value}
            assert await memory.log.end() == (end := end + new)


async def test_an_array_is_no_job_and_is_told_so(memory: Bus) -> None:
    async with gateway(memory) as api:
        array_id = (await post(api)).json()["array_id"]
        told = (await api.http.get(f"/v1/jobs/{array_id}")).json()
        assert (told["code"], told["next_actions"]) == ("not_found", [f"stoker list --array {array_id}"])
        await api.say(*(finished(f"{array_id}-{n}", 0) for n in range(5)))
        over = await api.http.post(f"/v1/jobs/{array_id}:hold")
        assert (over.status_code, over.json()["code"]) == (409, "job_over")
        assert (await api.http.post(f"/v1/jobs/{array_id}:cancel")).json()["jobs"] == []
