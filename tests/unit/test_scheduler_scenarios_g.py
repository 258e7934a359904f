"""Scenarios G, no reason or a wrong one: every waiting job says what binds it, in numbers, and what may be done."""

from __future__ import annotations

import pytest

from stoker_proto import HoldReleased, HoldRequested, NodeQuarantined, PlanAsked, Planned, Reason
from stoker_scheduler import answers
from tests.builders import joined, ready, submitted
from tests.unit.scheduler_cluster import Cluster

LIMITED = {
    "queues": [{"name": "default"}, {"name": "small", "gpus": {"limit": 2}}, {"name": "night", "window": "night"}],
    "windows": [{"name": "night", "zone": "UTC", "days": ["sun"], "start": "03:00", "end": "03:01"}],
}


def first(cluster: Cluster, job_id: str) -> Reason:
    return cluster.job(job_id).reasons[0]


def test_G1_full_wrong_type_quota_policy_and_never_fits_are_told_apart_with_facts_and_something_to_do() -> None:
    cluster = Cluster(check=True)
    cluster.configure(**LIMITED)
    cluster.nodes("n1", "n2")
    cluster.run(submitted("a"), submitted("b", queue="small"))
    cluster.tell(
        submitted("full", per_node=1), submitted("wrong-type", model="H100"), submitted("quota", queue="small"),
        submitted("policy", queue="night"), submitted("too-large", per_node=8), submitted("too-many", nodes=3),
    )  # fmt: skip
    told = {
        job_id: first(cluster, job_id) for job_id in ("full", "wrong-type", "quota", "policy", "too-large", "too-many")
    }
    assert {job_id: reason.code for job_id, reason in told.items()} == {
        "full": "gpus_busy",
        "wrong-type": "no_such_gpu",
        "quota": "queue_limit",
        "policy": "window_closed",
        "too-large": "nodes_too_small",
        "too-many": "too_few_nodes",
    }
    assert told["full"].facts["free_gpus"] == 0
    assert told["full"].blockers == ("a", "b")
    assert told["wrong-type"].facts == {"models": ["SIM"], "models_asked": ["H100"]}
    assert told["quota"].facts == {"queue": "small", "used_gpus": 2, "asked_gpus": 2, "bound_gpus": 2}
    assert told["policy"].facts == {"window": "night"}
    assert told["too-large"].facts == {"gpus_asked": 8, "most_gpus_on_a_node": 2}
    assert told["too-large"].actions[0] == "ask for GPU_2xSIM on 4 nodes"
    assert told["too-many"].facts == {"nodes_needed": 3, "nodes_of_this_kind": 2}
    assert all(reason.actions for reason in told.values())


def test_G1_a_node_with_too_few_cores_is_too_small_and_says_so() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1")
    cluster.tell(submitted("j", cpus_per_node=64))
    assert first(cluster, "j").code == "nodes_too_small"
    assert first(cluster, "j").facts == {"cores_asked": 64, "most_cores_on_a_node": 4}


@pytest.mark.parametrize(("fields", "starts"), [({"model": "H100"}, "never"), ({"per_node": 8}, "never"), ({}, "now")])
def test_G1_a_plan_says_never_for_what_no_node_could_ever_hold(fields: dict[str, object], starts: str) -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1")
    told = answers.plan(cluster.scheduler.cycle(cluster.log.at_ms), PlanAsked(spec=submitted("j", **fields).spec))
    assert isinstance(told, Planned)
    assert told.starts == starts


UNKEPT = {"reservations": 0}  # so that no job has GPUs kept for it, which is another reason


def test_G2_gpus_that_are_idle_in_pieces_are_counted_as_they_are_free_not_as_they_are() -> None:
    cluster = Cluster(check=True)
    cluster.configure(scheduling=UNKEPT)
    for node in ("n1", "n2"):
        cluster.nodes(node)
        cluster.run(submitted(f"on-{node}", per_node=1))
        cluster.run(submitted(f"fills-{node}", per_node=1))
    for node in ("n1", "n2"):
        cluster.end(f"fills-{node}")
    cluster.tell(submitted("j"))
    reason = first(cluster, "j")
    assert reason.code == "gpus_busy"
    assert reason.facts == {"nodes_needed": 1, "nodes_free": 0, "nodes_of_this_kind": 2, "free_gpus": 2}
    assert reason.blockers == ("on-n1", "on-n2")


def test_G2_an_idle_node_that_the_job_avoids_or_that_is_under_repair_is_named() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1", "n2")
    cluster.run(submitted("a"))
    cluster.tell(NodeQuarantined(node="n2", boot_epoch="b1", rule="xid", reason="XID 79"))
    cluster.tell(submitted("j", nodes=2))
    assert first(cluster, "j").code == "nodes_unavailable"
    assert first(cluster, "j").blockers == ("n2 (quarantined: XID 79)",)


