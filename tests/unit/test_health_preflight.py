"""A gang may start when every node's checks and sums are right; else the node at fault is named, when there is one."""

from __future__ import annotations

from stoker_proto import (
    AllReduceSum,
    AttemptPlaced,
    CheckResult,
    Event,
    FindingRecorded,
    JobRequeued,
    NodeDegraded,
    NodeQuarantined,
    PreflightFailed,
    PreflightPassed,
)

from .health_node import Leader, gang, report


def placed(*nodes: str, event: AttemptPlaced | None = None) -> Leader:
    leader = Leader().ready(*nodes)
    assert leader.tell(event or gang(*nodes)) == []
    return leader


def failed(events: list[Event]) -> PreflightFailed:
    [one] = [e for e in events if isinstance(e, PreflightFailed)]
    return one


def test_nothing_is_judged_before_every_node_has_reported_the_same_round() -> None:
    leader = placed("n1", "n2")
    assert leader.tell(report("n1", range(2), 4)) == []
    assert leader.tell(report("n2", range(2, 4), 4, round=2)) == []


def test_right_sums_on_every_node_pass() -> None:
    leader = placed("n1", "n2")
    said = leader.tell(report("n1", range(2), 4), report("n2", range(2, 4), 4))
    assert said == [PreflightPassed(job_id="j", attempt=1, nodes=("n1", "n2"))]
    assert leader.rule() == []


def test_a_rank_that_adds_wrong_names_and_quarantines_its_node() -> None:
    leader = placed("n1", "n2")
    said = leader.tell(*(report(n, r, 4, wrong_slots=(3,)) for n, r in (("n1", range(2)), ("n2", range(2, 4)))))
    assert [type(e) for e in said] == [FindingRecorded, PreflightFailed, NodeQuarantined]
    assert failed(said).nodes == ("n2",)
    assert (leader.verdict("n1"), leader.verdict("n2")) == ("ready", "quarantined")


def test_ranks_count_by_node_rank_and_not_by_the_order_in_which_allocations_are_listed() -> None:
    event = gang("n1", "n2")
    leader = placed("n1", "n2", event=event.model_copy(update={"allocations": event.allocations[::-1]}))
    said = leader.tell(*(report(n, r, 4, wrong_slots=(3,)) for n, r in (("n1", range(2)), ("n2", range(2, 4)))))
    assert failed(said).nodes == ("n2",)


def test_a_rank_that_alone_reads_wrong_names_its_own_node() -> None:
    leader = placed("n1", "n2")
    right = report("n1", range(2), 4)
    slots = right.sums[0].slots
    torn = (slots[0] + 9, *slots[1:])
    sums = (AllReduceSum(rank=2, slots=torn, seconds=0.1), AllReduceSum(rank=3, slots=slots, seconds=0.1))
    assert failed(leader.tell(right, report("n2", range(2, 4), 4, sums=sums))).nodes == ("n2",)


def test_two_ranks_on_two_nodes_that_disagree_fail_the_gang_and_blame_neither() -> None:
    leader = placed("n1", "n2", event=gang("n1", "n2", gpus=1))
    said = leader.tell(report("n1", range(1), 2, wrong_slots=(1,)), report("n2", range(1, 2), 2))
    assert said == [failed(said)]
    assert failed(said).nodes == ()


def test_two_ranks_on_one_node_that_disagree_blame_that_node() -> None:
    leader = placed("n1")
    right = report("n1", range(2), 2)
    slots = right.sums[0].slots
    sums = (AllReduceSum(rank=0, slots=(slots[0], slots[1] + 1), seconds=0.1), right.sums[1])
    assert failed(leader.tell(report("n1", range(2), 2, sums=sums))).nodes == ("n1",)
    assert leader.verdict() == "quarantined"


