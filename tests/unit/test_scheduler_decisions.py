"""What the scheduler decides."""

from __future__ import annotations

from stoker_proto import (
    CancelRequested,
    ClusterConfigured,
    DecisionBatch,
    JobFailureAttributed,
    JobFinished,
    NodeQuarantined,
    NodeUnknown,
    Place,
    PreflightFailed,
    PreflightPassed,
    Stop,
    problem,
)
from stoker_proto import Cluster as ClusterConfig
from stoker_scheduler.board import Timing
from stoker_scheduler.desired import desired
from tests.builders import exited, joined, ready, released, sealed, submitted
from tests.unit.scheduler_cluster import Cluster


def attributed(
    job_id: str, attempt: int, outcome: str, *, retry: bool, node: str | None = None
) -> JobFailureAttributed:
    return JobFailureAttributed.model_validate(
        {
            "job_id": job_id, "attempt": attempt, "outcome": outcome, "blame": "node" if node else "user",
            "confidence": "established", "node": node, "retry": retry,
            "exclude_nodes": (node,) if node else (),
            "problem": problem("gpu_fault" if node else "python_exception", "because"),
        }
    )  # fmt: skip


def quarantined(node: str, epoch: str = "b1") -> NodeQuarantined:
    return NodeQuarantined(node=node, boot_epoch=epoch, rule="xid", reason="XID 79")


def test_a_job_is_placed_on_a_ready_node_and_finishes_when_its_logs_are_sealed() -> None:
    cluster = Cluster()
    cluster.nodes("n1")
    cluster.tell(submitted("j"))
    assert cluster.places("j") == ("n1",)
    cluster.start("j")
    attempt = cluster.attempt("j")
    cluster.log.at_ms += 5_000
    cluster.tell(exited("j", 1, "n1", attempt.fence), released("j", 1, "n1", attempt.fence))
    assert cluster.job("j").state == "active", "not finished before the logs are sealed"
    cluster.tell(sealed("j", 1, "n1", attempt.fence))
    assert cluster.ended("j").state == "succeeded"
    finished = [r.event for r in cluster.log.records if isinstance(r.event, JobFinished)]
    assert [(f.outcome, f.gpu_ms) for f in finished] == [("ok", 10_000)], "two GPUs for five seconds"


def test_a_node_takes_no_work_before_it_is_proven_ready() -> None:
    cluster = Cluster()
    cluster.tell(joined("n1"), submitted("j"))
    assert cluster.places("j") == ()
    assert cluster.job("j").reasons[0].code == "nodes_unavailable"
    cluster.tell(ready("n1"))
    assert cluster.places("j") == ("n1",)


def test_a_gang_is_placed_whole_or_not_at_all() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("small"))
    cluster.tell(submitted("gang", nodes=2))
    assert cluster.places("gang") == ()
    assert cluster.job("gang").reasons[0].code == "reserved"
    assert cluster.job("gang").reasons[0].blockers == ("small",)
    cluster.start("small")
    cluster.end("small")
    assert sorted(cluster.places("gang")) == ["n1", "n2"]


def test_two_gangs_never_hold_half_each() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2", "n3")
    cluster.tell(submitted("a", nodes=2), submitted("b", nodes=2))
    assert len(cluster.places("a")) == 2
    assert cluster.places("b") == ()


def test_small_jobs_do_not_starve_a_waiting_gang() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("first"), submitted("gang", nodes=2), submitted("later"))
    assert cluster.places("later") == (), "n2 is free, but the gang ahead waits for it"
    assert [r.code for r in cluster.job("later").reasons] == ["kept_for_others"]


def test_a_job_that_cannot_run_now_at_all_blocks_nobody() -> None:
    cluster = Cluster()
    cluster.nodes("n1")
    cluster.tell(submitted("big", nodes=2), submitted("small"))
    assert cluster.job("big").reasons[0].code == "too_few_nodes"
    assert cluster.places("small") == ("n1",)


def test_in_a_deep_queue_every_job_has_its_reason_and_no_reason_grows_with_the_queue() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("running"), submitted("gang", nodes=2), *(submitted(f"j{n:03d}") for n in range(300)))
    last = cluster.job("j299")
    assert [(r.code, r.blockers) for r in last.reasons] == [("kept_for_others", ("gang",))]
    assert len(last.reasons[0].model_dump_json()) < 500


