"""A node's verdict follows from evidence: quarantine on a fatal fault, release only by a later test that passed."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from stoker_health.catalogue import graded
from stoker_health.verdict import Health, evolve
from stoker_health.xids import XIDS
from stoker_proto import (
    AttemptProgressed,
    CheckResult,
    Event,
    FindingRecorded,
    NodeDegraded,
    NodeQuarantined,
    NodeReady,
    NodeReleased,
    NodeUnknown,
    RetestRequested,
    SelfTested,
)
from stoker_proto.nodes import CheckStatus, Severity
from tests.builders import joined

from .health_node import Leader, found, self_test


def kinds(events: list[Event]) -> list[type[Event]]:
    return [type(e) for e in events]


def test_a_node_is_ready_once_its_own_test_passed() -> None:
    leader = Leader()
    assert leader.tell(joined("n1")) == []
    assert kinds(leader.tell(self_test())) == [NodeReady]


def test_a_node_whose_own_test_failed_is_quarantined() -> None:
    assert kinds(Leader().tell(joined("n1"), self_test(passed=False))) == [NodeQuarantined]


def test_fatal_evidence_quarantines_and_says_what_it_was() -> None:
    [said] = Leader().ready("n1").tell(found(id="f7"))
    assert isinstance(said, NodeQuarantined)
    assert (said.evidence, said.rule) == (("f7",), "finding:gpu_present")
    assert said.reason == "gpu_present says bad"


def test_degraded_evidence_takes_the_node_out_of_placement_only() -> None:
    assert kinds(Leader().ready("n1").tell(found(severity="degraded"))) == [NodeDegraded]


def test_a_worse_fault_on_a_degraded_node_quarantines_it() -> None:
    leader = Leader().ready("n1")
    leader.tell(found(severity="degraded"))
    assert kinds(leader.tell(found(id="f2"))) == [NodeQuarantined]


def test_faults_that_are_not_evidence_against_the_node_change_nothing() -> None:
    leader = Leader().ready("n1")
    assert leader.tell(found(severity="info"), found(severity="suspect", id="f2")) == []


def test_absence_of_new_faults_is_not_recovery() -> None:
    leader = Leader().ready("n1")
    leader.tell(found())
    leader.log.at_ms += 7 * 24 * 3600 * 1000
    assert leader.rule() == []
    assert leader.verdict() == "quarantined"


def test_a_passing_retest_begun_after_the_fault_releases() -> None:
    leader = Leader().ready("n1")
    leader.tell(found())
    assert kinds(leader.retest()) == [NodeReleased]


def test_a_failing_retest_keeps_the_node_until_another_one_passes() -> None:
    leader = Leader().ready("n1")
    leader.tell(found())
    assert leader.retest(passed=False) == []
    assert kinds(leader.retest()) == [NodeReleased]


def test_a_pass_of_a_test_that_began_before_the_fault_never_releases() -> None:
    leader = Leader().ready("n1")
    asked = leader.fold(RetestRequested(node="n1"))
    leader.tell(found())
    assert leader.tell(self_test(cause="retest", began=asked.seq)) == []
    assert leader.verdict() == "quarantined"


def test_a_pass_of_an_earlier_test_does_not_answer_a_later_request() -> None:
    leader = Leader().ready("n1")
    first = leader.fold(RetestRequested(node="n1"))
    leader.tell(found())
    second = leader.fold(RetestRequested(node="n1"))
    assert leader.tell(self_test(cause="retest", began=first.seq)) == []
    assert kinds(leader.tell(self_test(cause="retest", began=second.seq))) == [NodeReleased]


def test_a_released_node_is_quarantined_again_by_a_new_fault_and_not_by_the_old_one() -> None:
    leader = Leader().ready("n1")
    leader.tell(found())
    leader.retest()
    assert leader.rule() == []
    assert leader.tell(found(id="f1")) == []  # the same finding sent twice counts once
    assert kinds(leader.tell(found(id="f2"))) == [NodeQuarantined]


def test_a_degraded_node_is_released_by_a_passing_retest() -> None:
    leader = Leader().ready("n1")
    leader.tell(found(severity="degraded"))
    assert kinds(leader.retest()) == [NodeReleased]


def test_a_reboot_starts_the_node_over_and_evidence_of_the_old_boot_is_ignored() -> None:
    leader = Leader().ready("n1")
    leader.tell(found())
    assert leader.tell(joined("n1", epoch="b2"), found(id="f9", epoch="b1"), self_test(epoch="b1")) == []
    assert leader.verdict() == "validating"
    assert kinds(leader.tell(self_test(epoch="b2"))) == [NodeReady]


def test_a_silent_node_is_unknown_and_ready_again_when_it_is_heard() -> None:
    leader = Leader().ready("n1", "n2")
    leader.silent = {"n1"}
    assert [(type(e), getattr(e, "node", "")) for e in leader.rule()] == [(NodeUnknown, "n1")]
    leader.silent = set()
    assert kinds(leader.rule()) == [NodeReady]


def test_a_node_that_was_degraded_before_it_fell_silent_comes_back_degraded() -> None:
    leader = Leader().ready("n1")
    leader.tell(found(severity="degraded"))
    leader.silent = {"n1"}
    leader.rule()
    leader.silent = set()
    assert kinds(leader.rule()) == [NodeDegraded]


def test_a_fault_found_while_the_node_was_unknown_counts_when_it_is_heard_again() -> None:
    for severity, verdict in (("degraded", "degraded"), ("fatal", "quarantined")):
        leader = Leader().ready("n1")
        leader.silent = {"n1"}
        leader.rule()
        leader.silent = set()
        leader.tell(found(severity=severity))  # type: ignore[arg-type]
        assert leader.verdict() == verdict


def test_a_silent_node_stays_quarantined() -> None:
    leader = Leader().ready("n1")
    leader.tell(found())
    leader.silent = {"n1"}
    assert leader.rule() == []


def test_a_node_that_fell_silent_during_its_first_test_becomes_ready_by_passing_it() -> None:
    leader = Leader()
    leader.tell(joined("n1"))
    leader.silent = {"n1"}
    assert kinds(leader.rule()) == [NodeUnknown]
    leader.silent = set()
    assert leader.rule() == []
    assert kinds(leader.tell(self_test())) == [NodeReady]


def test_application_faults_never_count_against_a_node() -> None:
    leader = Leader().ready("n1")
    for code in (13, 31, 43, 45):
        result = graded(CheckResult(check="xid", status="bad", entity="n1-gpu-0", value=float(code)))
        assert result.severity == "info"
        event = found(id=f"xid{code}").model_copy(update={"result": result})
        assert leader.tell(event) == []
    assert leader.verdict() == "ready"


def test_every_xid_has_a_source_and_only_faults_of_a_node_take_it_out() -> None:
    assert {13, 31, 43, 45, 48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143, 154} <= set(XIDS)
    for row in XIDS.values():
        assert row.source
        assert row.blame != "user" or row.severity == "info"
        assert row.severity != "fatal" or (row.blame == "node" and row.action in ("reboot", "inspect"))


def test_an_xid_that_nobody_knows_is_suspect_and_never_ignored() -> None:
    assert graded(CheckResult(check="xid", status="bad", value=9999.0)).severity == "suspect"


NODES = ("n1", "n2")
EPOCHS = ("b1", "b2")
NOT_BAD = sorted(set(get_args(CheckStatus)) - {"bad"})
events = st.one_of(
    st.builds(joined, st.sampled_from(NODES), epoch=st.sampled_from(EPOCHS)),
    st.builds(
        found, st.sampled_from(NODES), st.sampled_from(get_args(Severity)), status=st.sampled_from(("bad", *NOT_BAD)),
        id=st.sampled_from(("f1", "f2", "f3")), epoch=st.sampled_from(EPOCHS),
    ),
    st.builds(
        self_test, st.sampled_from(NODES), st.sampled_from(("joined", "retest")), began=st.integers(-6, 0),
        passed=st.booleans(), epoch=st.sampled_from(EPOCHS),
    ),
    st.builds(RetestRequested, node=st.sampled_from(NODES)),
)  # fmt: skip
Step = tuple[Event, set[str]]
histories = st.lists(st.tuples(events, st.sets(st.sampled_from(NODES))), max_size=25)


def played(steps: list[Step]) -> Leader:
    """The leader after these events, each with the nodes that are silent then. Tests began that many events ago."""
    leader = Leader()
    for event, silent in steps:
        leader.silent = silent
        if isinstance(event, SelfTested):
            event = event.model_copy(update={"began_seq": max(0, len(leader.log.records) + event.began_seq)})
        leader.tell(event)
    return leader


@given(histories)
def test_any_history_replayed_gives_the_same_state_and_nothing_more_to_say(steps: list[Step]) -> None:
    leader = played(steps)
    again = Health()
    for recorded in leader.log.records:
        again = evolve(again, recorded)
    assert again == leader.health
    assert Leader(leader.log, again, leader.silent).rule() == []


@given(histories, histories, st.sampled_from(NODES), st.sampled_from(NOT_BAD))
def test_what_is_not_bad_never_changes_a_verdict(before: list[Step], after: list[Step], node: str, status: str) -> None:
    nothing = AttemptProgressed(job_id="other", attempt=1, step=1)
    gap = found(node, "fatal", status=status, id="f1")
    with_gap, without = (
        [r.event for r in played([*before, (extra, set()), *after]).log.records if r.event is not extra]
        for extra in (gap, nothing)
    )
    assert with_gap == without


@given(histories)
def test_a_node_is_released_only_by_a_test_that_began_after_its_last_fault(steps: list[Step]) -> None:
    last_fault: dict[str, int] = {}
    last_test: dict[str, SelfTested] = {}
    seen: set[tuple[str, str, str]] = set()
    for recorded in played(steps).log.records:
        event = recorded.event
        match event:
            case FindingRecorded() if event.result.status == "bad":
                key = (event.node, event.boot_epoch, event.finding_id)
                if key not in seen and event.result.severity in ("degraded", "fatal"):
                    last_fault[event.node] = recorded.seq
                seen.add(key)
            case SelfTested():
                last_test[event.node] = event
            case NodeReleased():
                assert last_test[event.node].passed
                assert last_test[event.node].began_seq > last_fault.get(event.node, 0)
            case _:
                pass
