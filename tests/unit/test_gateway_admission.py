"""A spec is checked against cluster, jobs, nodes and clock as they are now, with every mistake told at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stoker_chassis.memory import memory_bus
from stoker_chassis.stores import Bus
from stoker_gateway.fit import Machine, never_fits
from stoker_gateway.validate import read_spec
from stoker_proto import Cluster, FieldError, Gpu, JobSpec, Problem, ProblemError, Queue, Window
from tests.builders import joined, spec, submitted
from tests.unit.gateway_api import SPEC, gateway
from tests.unit.test_gateway_cluster import GOOD, put
from tests.unit.test_gateway_views import finished

NIGHT = Window(name="night", zone="UTC", days=("mon",), start="18:00", end="06:00")
CLUSTER = Cluster(queues=(Queue(name="research"), Queue(name="vision", parent="research")), windows=(NIGHT,))


@pytest.fixture
def memory(tmp_path: Path) -> Bus:
    return memory_bus(tmp_path / "blobs")


def mistakes(cluster: Cluster, **more: Any) -> dict[str, FieldError]:
    with pytest.raises(ProblemError) as caught:
        read_spec(SPEC | more, cluster=cluster)
    return {e.pointer: e for e in caught.value.problem.errors}


def test_names_that_the_cluster_does_not_have_are_told_with_those_that_it_has() -> None:
    compute = SPEC["compute"] | {"queue": "visoin", "priority_class": "URGENT", "within": "racks"}
    found = mistakes(CLUSTER, compute=compute, schedule={"window": "nigth"}, comand="x")
    assert {p: (e.code, e.suggestion, e.allowed) for p, e in found.items() if p != "/comand"} == {
        "/compute/queue": ("not_allowed", "vision", ("research", "vision")),
        "/compute/priority_class": ("not_allowed", None, ("BEST_EFFORT", "NORMAL", "CRITICAL")),
        "/compute/within": ("not_allowed", "rack", ("rack", "rail")),
        "/schedule/window": ("not_allowed", "night", ("night",)),
    }
    assert found["/comand"].code == "unknown_field"


def test_a_queue_that_is_not_named_must_be_there_too() -> None:
    found = mistakes(CLUSTER)
    assert set(found) == {"/compute/queue"}
    assert "'default'" in found["/compute/queue"].message
    assert read_spec(SPEC | {"compute": SPEC["compute"] | {"queue": "vision"}}, cluster=CLUSTER)
    assert set(mistakes(Cluster(), schedule={"window": "night"})) == {"/schedule/window"}


def test_a_share_finer_than_a_thousandth_is_told_beside_other_mistakes() -> None:
    compute = SPEC["compute"] | {"gpu_fraction": 0.33333, "num_accelerators": 3, "priority_class": "X"}
    found = mistakes(Cluster(), compute=compute)
    assert set(found) == {"/compute/gpu_fraction", "/compute/num_accelerators", "/compute/priority_class"}
    assert found["/compute/gpu_fraction"].suggestion == "0.333"


async def test_jobs_to_wait_for_must_be_there_and_a_deadline_ahead(memory: Bus) -> None:
    past, future = (datetime.now(UTC) + timedelta(minutes=m) for m in (-1, 60))
    async with gateway(memory) as api:
        job_id = await api.submit()
        schedule: dict[str, Any] = {
            "after": [{"job": job_id}, {"job": "job-none"}, {"job": "not a job"}, {"on": "end"}],
            "deadline": past.isoformat(),
        }
        for path in ("/v1/jobs", "/v1/jobs:validate", "/v1/jobs:plan"):
            refused = (await api.http.post(path, json={"spec": SPEC | {"schedule": schedule, "comand": 1}})).json()
            assert {(e["pointer"], e["code"]) for e in refused["errors"]} == {
                ("/comand", "unknown_field"),
                ("/schedule/after/1/job", "not_found"),
                ("/schedule/after/2/job", "not_found"),
                ("/schedule/after/3/job", "missing"),
                ("/schedule/deadline", "invalid"),
            }
        good = {"after": [{"job": job_id, "on": "end"}], "deadline": future.isoformat()}
        assert (await api.http.post("/v1/jobs", json={"spec": SPEC | {"schedule": good}})).status_code == 201
        naive = {"deadline": "2020-01-01T00:00:00"}
        told = (await api.http.post("/v1/jobs", json={"spec": SPEC | {"schedule": naive}})).json()
        assert [e["pointer"] for e in told["errors"]] == ["/schedule/deadline"]


async def test_a_job_of_another_gateway_may_be_waited_for_before_this_one_has_read_it(memory: Bus) -> None:
    async with gateway(memory) as api:
        api.views.fold = lambda burst: None  # type: ignore[method-assign]
        await api.say(submitted("j"))
        after = {"after": [{"job": "j"}]}
        assert (await api.http.post("/v1/jobs:validate", json={"spec": SPEC | {"schedule": after}})).status_code == 200


async def test_the_clusters_labels_say_which_nodes_are_together(memory: Bus) -> None:
    compute = {"accelerator_type": "GPU_2xSIM", "num_accelerators": 4, "within": "rack"}
    async with gateway(memory) as api:
        await api.say(joined("n1"), joined("n2"))
        assert (await api.http.post("/v1/jobs", json={"spec": SPEC | {"compute": compute}})).json()[
            "code"
        ] == "never_fits"
        await put(api, GOOD | {"labels": {"n1": {"rack": "r1"}, "n2": {"rack": "r1"}}})
        assert (await api.http.post("/v1/jobs", json={"spec": SPEC | {"compute": compute}})).status_code == 201


async def test_mistakes_in_yaml_have_their_lines(memory: Bus) -> None:
    text = """\
