"""A submission is durable before its answer, and the same key with the same body is the same job, always."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from pathlib import Path

import pytest

from stoker_chassis.eventlog import Appended, Expect, Unavailable
from stoker_chassis.memory import MemoryLog, memory_bus
from stoker_chassis.stores import Bus
from stoker_gateway.fit import Machine, never_fits
from stoker_gateway.identity import keyed_job_id, spec_hash
from stoker_proto import Envelope, Gpu, JobSubmitted
from tests.builders import joined, spec
from tests.unit.gateway_api import SPEC, gateway


@pytest.fixture
def memory(tmp_path: Path) -> Bus:
    return memory_bus(tmp_path / "blobs")


async def submissions(bus: Bus) -> list[JobSubmitted]:
    return [r.event async for r in bus.log.read() if isinstance(r.event, JobSubmitted)]


async def test_an_accepted_job_is_in_the_log_and_can_be_read_at_once(memory: Bus) -> None:
    async with gateway(memory) as api:
        answer = await api.http.post("/v1/jobs", json={"spec": SPEC})
        assert answer.status_code == 201
        job = answer.json()
        assert job["state"] == "queued"
        assert job["actor"] == "user/admin"
        assert [s.job_id for s in await submissions(memory)] == [job["job_id"]]
        assert (await api.http.get(f"/v1/jobs/{job['job_id']}")).json() == job


async def test_the_same_key_and_body_give_the_same_job(memory: Bus) -> None:
    async with gateway(memory) as api:
        job_id = await api.submit("k1")
        again = await api.http.post("/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": "k1"})
        assert again.status_code == 200
        assert again.headers["Idempotency-Replayed"] == "true"
        assert again.json()["job_id"] == job_id
        token = await api.http.post("/v1/jobs", json={"spec": SPEC | {"idempotency_token": "k2"}})
        assert token.status_code == 201
        assert token.json()["job_id"] == keyed_job_id("user/admin", "k2")
    assert len(await submissions(memory)) == 2


async def test_a_key_outlives_the_gateway_and_its_read_model(memory: Bus) -> None:
    async with gateway(memory) as api:
        job_id = await api.submit("k1")
    async with gateway(memory) as api:
        again = await api.http.post("/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": "k1"})
        assert (again.status_code, again.json()["job_id"]) == (200, job_id)
    assert len(await submissions(memory)) == 1


async def test_a_key_with_another_body_is_refused_and_creates_nothing(memory: Bus) -> None:
    async with gateway(memory) as api:
        job_id = await api.submit("k1")
        other = SPEC | {"command": "python other.py"}
        refused = await api.http.post("/v1/jobs", json={"spec": other}, headers={"Idempotency-Key": "k1"})
        assert refused.status_code == 422
        assert refused.json()["code"] == "idempotency_key_reused"
        assert refused.json()["facts"] == {"job_id": job_id}
    assert len(await submissions(memory)) == 1


async def test_many_posts_at_once_through_two_gateways_make_one_job(memory: Bus) -> None:
    async with gateway(memory) as one, gateway(memory) as two:
        answers = await asyncio.gather(
            *(
                api.http.post("/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": "k"})
                for api in [one, two] * 25
            )
        )
    assert sorted(a.status_code for a in answers) == [200] * 49 + [201]
    assert len({a.json()["job_id"] for a in answers}) == 1
    assert len(await submissions(memory)) == 1


async def test_a_yaml_text_is_taken_as_it_is(memory: Bus) -> None:
    text = "experiment_name: e\ncommand: c\ncompute: {accelerator_type: GPU_2xSIM, num_accelerators: 2}\n"
    async with gateway(memory) as api:
        assert (await api.http.post("/v1/jobs", json={"spec_yaml": text})).status_code == 201
        checked = (await api.http.post("/v1/jobs:validate", json={"spec_yaml": text})).json()
        assert checked["spec"]["limits"]["max_retries"] == 3
        refused = await api.http.post("/v1/jobs:validate", json={"spec_yaml": text + "comand: x\n"})
        assert [(e["line"], e["suggestion"]) for e in refused.json()["errors"]] == [(4, "command")]
    assert len(await submissions(memory)) == 1


async def test_without_a_key_the_same_body_is_another_job(memory: Bus) -> None:
    async with gateway(memory) as api:
        assert await api.submit() != await api.submit()


async def test_what_was_accepted_stays_accepted_when_it_would_be_refused_by_now(memory: Bus) -> None:
    async with gateway(memory) as api:
        job_id = await api.submit("k1")
        await api.say(joined("n1", gpus=1))
        again = await api.http.post("/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": "k1"})
        assert (again.status_code, again.json()["job_id"]) == (200, job_id)
        fresh = await api.http.post("/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": "k2"})
        assert fresh.json()["code"] == "never_fits"


async def test_a_job_that_can_never_fit_is_refused_with_the_shape_that_does(memory: Bus) -> None:
    async with gateway(memory) as api:
        await api.say(joined("n1", gpus=4), joined("n2", gpus=4))
        for compute, nearest in [
            ({"accelerator_type": "GPU_8xSIM", "num_accelerators": 8}, ("GPU_4xSIM", 4)),
            ({"accelerator_type": "GPU_4xSIM", "num_accelerators": 12}, ("GPU_4xSIM", 8)),
            ({"accelerator_type": "GPU_2xH100", "num_accelerators": 4}, ("GPU_2xSIM", 4)),
        ]:
            for path in ("/v1/jobs", "/v1/jobs:validate"):
                refused = await api.http.post(path, json={"spec": SPEC | {"compute": compute}})
                assert refused.json()["code"] == "never_fits"
                facts = refused.json()["facts"]
                assert facts["models"] == ["SIM"]
                assert tuple(facts["nearest"].values()) == nearest
    assert await submissions(memory) == []


async def test_code_must_be_there_before_the_job(memory: Bus) -> None:
    async with gateway(memory) as api:
        body = {"spec": SPEC | {"code_source": {"root_path": "."}}}
        assert (await api.http.post("/v1/jobs", json=body)).json()["code"] == "code_missing"
        digest = hashlib.sha256(b"code").hexdigest()
        for missing in (digest, "../../etc/passwd"):
            assert (await api.http.post("/v1/jobs", json=body | {"code": missing})).json()["code"] == "code_missing"
        assert (await api.http.put(f"/v1/blobs/{digest}", content=b"code")).status_code == 201
        answer = await api.http.post("/v1/jobs", json=body | {"code": digest})
        assert answer.json()["code"] == digest


class AwayLog(MemoryLog):
    async def append(self, envelope: Envelope, expect: Expect | None = None) -> Appended:
        raise Unavailable("no answer")


async def test_without_the_log_nothing_is_accepted(memory: Bus) -> None:
    async with gateway(dataclasses.replace(memory, log=AwayLog())) as api:
        refused = await api.http.post("/v1/jobs", json={"spec": SPEC})
        assert refused.status_code == 503
        assert refused.json()["code"] == "log_unavailable"
        assert refused.json()["retryable"] is True
        assert refused.headers["Retry-After"] == "2"


def test_the_spec_hash_says_what_runs_and_not_what_it_is_called() -> None:
    named = spec(labels={"a": "b"}, mlflow_run_name="x", idempotency_token="t")
    assert spec_hash(named, "code") == spec_hash(spec(), "code")
    assert spec_hash(spec(), "code") != spec_hash(spec(), "other")
    assert spec_hash(spec(), None) != spec_hash(spec(parameters={"lr": 1}), None)


def test_the_nearest_shape_keeps_as_many_gpus_as_it_can() -> None:
    def node(count: int, model: str = "H100") -> Machine:
        gpus = (Gpu(uuid=str(i), index=i, model=model, name=model, memory_bytes=1) for i in range(count))
        return Machine(tuple(gpus))

    mixed = [node(8), node(8), node(4), node(2, "A10")]
    assert never_fits(spec(2, 8, "H100"), mixed) is None
    assert never_fits(spec(4, 2, "ANY"), mixed) is None
    told = never_fits(spec(3, 8, "H100"), mixed)
    assert told is not None
    assert told.facts["nearest"] == {"accelerator_type": "GPU_8xH100", "num_accelerators": 16}
    assert "GPU_8xH100" in told.next_actions[0]
    assert never_fits(spec(3, 8, "H100"), []) is None
