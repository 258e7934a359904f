"""What the gateway asks the scheduler, and what it says when nobody answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import stoker_gateway.asking
from stoker_chassis.memory import memory_bus
from stoker_chassis.stores import Bus
from stoker_proto import ExplainAsked, PendingReasonChanged, PlanAsked, Problem, Reason, problem
from tests.builders import joined
from tests.unit.gateway_api import SPEC, gateway
from tests.unit.gateway_scheduler import NO_ROOM, PLANNED, QUEUES, Refusal, SchedulerTwin
from tests.unit.test_gateway_views import finished
from tests.waiting import until


@pytest.fixture
def memory(tmp_path: Path) -> Bus:
    return memory_bus(tmp_path / "blobs")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stoker_gateway.asking, "ANSWER_S", 0.2)


async def test_a_waiting_job_is_explained_by_the_scheduler(memory: Bus) -> None:
    async with gateway(memory) as api, SchedulerTwin().on(memory) as scheduler:
        job_id = await api.submit()
        told = (await api.http.get(f"/v1/jobs/{job_id}/explanation")).json()
    assert scheduler.asked == [ExplainAsked(job_id=job_id)]
    assert (told["state"], told["as_of_seq"], told["ahead"], told["starts_ms"]) == ("queued", 9, 1, 1_300_000)
    assert [Reason.model_validate(r) for r in told["reasons"]] == [NO_ROOM]
    assert told["displaces"][0]["lost_gpu_seconds"] == 120.4
    assert (told["problem"], told["unanswered"]) == (None, None)


async def test_without_a_scheduler_the_last_reasons_in_the_log_are_told_as_what_they_are(memory: Bus) -> None:
    async with gateway(memory) as api:
        job_id = await api.submit()
        seq = await api.say(PendingReasonChanged(job_id=job_id, reasons=(NO_ROOM,)))
        await api.say(joined("n1"))
        told = (await api.http.get(f"/v1/jobs/{job_id}/explanation")).json()
    assert (told["as_of_seq"], [r["code"] for r in told["reasons"]]) == (seq, ["no_room"])
    assert told["unanswered"]["code"] == "scheduler_unavailable"
    assert (told["ahead"], told["starts_ms"], told["at_ms"]) == (None, None, None)


async def test_what_the_scheduler_refuses_to_explain_is_told_beside_what_is_known(memory: Bus) -> None:
    no = Refusal(problem=problem("internal", "the pass failed"))
    async with gateway(memory) as api, SchedulerTwin(no).on(memory):
        told = (await api.http.get(f"/v1/jobs/{await api.submit()}/explanation")).json()
    assert (told["state"], told["reasons"], told["unanswered"]["detail"]) == ("queued", [], "the pass failed")


async def test_a_scheduler_that_has_not_read_of_the_job_yet_is_asked_again(memory: Bus) -> None:
    late = SchedulerTwin(Refusal(problem=problem("not_found", "There is no such job")))
    async with gateway(memory) as api, late.on(memory):
        job_id = await api.submit()
        never = (await api.http.get(f"/v1/jobs/{job_id}/explanation")).json()
        assert (never["state"], never["unanswered"]["code"]) == ("queued", "scheduler_unavailable")
        asking = asyncio.create_task(api.http.get(f"/v1/jobs/{job_id}/explanation"))
        seen = len(late.asked)
        await until(lambda: len(late.asked) > seen)
        late.says = None
        told = (await asking).json()
    assert (told["unanswered"], told["ahead"]) == (None, 1)


async def test_nobody_is_asked_about_a_job_that_is_over(memory: Bus) -> None:
    async with gateway(memory) as api, SchedulerTwin().on(memory) as scheduler:
        job_id = await api.submit()
        await api.say(finished(job_id, 0, "failed", "user_error"))
        told = (await api.http.get(f"/v1/jobs/{job_id}/explanation")).json()
    assert (told["state"], told["problem"]["code"], told["unanswered"]) == ("failed", "exit_code", None)
    assert scheduler.asked == []


async def test_a_plan_is_for_the_spec_with_its_defaults_and_creates_nothing(memory: Bus) -> None:
    async with gateway(memory) as api, SchedulerTwin().on(memory) as scheduler:
        told = (await api.http.post("/v1/jobs:plan", json={"spec": SPEC})).json()
        checked = (await api.http.post("/v1/jobs:validate", json={"spec": SPEC})).json()
    assert told["plan"] == PLANNED.model_dump(mode="json")
    assert {k: told[k] for k in checked} == checked
    assert [a.spec.model_dump(mode="json") for a in scheduler.asked if isinstance(a, PlanAsked)] == [checked["spec"]]
    assert await memory.log.end() == 0


async def test_a_plan_is_refused_exactly_as_the_submission_would_be(memory: Bus) -> None:
    async with gateway(memory) as api, SchedulerTwin().on(memory) as scheduler:
        await api.say(joined("n1", gpus=1))
        for spec, code in ((SPEC, "never_fits"), (SPEC | {"comand": 1}, "invalid_spec")):
            answers = [await api.http.post(path, json={"spec": spec}) for path in ("/v1/jobs:plan", "/v1/jobs")]
            one, two = (Problem.model_validate_json(a.content).model_copy(update={"instance": None}) for a in answers)
            assert (one, one.code) == (two, code)
    assert scheduler.asked == []


async def test_queues_are_as_the_scheduler_tells_them(memory: Bus) -> None:
    async with gateway(memory) as api, SchedulerTwin().on(memory):
        assert (await api.http.get("/v1/queues")).json() == QUEUES.model_dump(mode="json")


async def test_a_silent_scheduler_is_a_problem_that_may_be_over_soon(memory: Bus) -> None:
    async with gateway(memory) as api:
        for method, path, body in (("POST", "/v1/jobs:plan", {"spec": SPEC}), ("GET", "/v1/queues", None)):
            refused = await api.http.request(method, path, json=body)
            assert (refused.status_code, refused.json()["code"]) == (503, "scheduler_unavailable")
            assert refused.json()["retryable"] is True
            assert refused.headers["Retry-After"] == "2"


@pytest.mark.parametrize("said", [b"no json", b'{"seq": 1}', b'{"problem": 3}', b"[]"])
async def test_an_answer_that_makes_no_sense_is_a_fault_of_ours(memory: Bus, said: bytes) -> None:
    async with gateway(memory) as api, SchedulerTwin(said).on(memory):
        refused = await api.http.get("/v1/queues")
        assert (refused.status_code, refused.json()["code"]) == (500, "internal")


async def test_the_schedulers_own_refusal_is_passed_on(memory: Bus) -> None:
    async with gateway(memory) as api, SchedulerTwin(Refusal(problem=problem("never_fits", "no"))).on(memory):
        assert (await api.http.post("/v1/jobs:plan", json={"spec": SPEC})).json()["code"] == "never_fits"