def test_higher_classes_go_first_and_equals_in_order_of_submission() -> None:
    cluster = Cluster()
    cluster.tell(
        submitted("normal-1"), submitted("normal-2"), submitted("critical", priority_class="CRITICAL"),
        submitted("low", priority_class="BEST_EFFORT"),
    )  # fmt: skip
    order: list[str] = []
    cluster.nodes("n1")
    for _ in range(4):
        (running,) = list(cluster.scheduler.state.active)
        order.append(running)
        cluster.start(running)
        cluster.end(running)
    assert order == ["critical", "normal-1", "normal-2", "low"]


def test_other_models_pass_a_blocked_job() -> None:
    cluster = Cluster()
    cluster.tell(joined("a1", model="A100"), ready("a1"), joined("h1", model="H100"), ready("h1"))
    cluster.tell(submitted("h-1", model="H100"), submitted("h-2", model="H100"), submitted("a", model="A100"))
    assert cluster.places("h-2") == ()
    assert cluster.places("a") == ("a1",)


def test_a_quarantined_node_is_left_and_the_job_resumes_elsewhere() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2", "n3")
    cluster.tell(submitted("j", nodes=2))
    cluster.start("j")
    bad = cluster.places("j")[1]
    attempt = cluster.attempt("j")
    cluster.tell(exited("j", 1, bad, attempt.fence, "infra_gpu"))
    cluster.tell(quarantined(bad))
    assert cluster.attempt("j").stop == "peer_failed"
    cluster.stopped("j")
    assert cluster.job("j").state == "active", "waits to be told whose fault it was"
    cluster.tell(attributed("j", 1, "infra_gpu", retry=True, node=bad))
    assert cluster.job("j").retried == (("infra_gpu", 1),)
    assert cluster.attempt("j").number == 2
    assert bad not in cluster.places("j")
    assert len(cluster.places("j")) == 2


def test_quarantine_alone_stops_what_runs_there() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("j"))
    cluster.start("j")
    cluster.tell(quarantined("n1"))
    assert cluster.attempt("j").stop == "node_quarantined"
    cluster.stopped("j")
    assert cluster.places("j") == ("n2",)


def test_a_user_error_is_not_retried_and_keeps_its_problem() -> None:
    cluster = Cluster()
    cluster.nodes("n1")
    cluster.tell(submitted("j"))
    cluster.start("j")
    cluster.tell(exited("j", 1, "n1", cluster.attempt("j").fence, "user_error"))
    cluster.tell(attributed("j", 1, "user_error", retry=False))
    cluster.stopped("j")
    job = cluster.ended("j")
    assert (job.state, job.attempts) == ("failed", 1)
    assert job.problem is not None
    assert job.problem.origin == "user"


def test_retries_end_when_the_limit_is_used_up() -> None:
    cluster = Cluster()
    cluster.nodes("n1")
    cluster.tell(submitted("j", limits={"max_retries": 1}))
    for number in (1, 2):
        cluster.later(60_000)
        cluster.start("j")
        cluster.tell(exited("j", number, "n1", cluster.attempt("j").fence, "infra_comm"))
        cluster.tell(attributed("j", number, "infra_comm", retry=True))
        cluster.stopped("j")
    job = cluster.ended("j")
    assert (job.state, job.attempts, job.outcome) == ("failed", 2, "infra_comm")
    assert job.problem is not None
    assert "max_retries = 1 is used up" in job.problem.detail


def test_silent_attribution_is_waited_for_and_then_done_without() -> None:
    cluster = Cluster()
    cluster.nodes("n1")
    cluster.tell(submitted("j", limits={"max_retries": 0}))
    cluster.start("j")
    cluster.tell(exited("j", 1, "n1", cluster.attempt("j").fence, "infra_node"))
    cluster.stopped("j")
    assert cluster.job("j").state == "active"
    due = cluster.scheduler.due_ms(cluster.log.at_ms)
    assert due is not None
    cluster.later(due - cluster.log.at_ms)
    assert cluster.ended("j").state == "failed"


