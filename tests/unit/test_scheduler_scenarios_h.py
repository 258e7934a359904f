"""Scenarios H, nodes, retry, health: a bad node does not eat retries, and a bad job does not drain the cluster."""

from __future__ import annotations

import pytest

from stoker_proto import JobFailureAttributed, NodeQuarantined, Outcome, PlanAsked, Planned, problem
from stoker_scheduler import answers
from stoker_scheduler.board import Timing
from stoker_scheduler.desired import desired
from stoker_scheduler.state import STRIKES
from tests.builders import exited, released, sealed, started, submitted
from tests.unit.scheduler_cluster import Cluster

MINUTE_MS = 60_000


def blame(job_id: str, attempt: int, outcome: Outcome, **fields: object) -> JobFailureAttributed:
    """As health says it of a failure that no finding explains."""
    said = {"blame": "unknown", "confidence": "supported", "retry": True, "problem": problem("gpu_fault", "it broke")}
    about = {"job_id": job_id, "attempt": attempt, "outcome": outcome}
    return JobFailureAttributed.model_validate(about | said | fields)


def fail(cluster: Cluster, job_id: str, outcome: Outcome, *, attributed: bool = True, **fields: object) -> str:
    """The job fails on the first of its nodes, and all is released; which node it was."""
    attempt, nodes = cluster.attempt(job_id), cluster.places(job_id)
    cluster.tell(exited(job_id, attempt.number, nodes[0], attempt.fence, outcome))
    cluster.stopped(job_id)
    if attributed:
        cluster.tell(blame(job_id, attempt.number, outcome, **fields))
    return nodes[0]


def refuse(cluster: Cluster, job_id: str) -> str:
    """The node refuses to launch it, and health has nothing to add."""
    return fail(cluster, job_id, "launch_rejected", problem=problem("launch_rejected", "no such image"))


@pytest.mark.parametrize("attributed", [True, False])
def test_H1_the_second_attempt_avoids_a_node_that_refused_the_first(attributed: bool) -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("j"))
    bad = fail(cluster, "j", "launch_rejected", attributed=attributed)
    cluster.later(30_000)
    assert cluster.attempt("j").number == 2
    assert cluster.places("j") != (bad,)


def test_H1_retries_back_off_twice_as_long_each_time() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1")
    cluster.tell(submitted("j", limits={"max_retries": 5}))
    pauses = []
    for _ in range(5):
        refuse(cluster, "j")
        began = cluster.log.at_ms
        while not cluster.places("j"):
            due = cluster.scheduler.due_ms(cluster.log.at_ms)
            assert due is not None
            cluster.later(due - cluster.log.at_ms)
        pauses.append(cluster.log.at_ms - began)
    assert pauses == [0, 2_000, 4_000, 8_000, 16_000], "and the only node is not excluded, or the job would just wait"


def test_H1_a_node_that_refuses_several_jobs_gets_work_last_until_one_starts_there() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1", "n2")
    cluster.run(submitted("holds"))
    assert cluster.places("holds") == ("n1",)
    for number in range(STRIKES):
        assert not cluster.state.nodes["n2"].suspect
        cluster.tell(submitted(f"j{number}", limits={"max_retries": 0}))
        assert refuse(cluster, f"j{number}") == "n2"
    assert cluster.state.nodes["n2"].suspect
    cluster.end("holds")
    for number in range(2):
        cluster.tell(submitted(f"k{number}"))
    assert (cluster.places("k0"), cluster.places("k1")) == (("n1",), ("n2",)), "last, but not never"
    cluster.start("k1")
    assert not cluster.state.nodes["n2"].suspect


def test_H1_one_job_that_is_refused_everywhere_makes_no_node_suspect() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1", "n2", "n3")
    cluster.tell(submitted("j", limits={"max_retries": 9}))
    for _ in range(9):
        refuse(cluster, "j")
        cluster.later(MINUTE_MS)
    assert not any(node.suspect for node in cluster.state.nodes.values())
    assert {len(node.strikes) for node in cluster.state.nodes.values()} == {1}


def test_H2_a_fault_that_follows_the_job_from_node_to_node_is_the_job_s() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1", "n2", "n3", "n4")
    cluster.tell(submitted("j", limits={"max_retries": 10}))
    failed_on = []
    while "j" not in cluster.state.over:
        cluster.start("j")
        (node,) = cluster.places("j")
        failed_on.append(fail(cluster, "j", "infra_gpu", node=node, blame="node", exclude_nodes=(node,)))
        cluster.later(MINUTE_MS)
    assert len(set(failed_on)) == len(failed_on) == 3
    told = cluster.ended("j").problem
    assert told is not None
    assert "likely the job" in told.detail
    assert not told.retryable
    assert not any(node.suspect for node in cluster.state.nodes.values())


def test_H2_established_evidence_against_each_node_is_not_held_against_the_job() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1", "n2", "n3", "n4")
    cluster.tell(submitted("j", limits={"max_retries": 10}))
    for _ in range(3):
        cluster.start("j")
        (node,) = cluster.places("j")
        cluster.tell(NodeQuarantined(node=node, boot_epoch="b1", rule="xid", reason="XID 79"))
        attempt = cluster.attempt("j")
        cluster.tell(exited("j", attempt.number, node, attempt.fence, "infra_gpu"))
        cluster.stopped("j")
        cluster.tell(
            blame("j", attempt.number, "infra_gpu", node=node, blame="node", confidence="established",
                  exclude_nodes=(node,))
        )  # fmt: skip
        cluster.later(MINUTE_MS)
    assert cluster.attempt("j").number == 4


