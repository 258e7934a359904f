"""What MLflow should hold follows from the events alone, and is always something that MLflow takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.entities import Metric, Param, RunTag
from mlflow.utils import validation

from stoker_proto import (
    Allocation,
    AttemptPlaced,
    AttemptProgressed,
    AttemptStarted,
    CancelRequested,
    Event,
    JobBoosted,
    JobFinished,
    JobRequeued,
    JobSubmitted,
    Point,
    problem,
)
from stoker_tracker.mapping import Update, clean_key, ending, measured, new_run, update
from tests.builders import ListLog, spec, started, submitted

MLFLOW: Any = validation  # its rules, as the server applies them
ODD_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


def job(**spec_fields: Any) -> ListLog:
    log = ListLog()
    log.append(JobSubmitted(job_id="j1", spec=spec(**spec_fields), spec_hash="h"))
    return log


def wanted(log: ListLog) -> Any:
    event = log.records[0].event
    assert isinstance(event, JobSubmitted)
    return new_run(event, log.records[0])


@given(ODD_TEXT)
def test_mlflow_takes_every_cleaned_key(key: str) -> None:
    MLFLOW._validate_metric_name(clean_key(key))
    MLFLOW._validate_param(clean_key(key), "x")


@pytest.mark.parametrize("key", ["loss", "train/loss", "eval loss: top-1", "größe", "a.b", "x_y"])
def test_a_key_that_mlflow_takes_stays_as_it_is(key: str) -> None:
    assert clean_key(key) == key


@given(st.lists(ODD_TEXT, unique=True, max_size=8))
def test_keys_that_differ_stay_different(keys: list[str]) -> None:
    assert len({clean_key(key) for key in keys}) == len(keys)


@pytest.mark.parametrize("key", ["hits@10", "../up", "a//b", "a/./b", "/lead", "trail/", "", ".", "a%", "k" * 251])
def test_a_changed_key_still_shows_where_it_came_from(key: str) -> None:
    MLFLOW._validate_metric_name(clean_key(key))
    assert clean_key(key) != key


ODD_VALUE = st.recursive(
    ODD_TEXT | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(ODD_TEXT, inner), max_leaves=5
)


@given(st.dictionaries(ODD_TEXT, ODD_VALUE, max_size=5))
def test_mlflow_takes_every_parameter_and_tag(parameters: dict[str, Any]) -> None:
    run = wanted(job(parameters=parameters, labels={"team@x": "a\0b"}))
    MLFLOW._validate_batch_log_data(
        metrics=[],
        params=[Param(k, v) for k, v in run.params][:100],
        tags=[RunTag(k, v) for k, v in run.tags][:100],
    )


def test_nested_parameters_become_dotted_names() -> None:
    run = wanted(job(parameters={"lr": 3e-4, "opt": {"name": "adamw", "betas": [0.9, 0.95]}, "warm": None}))
    assert dict(run.params) == {"lr": "0.0003", "opt.name": "adamw", "opt.betas": "[0.9, 0.95]", "warm": "null"}


def test_a_long_parameter_is_cut_and_a_tag_says_so() -> None:
    run = wanted(job(parameters={"prompt": "x" * 20_000, "lr": 1}))
    assert {k: len(v) for k, v in run.params} == {"prompt": 6000, "lr": 1}
    assert dict(run.tags)["stoker.truncated_params"] == "prompt"


def test_a_run_begins_when_the_job_was_submitted_and_carries_its_id() -> None:
    run = wanted(job(labels={"stage": "demo"}))
    assert (run.experiment, run.name, run.start_ms) == ("exp", "j1", 1_000_000)
    tags = dict(run.tags)
    assert (tags["stoker.job_id"], tags["stoker.status"], tags["label.stage"]) == ("j1", "queued", "demo")
    assert wanted(job(mlflow_run_name="trial42")).name == "trial42"


def test_a_run_says_where_its_job_waits_and_which_array_it_is_of() -> None:
    compute = {"accelerator_type": "GPU_1xSIM", "num_accelerators": 1, "gpu_fraction": 0.25, "queue": "vision"}
    log = ListLog()
    log.append(
        JobSubmitted(job_id="s-3", spec=spec(compute=compute), spec_hash="h", array_id="s", array_index=3)
    )  # fmt: skip
    tags = dict(wanted(log).tags)
    assert (tags["stoker.queue"], tags["stoker.priority_class"]) == ("vision", "NORMAL")
    assert (tags["stoker.array_id"], tags["stoker.array_index"]) == ("s", "3")
    assert tags["stoker.accelerators"] == "1 as GPU_1xSIM, 0.25 of each"
    assert "stoker.array_id" not in dict(wanted(job()).tags)


def test_preemptions_are_counted_and_other_requeues_are_not() -> None:
    log = job()
    for attempt, outcome in enumerate(("preempted", "infra_gpu", "preempted"), 1):
        log.append(JobRequeued.model_validate({"job_id": "j1", "attempt": attempt, "outcome": outcome, "cause": "c"}))
    event = JobFinished(job_id="j1", state="succeeded", outcome="ok", attempts=4, gpu_ms=1)
    recorded = log.append(event)
    assert dict(ending(event, recorded, log.records).tags)["stoker.preemptions"] == "2"
    assert "stoker.preemptions" not in dict(ending(event, recorded, job().records).tags)


def changed(event: Event) -> Update | None:
    return update(ListLog().append(event))


def test_the_status_is_the_platforms() -> None:
    held = Allocation(node="n1", boot_epoch="b", gpus=("g",), node_rank=0)
    placed = AttemptPlaced(job_id="j1", attempt=2, fence=7, allocations=(held,), preflight="fresh")
    requeued = JobRequeued(job_id="j1", attempt=2, outcome="infra_gpu", cause="XID 79")
    resumed = AttemptStarted(job_id="j1", attempt=2, node="n1", fence=7, ranks=(0,), resume_step=80)
    assert changed(submitted("j1")) == Update(status="SCHEDULED")
    tags = (("stoker.status", "active"), ("stoker.attempts", "2"), ("stoker.attempt.2.nodes", "n1"))
    assert changed(placed) == Update(tags, "RUNNING")
    assert changed(resumed) == Update((("stoker.attempt.2.resume_step", "80"),))
    tags = (
        ("stoker.status", "queued"),
        ("stoker.attempt.2.outcome", "infra_gpu"),
        ("stoker.attempt.2.cause", "XID 79"),
    )
    assert changed(requeued) == Update(tags)
    assert changed(JobBoosted(job_id="j1", cause="waited")) == Update((("stoker.boosted", "waited"),))
    assert changed(CancelRequested(job_id="j1")) == Update((("stoker.status", "cancelling"),))
    assert changed(AttemptProgressed(job_id="j1", attempt=2, step=5)) is None
    assert changed(started("j1", 1, "n1", 3)) is None


@pytest.mark.parametrize(
    ("state", "status"),
    [("succeeded", "FINISHED"), ("failed", "FAILED"), ("expired", "FAILED"), ("cancelled", "KILLED")],
)
def test_the_end_of_a_job_is_the_end_of_its_run(state: Any, status: str) -> None:
    log = job()
    log.at_ms += 2_500
    log.append(started("j1", 1, "n1", 3))
    log.at_ms += 10_000
    log.append(started("j1", 2, "n1", 9))
    log.at_ms += 20_000
    trouble = problem("exit_code", "it said no") if state == "failed" else None
    event = JobFinished(job_id="j1", state=state, outcome="ok", attempts=2, gpu_ms=7_200_000, problem=trouble)
    recorded = log.append(event)
    ended = ending(event, recorded, log.records)
    assert (ended.status, ended.end_ms) == (status, recorded.at_ms)
    numbers = {m.key: m.value for m in ended.metrics}
    assert numbers == {"stoker/queue_seconds": 2.5, "stoker/run_seconds": 30.0, "stoker/gpu_hours": 2.0}
    tags = dict(ended.tags)
    assert (tags["stoker.status"], tags["stoker.outcome"], tags["stoker.attempts"]) == (state, "ok", "2")
    assert tags.get("stoker.problem_code") == ("exit_code" if trouble else None)


def test_a_job_that_never_started_has_waited_all_its_life() -> None:
    log = job()
    log.at_ms += 4_000
    event = JobFinished(job_id="j1", state="cancelled", outcome="cancelled", attempts=0, gpu_ms=0)
    ended = ending(event, log.append(event), log.records)
    assert {m.key: m.value for m in ended.metrics}["stoker/queue_seconds"] == 4.0


@given(st.integers(), st.integers(), st.floats() | st.sampled_from(["NaN", "Infinity", "-Infinity", "junk"]))
def test_mlflow_takes_every_point(step: int, time_ms: int, value: float | str) -> None:
    (point,) = measured([Point(key="loss", value=value, step=step, time_ms=time_ms)])
    metric = Metric(point.key, point.value, point.time_ms, point.step)
    MLFLOW._validate_batch_log_data(metrics=[metric], params=[], tags=[])
    assert -(2**63) <= point.step < 2**63 and 0 <= point.time_ms < 2**63


def test_nan_stays_nan_and_infinities_stay_infinite() -> None:
    points = [Point(key="k", value=v, step=0, time_ms=0) for v in ("NaN", "Infinity", "-Infinity", 1.5)]
    values = [p.value for p in measured(points)]
    assert math.isnan(values[0]) and values[1:] == [math.inf, -math.inf, 1.5]
