"""Jobs that are in are held, released and moved: once for each time it is asked, never when they are over."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import START, Position
from stoker_chassis.memory import MemoryLog, memory_bus
from stoker_chassis.stores import Bus
from stoker_proto import Event, HoldReleased, HoldRequested, JobBoosted, PriorityChanged, Recorded
from tests.unit.gateway_api import SPEC, Gateway, gateway
from tests.unit.test_gateway_views import finished, placed


@pytest.fixture
def memory(tmp_path: Path) -> Bus:
    return memory_bus(tmp_path / "blobs")


async def asked(bus: Bus) -> list[Event]:
    wanted = (HoldRequested, HoldReleased, PriorityChanged)
    return [r.event async for r in bus.log.read() if isinstance(r.event, wanted)]


async def post(api: Gateway, job_id: str, verb: str, **body: object) -> dict[str, object]:
    answer = await api.http.post(f"/v1/jobs/{job_id}:{verb}", json=body)
    assert answer.status_code == 202, answer.text
    told: dict[str, object] = answer.json()
    return told


class LateLog(MemoryLog):
    """Its readers get every event a while after it was written."""

    async def follow(self, position: Position = START) -> AsyncIterator[Recorded]:
        async for recorded in super().follow(position):
            await asyncio.sleep(0.03)
            yield recorded


async def test_what_counts_is_what_the_log_says_and_not_what_a_late_gateway_has_read(memory: Bus) -> None:
    late = dataclasses.replace(memory, log=LateLog())
    async with gateway(late) as api:
        job_id = await api.submit()
        for _ in range(2):
            await late.log.append(stamp(HoldRequested(job_id=job_id), "another gateway"))
            assert (await post(api, job_id, "release"))["held"] is False
    assert await asked(late) == [HoldRequested(job_id=job_id), HoldReleased(job_id=job_id)] * 2


async def test_a_job_is_held_and_released_as_often_as_it_is_asked_through_any_gateway(memory: Bus) -> None:
    async with gateway(memory) as one, gateway(memory) as two:
        job_id = await one.submit()
        for _ in range(2):
            assert (await post(one, job_id, "hold", reason="wait for data"))["held"] is True
            assert (await post(two, job_id, "hold"))["held"] is True
            assert (await post(two, job_id, "release", reason="data came"))["held"] is False
            assert (await post(one, job_id, "release"))["held"] is False
    assert await asked(memory) == [
        HoldRequested(job_id=job_id, reason="wait for data"), HoldReleased(job_id=job_id, reason="data came"),
    ] * 2  # fmt: skip


async def test_a_job_that_came_in_on_hold_is_released(memory: Bus) -> None:
    async with gateway(memory) as api:
        job_id = await api.submit(schedule={"hold": True})
        assert (await api.http.get(f"/v1/jobs/{job_id}")).json()["held"] is True
        assert (await post(api, job_id, "release"))["held"] is False
    assert await asked(memory) == [HoldReleased(job_id=job_id)]


async def test_a_priority_is_changed_when_it_is_another(memory: Bus) -> None:
    async with gateway(memory) as api:
        job_id = await api.submit(compute=SPEC["compute"] | {"priority": 3})
        for wanted in (3, -5, -5, 1000):
            assert (await post(api, job_id, "priority", priority=wanted))["priority"] == wanted
        for wrong in (1001, -1001, 0.5, None):
            refused = await api.http.post(f"/v1/jobs/{job_id}:priority", json={"priority": wrong})
            assert refused.json()["code"] == "invalid_request"
    assert await asked(memory) == [PriorityChanged(job_id=job_id, priority=p) for p in (-5, 1000)]


@pytest.mark.parametrize(("verb", "body"), [("hold", {}), ("release", {}), ("priority", {"priority": 1})])
async def test_a_job_that_is_over_is_left_alone(memory: Bus, verb: str, body: dict[str, object]) -> None:
    async with gateway(memory) as api:
        job_id = await api.submit()
        await api.say(finished(job_id, 0))
        refused = await api.http.post(f"/v1/jobs/{job_id}:{verb}", json=body)
        assert (refused.status_code, refused.json()["code"]) == (409, "job_over")
        assert "succeeded" in refused.json()["detail"]
        assert (await api.http.post(f"/v1/jobs/job-none:{verb}", json=body)).json()["code"] == "not_found"
    assert await asked(memory) == []


async def test_the_view_and_the_story_tell_of_it(memory: Bus) -> None:
    async with gateway(memory) as api:
        job_id = await api.submit(compute=SPEC["compute"] | {"queue": "default"})
        await post(api, job_id, "hold", reason="wait for data")
        await post(api, job_id, "priority", priority=9)
        await api.say(JobBoosted(job_id=job_id, cause="waited"), placed(job_id, 1, "n1"))
        job = (await api.http.get(f"/v1/jobs/{job_id}")).json()
        told = {k: job[k] for k in ("queue", "priority", "held", "boosted", "array_id", "state")}
        assert told == {
            "queue": "default", "priority": 9, "held": True, "boosted": True, "array_id": None, "state": "active",
        }  # fmt: skip
        story = (await api.http.get(f"/v1/jobs/{job_id}/timeline")).json()["timeline"]
    assert [(line["what"], line["detail"]) for line in story[1:4]] == [
        ("held", "wait for data"), ("priority", "9 from here on"), ("boosted", "it has waited long"),
    ]  # fmt: skip
