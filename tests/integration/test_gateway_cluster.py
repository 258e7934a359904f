"""Cluster configuration, questions and arrays through gateway processes on a real nats-server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats
from stoker_proto import ClusterConfigured, ExplainAsked, JobSubmitted
from tests.integration.test_gateway_service import process
from tests.unit.gateway_api import SPEC
from tests.unit.gateway_scheduler import PLANNED, QUEUES, SchedulerTwin
from tests.unit.test_gateway_cluster import GOOD
from tests.waiting import until

ARRAY = SPEC | {"array": {"size": 2_000}}
KEY = {"Idempotency-Key": "sweep"}


async def test_two_gateways_never_overwrite_each_others_configuration(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    async with process(nats_server, tmp_path / "a") as one, process(nats_server, tmp_path / "b") as two:
        for version in range(3):
            bodies = [{"cluster": GOOD | {"topology": [f"level-{version}-{n}"]}} for n in range(8)]
            tag = {"If-Match": f'"{version}"'}
            puts = [(one, two)[n % 2].http.put("/v1/cluster", json=body, headers=tag) for n, body in enumerate(bodies)]
            answers = await asyncio.gather(*puts)
            assert sorted(a.status_code for a in answers) == [200] + [409] * 7
            assert {a.json()["code"] for a in answers if a.status_code == 409} == {"cluster_conflict"}
            for gateway in (one, two):
                assert (await gateway.http.get("/v1/cluster")).headers["ETag"] == f'"{version + 1}"'
        # A queue of just now is known in the other gateway at once.
        await one.http.put("/v1/cluster", json={"cluster": GOOD | {"queues": [*GOOD["queues"], {"name": "new"}]}})
        spec = SPEC | {"compute": SPEC["compute"] | {"queue": "new"}}
        assert (await two.http.post("/v1/jobs", json={"spec": spec})).status_code == 201
        kept = await two.http.put("/v1/cluster", json={"cluster": GOOD})
        assert [(e["pointer"], e["code"]) for e in kept.json()["errors"]] == [("/queues", "in_use")]
    told = [r.event.version async for r in bus.log.read() if isinstance(r.event, ClusterConfigured)]
    assert told == [1, 2, 3, 4]


async def test_questions_reach_a_scheduler_and_none_is_told_as_such(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    async with process(nats_server, tmp_path / "g") as gateway:
        job_id = (await gateway.http.post("/v1/jobs", json={"spec": SPEC})).json()["job_id"]
        async with SchedulerTwin().on(bus) as scheduler:
            told = (await gateway.http.get(f"/v1/jobs/{job_id}/explanation")).json()
            assert (told["ahead"], told["unanswered"]) == (1, None)
            planned = (await gateway.http.post("/v1/jobs:plan", json={"spec": SPEC})).json()["plan"]
            assert planned == PLANNED.model_dump(mode="json")
            assert (await gateway.http.get("/v1/queues")).json() == QUEUES.model_dump(mode="json")
            assert scheduler.asked[0] == ExplainAsked(job_id=job_id)
        silent, known = await asyncio.gather(
            gateway.http.get("/v1/queues"), gateway.http.get(f"/v1/jobs/{job_id}/explanation")
        )
        assert (silent.status_code, silent.json()["code"]) == (503, "scheduler_unavailable")
        assert (known.status_code, known.json()["unanswered"]["code"]) == (200, "scheduler_unavailable")


async def test_an_array_whose_gateway_was_killed_half_way_is_completed_by_another(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    async with process(nats_server, tmp_path / "a") as one, process(nats_server, tmp_path / "b") as two:
        posting = asyncio.create_task(one.http.post("/v1/jobs", json={"spec": ARRAY}, headers=KEY))
        await until(lambda: _some(bus), 20)
        await one.kill()
        cut_off = await asyncio.gather(posting, return_exceptions=True)
        assert isinstance(cut_off[0], httpx.TransportError), "killed before its answer"
        answer = await two.http.post("/v1/jobs", json={"spec": ARRAY}, headers=KEY)
        assert answer.status_code == 200
        jobs = answer.json()["jobs"]
        assert len(jobs) == 2_000
        told = [r.event.job_id async for r in bus.log.read() if isinstance(r.event, JobSubmitted)]
        assert (len(told), sorted(told)) == (2_000, sorted(jobs))
        assert (await two.http.post("/v1/jobs", json={"spec": ARRAY}, headers=KEY)).text == answer.text


async def _some(bus: Bus) -> bool:
    return await bus.log.end() > 200