experiment_name: e
command: c
compute:
  accelerator_type: GPU_2xSIM
  num_accelerators: 2
  queue: defalt
schedule:
  after:
    - {job: job-none}
"""
    async with gateway(memory) as api:
        told = (await api.http.post("/v1/jobs:validate", json={"spec_yaml": text})).json()
    assert [(e["pointer"], e["line"]) for e in told["errors"]] == [("/compute/queue", 6), ("/schedule/after/0/job", 9)]


async def test_what_was_accepted_stays_accepted_when_its_queue_is_gone(memory: Bus) -> None:
    body = {"spec": SPEC | {"compute": SPEC["compute"] | {"queue": "vision"}}}
    async with gateway(memory) as api:
        await put(api, GOOD)
        first = await api.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k"})
        await api.say(finished(first.json()["job_id"], 0))
        assert (await put(api, {})).status_code == 200
        again = await api.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k"})
        assert (again.status_code, again.json()["job_id"]) == (200, first.json()["job_id"])
        fresh = await api.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k2"})
        assert [e["pointer"] for e in fresh.json()["errors"]] == ["/compute/queue"]


def machine(name: str, count: int, model: str = "H100", cpus: int = 64, gib: int = 512, **labels: str) -> Machine:
    gpus = tuple(Gpu(uuid=f"{name}-{i}", index=i, model=model, name=model, memory_bytes=1) for i in range(count))
    return Machine(gpus, cpus, gib * 2**30, name, labels)


def asks(nodes: int, per_node: int, model: str = "H100", **more: Any) -> JobSpec:
    job = spec(nodes, per_node, model)
    return job.model_copy(update={"compute": job.compute.model_copy(update=more)})


MACHINES = [
    machine("n1", 8, rack="r1"), machine("n2", 8, rack="r2"), machine("n3", 8, "A100", cpus=16, gib=64, rack="r2"),
    machine("n4", 4, "A100", rack="r2"),
]  # fmt: skip


def refused(job: JobSpec, **more: Any) -> Problem:
    told = never_fits(job, MACHINES, **more)
    assert told is not None
    return told


def test_any_of_several_accepted_models_will_do() -> None:
    assert never_fits(asks(3, 8, also_accept=("A100",)), MACHINES) is None
    assert never_fits(asks(1, 8, "V100", also_accept=("A100",)), MACHINES) is None
    told = refused(asks(4, 8, also_accept=("A100",)))
    assert "4 node(s) with 8 H100 or A100 GPUs each are needed; 3 of 4 nodes have that many" in told.detail
    assert told.facts["nearest"] == {"accelerator_type": "GPU_8xH100", "num_accelerators": 24}
    assert "no V100 or P100 here" in refused(asks(1, 8, "V100", also_accept=("P100",))).detail


def test_cores_and_memory_must_be_there_beside_the_gpus() -> None:
    assert never_fits(asks(2, 8, cpus_per_node=64, memory_gib_per_node=512), MACHINES) is None
    told = refused(asks(3, 8, also_accept=("A100",), cpus_per_node=17))
    assert "only 2 of them have 17 CPUs" in told.detail
    assert "up to 64 CPUs and 512 GiB" in told.next_actions[0]
    assert "1000 GiB" in refused(asks(1, 8, memory_gib_per_node=1000)).detail


def test_shares_of_gpus_need_as_many_gpus_as_whole_ones() -> None:
    assert never_fits(asks(2, 8, gpu_fraction=0.25), MACHINES) is None
    assert refused(asks(1, 9, gpu_fraction=0.1)).code == "never_fits"


def test_a_gang_in_one_domain_needs_one_that_is_large_enough() -> None:
    assert never_fits(asks(2, 4, "ANY", within="rack"), MACHINES) is None
    told = refused(asks(2, 8, within="rack"))
    assert "no rack holds more than 1 of them" in told.detail
    assert never_fits(asks(2, 8, within="rack"), MACHINES, labels={"n2": {"rack": "r1"}}) is None
    assert "no rail holds more than 0" in refused(asks(1, 8, within="rail")).detail