def test_cancel_works_in_every_state() -> None:
    cluster = Cluster()
    cluster.tell(submitted("queued"), CancelRequested(job_id="queued"))
    assert cluster.ended("queued").state == "cancelled"
    cluster.nodes("n1")
    cluster.tell(submitted("placed"))
    cluster.tell(CancelRequested(job_id="placed"))
    assert cluster.attempt("placed").stop == "cancelled"
    cluster.stopped("placed")
    assert cluster.ended("placed").state == "cancelled"
    cluster.tell(submitted("running"))
    cluster.start("running")
    cluster.tell(CancelRequested(job_id="running"))
    assert cluster.job("running").state == "active", "cancelling until the exit is proven"
    cluster.stopped("running")
    assert cluster.ended("running").state == "cancelled"
    cluster.tell(CancelRequested(job_id="running"))
    assert cluster.ended("running").state == "cancelled"


def test_a_cancel_that_comes_after_success_changes_nothing() -> None:
    cluster = Cluster()
    cluster.nodes("n1")
    cluster.tell(submitted("j"))
    cluster.start("j")
    cluster.tell(exited("j", 1, "n1", cluster.attempt("j").fence))
    cluster.tell(CancelRequested(job_id="j"))
    cluster.stopped("j")
    assert cluster.ended("j").state == "succeeded"


def test_a_place_decided_before_a_cancel_is_void_when_it_lands_after() -> None:
    cluster = Cluster()
    cluster.nodes("n1")
    cluster.fold(submitted("j"))
    (batch,) = [d.event for d in cluster.scheduler.decide(cluster.log.at_ms) if isinstance(d.event, DecisionBatch)]
    assert isinstance(batch.actions[0], Place)
    cluster.fold(CancelRequested(job_id="j"))
    cluster.fold(batch)
    assert cluster.scheduler.state.voided == 1
    assert cluster.scheduler.state.owner["n1"] == {}
    cluster.decide()
    assert cluster.ended("j").state == "cancelled"


def test_a_gang_whose_one_node_was_quarantined_meanwhile_is_void_as_a_whole() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2")
    cluster.fold(submitted("j", nodes=2))
    (batch,) = [d.event for d in cluster.scheduler.decide(cluster.log.at_ms) if isinstance(d.event, DecisionBatch)]
    cluster.fold(quarantined("n2"))
    cluster.fold(batch)
    assert cluster.scheduler.state.owner == {"n1": {}, "n2": {}}
    assert cluster.job("j").state == "queued"


def test_reports_of_an_old_attempt_change_only_a_counter() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("j"))
    old = cluster.attempt("j").fence
    cluster.start("j")
    cluster.tell(quarantined("n1"))
    cluster.stopped("j")
    cluster.start("j")
    before = cluster.scheduler.state.ignored
    cluster.tell(exited("j", 1, "n2", old, "user_error"), released("j", 2, "n2", old))
    assert cluster.scheduler.state.ignored == before + 2
    assert cluster.attempt("j").stop is None


def test_a_reboot_releases_what_ran_before_it_and_the_job_runs_again() -> None:
    cluster = Cluster()
    cluster.nodes("n1")
    cluster.tell(submitted("j"))
    cluster.start("j")
    cluster.tell(joined("n1", epoch="b2"))
    assert cluster.scheduler.state.owner["n1"] == {}
    assert cluster.job("j").state == "queued"
    cluster.tell(ready("n1", "b2"))
    assert cluster.places("j") == ("n1",)
    assert cluster.attempt("j").number == 2


def test_a_silent_node_keeps_its_jobs_until_they_are_certainly_gone() -> None:
    cluster = Cluster(Timing(fence_ms=60_000))
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("j"))
    cluster.start("j")
    cluster.tell(NodeUnknown(node="n1", boot_epoch="b1", rule="silence", reason="no heartbeat"))
    cluster.later(59_000)
    assert cluster.places("j") == ("n1",)
    cluster.later(1_000)
    assert cluster.places("j") == ("n2",)
    assert cluster.attempt("j").number == 2