@pytest.mark.parametrize("gpus", [None, 0])
def test_H3_a_cluster_without_a_gpu_answers_and_waits(gpus: int | None) -> None:
    cluster = Cluster(check=True)
    if gpus is not None:
        cluster.nodes("cpu", gpus=gpus)
    cluster.tell(submitted("j"), submitted("any", model="ANY", nodes=2))
    for job_id in ("j", "any"):
        assert cluster.codes(job_id)[0] in ("too_few_nodes", "no_such_gpu")
    told = answers.plan(cluster.scheduler.cycle(cluster.log.at_ms), PlanAsked(spec=submitted("k").spec))
    assert isinstance(told, Planned)
    assert told.starts == "never"
    queues = answers.queues(cluster.scheduler.cycle(cluster.log.at_ms))
    assert (queues.gpus, queues.gpus_free, queues.queues[0].waiting_jobs) == (0, 0, 2)
    cluster.nodes("n1")
    assert cluster.places("j") == ("n1",)


def test_H5_a_launcher_that_accepts_and_goes_silent_loses_the_attempt_and_the_node_is_counted() -> None:
    cluster = Cluster(Timing(start_deadline_ms=3 * MINUTE_MS), check=True)
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("j"))
    (silent,) = cluster.places("j")
    assert cluster.scheduler.due_ms(cluster.log.at_ms) == cluster.log.at_ms + 3 * MINUTE_MS
    cluster.later(3 * MINUTE_MS)
    assert cluster.attempt("j").stop == "lost"
    assert cluster.state.nodes[silent].strikes == ("j",)
    cluster.later(30 * MINUTE_MS)
    assert [(a.job_id, a.want) for a in desired(cluster.state)[silent].attempts] == [("j", "stop")]
    assert cluster.state.holders(silent) == {"j"}, "it may have started after all: only proof gives the GPUs back"
    cluster.stopped("j")
    assert cluster.attempt("j").number == 2
    assert cluster.places("j") != (silent,)


def test_H5_of_a_gang_only_the_nodes_that_did_not_start_are_counted() -> None:
    cluster = Cluster(Timing(start_deadline_ms=3 * MINUTE_MS), check=True)
    cluster.nodes("n1", "n2", "n3")
    cluster.tell(submitted("j", nodes=2))
    went, silent = cluster.places("j")
    cluster.tell(started("j", 1, went, cluster.attempt("j").fence))
    cluster.later(3 * MINUTE_MS)
    assert cluster.state.nodes[silent].strikes == ("j",)
    assert cluster.state.nodes[went].strikes == ()
    cluster.stopped("j")
    assert set(cluster.places("j")) == {"n1", "n2", "n3"} - {silent}


def test_H7_a_retry_on_the_very_same_node_has_a_number_and_fence_of_its_own_and_the_first_cause_stays() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1")
    cluster.tell(submitted("j", limits={"max_retries": 1}))
    first = cluster.attempt("j")
    cluster.start("j")
    reset = problem("comm_fault", "NCCL: connection reset by peer")
    fail(cluster, "j", "infra_comm", problem=reset)
    second = cluster.attempt("j")
    assert cluster.places("j") == ("n1",)
    assert (second.number, second.fence > first.fence) == (2, True)
    cluster.tell(released("j", 1, "n1", first.fence), sealed("j", 1, "n1", first.fence))
    assert cluster.attempt("j") == second
    fail(cluster, "j", "infra_comm", problem=reset)
    told = cluster.ended("j")
    assert told.problem is not None
    assert (told.outcome, told.problem.code) == ("infra_comm", "comm_fault")
    assert told.problem.detail.startswith("NCCL: connection reset by peer")


@pytest.mark.parametrize("outcome", ["oom", "user_error"])
def test_H8_what_fails_by_itself_in_the_grace_of_a_preemption_is_not_excused_by_it(outcome: Outcome) -> None:
    cluster = Cluster(check=True)
    cluster.configure(scheduling={"min_run_minutes": 0})
    cluster.nodes("n1")
    cluster.run(submitted("low"))
    cluster.tell(submitted("p", priority_class="CRITICAL"))
    cluster.log.at_ms += 2_000
    fence = cluster.attempt("low").fence
    cluster.tell(exited("low", 1, "n1", fence, outcome, asked="preempted"))
    cluster.stopped("low")
    assert (cluster.ended("low").state, cluster.ended("low").outcome) == ("failed", outcome)
    assert cluster.places("p") == ("n1",)


def test_H8_a_gang_whose_one_node_ran_out_of_memory_in_the_grace_failed_by_that() -> None:
    cluster = Cluster(check=True)
    cluster.configure(scheduling={"min_run_minutes": 0})
    cluster.nodes("n1", "n2")
    cluster.run(submitted("low", nodes=2))
    cluster.tell(submitted("p", priority_class="CRITICAL"))
    fence = cluster.attempt("low").fence
    cluster.tell(exited("low", 1, "n2", fence, "oom", asked="preempted"))
    cluster.stopped("low")
    assert cluster.ended("low").outcome == "oom"


def test_H8_what_is_done_in_the_grace_has_succeeded() -> None:
    cluster = Cluster(check=True)
    cluster.configure(scheduling={"min_run_minutes": 0})
    cluster.nodes("n1")
    cluster.run(submitted("low"))
    cluster.tell(submitted("p", priority_class="CRITICAL"))
    cluster.tell(exited("low", 1, "n1", cluster.attempt("low").fence, "ok", asked="preempted"))
    cluster.stopped("low")
    assert cluster.ended("low").state == "succeeded"
    assert cluster.places("p") == ("n1",)