def test_G2_idle_gpus_of_a_model_that_quota_closes_are_not_said_to_have_gone_to_others() -> None:
    cluster = Cluster(check=True)
    cluster.configure(queues=[{"name": "default", "models": {"A100": {"limit": 2}}}], scheduling=UNKEPT)
    for node, model in (("a1", "A100"), ("a2", "A100"), ("h1", "H100")):
        cluster.tell(joined(node, model=model), ready(node))
    cluster.run(submitted("on-a", model="A100"), submitted("on-h", model="H100"))
    cluster.tell(submitted("either", model="A100", also_accept=["H100"]))
    assert cluster.codes("either") == ["gpus_busy", "queue_limit"]
    busy, limit = cluster.job("either").reasons
    assert (busy.facts["nodes_of_this_kind"], busy.blockers) == (1, ("on-h",))
    assert (limit.facts["used_gpus"], limit.facts["bound_gpus"]) == (2, 2)
    assert "A100 GPUs" in limit.message
    cluster.end("on-h")
    assert cluster.places("either") == ("h1",)


def test_G2_a_hold_and_its_release_change_the_reason_wherever_the_job_stands() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1")
    cluster.run(submitted("runs", per_node=2))
    cluster.tell(*(submitted(f"j{n}", per_node=1) for n in range(3)))
    assert cluster.codes("j2") == ["gpus_busy"]
    cluster.tell(HoldRequested(job_id="j2"))
    assert cluster.codes("j2") == ["held"]
    cluster.tell(HoldReleased(job_id="j2"))
    assert cluster.codes("j2") == ["gpus_busy"]


def test_G2_a_dependency_that_comes_true_is_not_the_reason_any_more() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1")
    cluster.run(submitted("runs", per_node=1), submitted("other", per_node=1))
    cluster.tell(submitted("ahead", per_node=1))
    cluster.tell(submitted("j", per_node=1, schedule={"after": [{"job": "runs"}]}))
    assert cluster.codes("j") == ["dependency"]
    cluster.end("runs")
    assert (cluster.places("ahead"), cluster.codes("j")) == (("n1",), ["gpus_busy"])


def test_G4_a_job_whose_queue_is_taken_away_says_so_and_is_counted_until_the_queue_is_back() -> None:
    cluster = Cluster(check=True)
    team = {"queues": [{"name": "default"}, {"name": "team"}]}
    cluster.configure(**team)
    cluster.nodes("n1")
    cluster.run(submitted("runs", queue="team"))
    cluster.tell(submitted("a", queue="team", per_node=1), submitted("b", queue="team", per_node=1))
    assert (cluster.codes("a"), cluster.codes("b")) == (["gpus_busy"], ["gpus_busy"])
    cluster.configure(queues=[{"name": "default"}])
    assert (cluster.codes("a"), cluster.codes("b")) == (["unknown_queue"], ["unknown_queue"])
    told = {q.name: q for q in answers.queues(cluster.scheduler.cycle(cluster.log.at_ms)).queues}
    assert (told["team"].waiting_jobs, told["team"].waiting_gpus, told["team"].used) == (2, 2, 2)
    assert [shape.reason for shape in told["team"].shapes] == ["unknown_queue"]
    cluster.end("runs")
    assert cluster.places("a") == ()
    cluster.configure(**team)
    assert (cluster.places("a"), cluster.places("b")) == (("n1",), ("n1",))


def test_G4_a_job_of_a_class_that_is_taken_away_says_so() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1")
    cluster.run(submitted("runs"))
    cluster.tell(submitted("j", per_node=1, priority_class="BEST_EFFORT"))
    cluster.configure(classes=[{"name": "NORMAL", "value": 1}])
    assert cluster.codes("j") == ["unknown_class"]
    assert first(cluster, "j").facts["classes"] == ["NORMAL"]


def test_G6_a_job_that_quota_and_topology_both_refuse_says_both_in_order() -> None:
    cluster = Cluster(check=True)
    cluster.configure(queues=[{"name": "default"}, {"name": "small", "gpus": {"limit": 4}}], topology=["rack"])
    for node, rack in (("n1", "r1"), ("n2", "r1"), ("n3", "r2"), ("n4", "r2")):
        cluster.tell(joined(node, labels={"rack": rack}), ready(node))
    cluster.run(submitted("a", queue="small"))
    (taken,) = cluster.places("a")
    cluster.run(submitted("b"))
    cluster.tell(submitted("j", queue="small", nodes=2, within="rack"))
    assert taken in ("n1", "n2")
    free = {n for n in ("n1", "n2", "n3", "n4") if not cluster.state.holders(n)}
    codes = cluster.codes("j")
    assert codes[0] == "queue_limit"
    assert codes[1:] == ([] if free == {"n3", "n4"} else ["topology"])


def test_G6_a_job_that_quota_refuses_and_that_would_find_no_gpus_either_says_both() -> None:
    cluster = Cluster(check=True)
    cluster.configure(queues=[{"name": "default"}, {"name": "small", "gpus": {"limit": 2}}])
    cluster.nodes("n1", "n2")
    cluster.run(submitted("a", queue="small"))
    cluster.tell(submitted("j", queue="small", per_node=1))
    assert cluster.codes("j") == ["queue_limit"], "n2 is idle: only quota says no"
    cluster.run(submitted("b"))
    assert cluster.codes("j") == ["queue_limit", "gpus_busy"]


def test_G6_all_gates_are_told_each_must_go() -> None:
    cluster = Cluster(check=True)
    cluster.configure(**LIMITED)
    cluster.tell(submitted("x", schedule={"hold": True}))
    cluster.tell(submitted("j", queue="night", schedule={"hold": True, "after": [{"job": "x"}]}))
    assert cluster.codes("j") == ["held", "dependency", "window_closed"]