def test_a_failed_preflight_moves_the_job_without_counting_as_a_failure() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2", "n3")
    cluster.tell(submitted("j", nodes=2))
    bad = cluster.places("j")[0]
    cluster.tell(quarantined(bad), PreflightFailed(job_id="j", attempt=1, nodes=(bad,), detail="wrong sum"))
    cluster.stopped("j")
    job = cluster.job("j")
    assert (job.retried, job.attempts) == ((), 2)
    assert bad not in cluster.places("j")


def test_a_preflight_stays_fresh_for_the_same_nodes_until_something_is_found() -> None:
    cluster = Cluster(Timing(fresh_ms=600_000))
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("a", nodes=2))
    assert cluster.attempt("a").preflight == "required"
    cluster.tell(PreflightPassed(job_id="a", attempt=1, nodes=cluster.places("a")))
    cluster.start("a")
    cluster.end("a")
    cluster.tell(submitted("b", nodes=2))
    assert cluster.attempt("b").preflight == "fresh"
    cluster.start("b")
    cluster.end("b")
    cluster.log.at_ms += 600_000
    cluster.tell(submitted("c", nodes=2))
    assert cluster.attempt("c").preflight == "required"


def test_an_attempt_over_its_time_limit_is_stopped_and_expires() -> None:
    cluster = Cluster()
    cluster.nodes("n1")
    cluster.tell(submitted("j", limits={"timeout_minutes": 1}))
    cluster.start("j")
    assert cluster.scheduler.due_ms(cluster.log.at_ms) == cluster.log.at_ms + 60_000
    cluster.later(60_000)
    assert cluster.attempt("j").stop == "timeout"
    cluster.stopped("j")
    assert cluster.ended("j").state == "expired"


def test_a_launcher_that_accepts_and_goes_silent_loses_the_attempt_at_the_start_deadline() -> None:
    cluster = Cluster(Timing(start_deadline_ms=30_000))
    cluster.nodes("n1")
    cluster.tell(submitted("j"))
    told = cluster.later(30_000)
    assert any(isinstance(a, Stop) for e in told if isinstance(e, DecisionBatch) for a in e.actions)
    cluster.stopped("j")
    assert cluster.attempt("j").number == 2


def test_desired_state_names_what_runs_and_drops_what_is_released() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2")
    cluster.tell(submitted("j", nodes=2))
    wanted = desired(cluster.scheduler.state)
    assert {n: [(a.job_id, a.want) for a in w.attempts] for n, w in wanted.items()} == {
        "n1": [("j", "run")],
        "n2": [("j", "run")],
    }
    cluster.tell(CancelRequested(job_id="j"))
    assert [a.want for a in desired(cluster.scheduler.state)["n1"].attempts] == ["stop"]
    cluster.tell(released("j", 1, "n1", cluster.attempt("j").fence))
    assert desired(cluster.scheduler.state)["n1"].attempts == ()


def test_what_a_borrower_has_kept_for_it_goes_to_a_queue_that_does_not_borrow() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2")
    queues = [{"name": "default"}, {"name": "agents", "gpus": {"nominal": 1}}]
    cluster.tell(ClusterConfigured(version=1, cluster=ClusterConfig.model_validate({"queues": queues})))
    borrower = {"compute": {"accelerator_type": "GPU_2xSIM", "num_accelerators": 2, "queue": "agents"}}
    cluster.tell(*(submitted(name, **borrower) for name in ("a", "b", "kept")))
    assert cluster.job("kept").reasons[0].code == "reserved"
    for name in ("a", "b"):
        cluster.start(name)
    cluster.tell(submitted("owner", per_node=1))
    cluster.end("a")
    assert cluster.places("owner"), "agents is beyond its nominal, default has nothing to give back"


def test_where_a_job_goes_does_not_depend_on_which_node_joined_first() -> None:
    for names in (("n1", "n2", "n3"), ("n3", "n1", "n2"), ("n2", "n3", "n1")):
        cluster = Cluster()
        cluster.nodes(*names)
        cluster.tell(submitted("one"), submitted("two"))
        assert (cluster.places("one"), cluster.places("two")) == (("n1",), ("n2",))