def test_sums_that_are_wrong_from_every_rank_quarantine_nobody() -> None:
    leader = placed("n1", "n2")
    every = (0, 1, 2, 3)
    said = leader.tell(*(report(n, r, 4, wrong_slots=every) for n, r in (("n1", range(2)), ("n2", range(2, 4)))))
    assert said == [failed(said)]
    assert failed(said).nodes == ()


def test_a_report_that_lacks_a_rank_never_passes() -> None:
    leader = placed("n1", "n2")
    assert failed(leader.tell(report("n1", range(2), 4), report("n2", range(2, 3), 4))).nodes == ()


def test_a_fatal_check_fails_the_preflight_even_when_the_sums_could_not_be_measured() -> None:
    lost = CheckResult(check="gpu_present", status="bad", severity="fatal", entity="n2-gpu-0", detail="lost")
    leader = placed("n1", "n2")
    said = leader.tell(
        report("n1", range(2), 4, sums=(), error="timeout"),
        report("n2", range(2, 4), 4, sums=(), error="timeout", results=(lost,)),
    )
    assert (failed(said).nodes, failed(said).detail) == (("n2",), "n2: lost")


def test_a_degraded_gpu_of_the_gang_fails_its_node_and_one_that_the_gang_does_not_use_does_not() -> None:
    for gpu, nodes in (("n2-gpu-1", ("n2",)), ("n2-gpu-7", None)):
        bad = CheckResult(check="ecc_uncorrectable", status="bad", severity="degraded", entity=gpu, detail="ECC")
        leader = placed("n1", "n2")
        said = leader.tell(report("n1", range(2), 4), report("n2", range(2, 4), 4, results=(bad,)))
        assert [getattr(e, "nodes", None) for e in said if isinstance(e, PreflightFailed)] == ([nodes] if nodes else [])
        assert NodeDegraded not in {type(e) for e in said}  # the agent's own finding decides on that


def test_a_wrong_matmul_quarantines_its_node() -> None:
    wrong = CheckResult(check="matmul_checksum", status="bad", severity="fatal", action="inspect", detail="rank 2")
    leader = placed("n1", "n2")
    said = leader.tell(report("n1", range(2), 4), report("n2", range(2, 4), 4, results=(wrong,)))
    assert [type(e) for e in said] == [FindingRecorded, PreflightFailed, NodeQuarantined]


def test_checks_that_could_not_measure_do_not_fail_a_preflight() -> None:
    gap = CheckResult(check="ecc_uncorrectable", status="error", severity="fatal", entity="n1-gpu-0")
    said = placed("n1").tell(report("n1", range(2), 2, results=(gap,)))
    assert [type(e) for e in said] == [PreflightPassed]


def test_probes_that_could_not_measure_are_tried_three_times_and_then_blame_nobody() -> None:
    leader = placed("n1", "n2")
    for number in (1, 2):
        one, two = (report(n, range(0), 4, round=number, error="no route") for n in ("n1", "n2"))
        assert leader.tell(one, two) == []
    one, two = (report(n, range(0), 4, round=3, error="no route") for n in ("n1", "n2"))
    said = leader.tell(one, two)
    assert failed(said).nodes == ()
    assert "no route" in failed(said).detail


def test_a_later_round_replaces_one_that_could_not_measure() -> None:
    leader = placed("n1", "n2")
    leader.tell(report("n1", range(0), 4, error="x"), report("n2", range(0), 4, error="x"))
    said = leader.tell(report("n1", range(2), 4, round=2), report("n2", range(2, 4), 4, round=2))
    assert [type(e) for e in said] == [PreflightPassed]


def test_a_gang_that_needs_no_preflight_or_is_gone_is_not_judged() -> None:
    leader = placed("n1", event=gang("n1", preflight="fresh"))
    assert leader.tell(report("n1", range(2), 2)) == []
    leader = placed("n1")
    gone = JobRequeued(job_id="j", attempt=1, outcome="preempted", cause="preempted")
    assert leader.tell(gone, report("n1", range(2), 2)) == []
