"""Scenarios F, restart and replay: another scheduler takes over, and nothing is lost, doubled or called lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from stoker_proto import (
    CancelRequested,
    DecisionBatch,
    Event,
    Fence,
    JobSubmitted,
    LeaderElected,
    NodeReady,
    NodeUnknown,
    Place,
    Recorded,
    Stop,
    from_line,
    to_line,
)
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.state import state_hash
from tests.builders import exited, released, sealed, spec, started, submitted
from tests.replay.cluster_story import Story
from tests.unit.scheduler_cluster import Cluster

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
FENCE_MS = 5 * MINUTE_MS
TraceFunction = Any
GOLDEN = sorted((Path(__file__).parents[1] / "replay" / "golden").glob("*.jsonl"))


def actions(events: Iterable[Event]) -> list[object]:
    return [action for event in events if isinstance(event, DecisionBatch) for action in event.actions]


def take_over(cluster: Cluster, after_ms: int = 0) -> list[Event]:
    """Another scheduler leads from here on; what it says."""
    cluster.log.at_ms += after_ms
    cluster.restart()
    cluster.fold(LeaderElected(service="scheduler", holder="next"))
    return cluster.decide()


def test_F1_a_restart_starts_no_attempt_of_a_job_that_is_over() -> None:
    cluster = Cluster()
    shared = spec()
    for number in range(950):
        cluster.fold(JobSubmitted(job_id=f"c{number}", spec=shared, spec_hash="h"))
        cluster.fold(CancelRequested(job_id=f"c{number}"))
    cluster.decide()
    cluster.nodes("n1")
    for number in range(50):
        cluster.run(submitted(f"j{number}"))
        cluster.end(f"j{number}")
    assert len(cluster.state.over) == 1_000
    assert take_over(cluster) == []
    assert cluster.state.owner == {"n1": {}}
    assert (cluster.state.jobs, len(cluster.state.waiting)) == ({}, 0)


def unknown(node: str) -> NodeUnknown:
    return NodeUnknown(node=node, boot_epoch="b1", rule="silence", reason="no heartbeat")


def test_F2_after_a_gap_nothing_is_called_lost_before_each_node_had_its_whole_time_under_this_leader() -> None:
    cluster = Cluster(Timing(fence_ms=FENCE_MS), check=True)
    names = [f"n{n}" for n in range(8)]
    cluster.nodes(*names)
    cluster.run(*(submitted(f"j{n}") for n in range(8)))
    for name in names:
        cluster.fold(unknown(name))  # the last that was heard before all of it stopped
    assert take_over(cluster, after_ms=FENCE_MS) == [], "the time of the gap is nobody's silence"
    for name in names[1:]:
        cluster.tell(NodeReady(node=name, boot_epoch="b1", rule="heard-again", reason="heartbeats are back"))
    assert cluster.later(FENCE_MS - 1) == []
    lost = [a for a in actions(cluster.later(1)) if isinstance(a, Fence)]
    assert [a.node for a in lost] == ["n0"]
    assert all(cluster.job(f"j{n}").attempts == 1 for n in range(1, 8))


def test_F2_the_scheduler_wakes_for_the_end_of_that_time() -> None:
    cluster = Cluster(Timing(fence_ms=FENCE_MS), check=True)
    cluster.nodes("n1")
    cluster.run(submitted("j"))
    cluster.tell(unknown("n1"))
    cluster.later(FENCE_MS - 1)
    cluster.tell(LeaderElected(service="scheduler", holder="same again"))
    assert cluster.later(1) == []
    assert cluster.scheduler.due_ms(cluster.log.at_ms) == cluster.log.at_ms - 1 + FENCE_MS


def test_F3_jobs_go_on_through_an_outage_of_hours_and_are_adopted() -> None:
    cluster = Cluster(Timing(start_deadline_ms=3 * MINUTE_MS, fence_ms=FENCE_MS), check=True)
    cluster.nodes("n1", "n2", "n3")
    cluster.run(submitted("running"))
    cluster.tell(submitted("starting"), submitted("ending"))
    cluster.start("ending")
    fences = {job_id: cluster.attempt(job_id).fence for job_id in ("running", "starting", "ending")}
    (node,) = cluster.places("ending")
    cluster.tell(exited("ending", 1, node, fences["ending"]), released("ending", 1, node, fences["ending"]))
    told = take_over(cluster, after_ms=2 * HOUR_MS)
    assert told == [], "nobody could tell that it started, or seal its logs"
    (start,) = cluster.places("starting")
    cluster.tell(started("starting", 1, start, fences["starting"]))
    cluster.tell(sealed("ending", 1, node, fences["ending"]))
    assert cluster.ended("ending").state == "succeeded"
    assert cluster.later(HOUR_MS) == []
    for job_id in ("running", "starting"):
        assert (cluster.attempt(job_id).fence, cluster.attempt(job_id).stop) == (fences[job_id], None)


def test_F4_what_a_frozen_leader_decided_before_it_was_replaced_is_void_when_it_lands_after() -> None:
    cluster = Cluster(Timing(start_deadline_ms=3 * MINUTE_MS, fence_ms=FENCE_MS), check=True)
    cluster.nodes("n1", "n2")
    cluster.run(submitted("runs"))
    cluster.tell(submitted("starts"))
    cluster.fold(unknown(cluster.places("runs")[0]))
    frozen = Scheduler(Timing(start_deadline_ms=3 * MINUTE_MS, fence_ms=FENCE_MS))
    for recorded in cluster.log.records:
        frozen.evolve(recorded)
    cluster.start("starts")
    cluster.tell(NodeReady(node=cluster.places("runs")[0], boot_epoch="b1", rule="heard-again", reason="back"))
    assert take_over(cluster) == []
    cluster.log.at_ms += HOUR_MS
    (late,) = [d.event for d in frozen.decide(cluster.log.at_ms) if isinstance(d.event, DecisionBatch)]
    assert {type(a) for a in late.actions} >= {Fence, Stop}, "it believes that one is lost and one never started"
    assert cluster.decide() == []
    cluster.fold(late)
    assert cluster.state.voided == len(late.actions)
    assert cluster.decide() == []
    assert all(cluster.attempt(job_id).stop is None for job_id in ("runs", "starts"))


def test_F4_a_lone_leader_that_was_frozen_kills_nothing_by_what_it_last_saw() -> None:
    timing = Timing(start_deadline_ms=3 * MINUTE_MS, fence_ms=FENCE_MS)
    cluster = Cluster(timing, check=True)
    cluster.nodes("n1", "n2")
    cluster.run(submitted("runs"))
    cluster.tell(submitted("starts"))
    cluster.fold(unknown(cluster.places("runs")[0]))
    late = cluster.scheduler.decide(cluster.log.at_ms + HOUR_MS)  # before it has read what came meanwhile
    cluster.fold(started("starts", 1, cluster.places("starts")[0], cluster.attempt("starts").fence))
    cluster.fold(NodeReady(node=cluster.places("runs")[0], boot_epoch="b1", rule="heard-again", reason="back"))
    cluster.log.at_ms += HOUR_MS
    for decision in late:
        cluster.fold(decision.event)
    assert cluster.state.voided == len(actions(d.event for d in late)) > 0
    assert cluster.decide() == []
    assert all(cluster.attempt(job_id).stop is None for job_id in ("runs", "starts"))


HASHER = """
import sys
from stoker_proto import from_line
from stoker_scheduler.evolve import evolve
from stoker_scheduler.state import State, state_hash
state = State()
for line in open(sys.argv[1]):
    state = evolve(state, from_line(line))
    if state.seq % int(sys.argv[2]) == 0:
        print(state.seq, state_hash(state))
"""


def test_F5_two_schedulers_that_fold_the_same_log_agree_all_along(tmp_path: Path) -> None:
    story = Story()
    for _ in story.ticks():
        pass
    (tmp_path / "log.jsonl").write_text("".join(f"{to_line(recorded)}\n" for recorded in story.records))
    told = {
        subprocess.run(
            [sys.executable, "-c", HASHER, str(tmp_path / "log.jsonl"), "25"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(told) == 1
    assert len(told.pop().splitlines()) == len(story.records) // 25


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_F7_a_log_of_an_earlier_version_is_gone_on_from(path: Path) -> None:
    cluster = Cluster(check=True)
    cluster.log.records = [from_line(line) for line in path.read_text().splitlines()]
    cluster.log.at_ms = cluster.log.records[-1].at_ms
    assert take_over(cluster) == []
    node = next(n for n in cluster.state.nodes.values() if n.takes_work)
    cluster.run(submitted("next", per_node=len(node.gpus), model=node.gpus[0].model))
    cluster.end("next")
    assert cluster.ended("next").state == "succeeded"


def after(*jobs: str) -> dict[str, object]:
    return {"after": [{"job": job} for job in jobs]}


def test_F8_a_restart_in_the_middle_of_a_graph_of_jobs_leaves_the_same_ones_to_do() -> None:
    cluster = Cluster(check=True)
    cluster.nodes("n1", "n2")
    cluster.tell(
        submitted("a"), submitted("b"), submitted("c", schedule=after("a")), submitted("d", schedule=after("a", "b")),
        submitted("e", schedule=after("c", "d")),
    )  # fmt: skip
    cluster.start("a")
    cluster.end("a")
    before, left = state_hash(cluster.state), {j.id: j.waits_for for j in cluster.state.jobs.values()}
    cluster.restart()
    assert state_hash(cluster.state) == before
    assert {j.id: j.waits_for for j in cluster.state.jobs.values()} == left
    assert left == {"b": (), "c": (), "d": ("b",), "e": ("c", "d")}
    cluster.tell(submitted("f", schedule=after("a")))
    assert cluster.job("f").waits_for == (), "a is over, and a restart does not forget it"
    order = []
    while active := list(cluster.state.active):
        order += [job_id for job_id in active if job_id not in order]
        cluster.start(active[0])
        cluster.end(active[0])
    assert order.index("d") > order.index("b")
    assert order[-1] == "e"


def _steps(cluster: Cluster) -> int:
    """Steps of the interpreter in a pass that decides nothing new: the same on every machine, however busy."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        decided = cluster.scheduler.decide(cluster.log.at_ms)
    finally:
        sys.settrace(before)
    assert decided == []
    return count


def test_F10_jobs_that_are_over_make_no_pass_slower() -> None:
    cluster = Cluster()
    cluster.nodes("n1", "n2")
    cluster.run(submitted("runs"))
    cluster.tell(*(submitted(f"waits-{n}", nodes=2, labels={"n": str(n)}) for n in range(20)))
    before = _steps(cluster)
    shared = spec()
    for number in range(5_000):
        cluster.fold(JobSubmitted(job_id=f"c{number}", spec=shared, spec_hash="h"))
        cluster.fold(CancelRequested(job_id=f"c{number}"))
    cluster.decide()
    assert len(cluster.state.over) == 5_000
    assert len(cluster.state.jobs) == 21, "of a job that is over nothing is kept but how it ended"
    assert 1_000 < _steps(cluster) < 1.02 * before


def test_F11_every_event_delivered_twice_changes_nothing_but_a_counter() -> None:
    story = Story()
    for _ in story.ticks():
        pass
    once, twice = Scheduler(Timing()), Scheduler(Timing())
    for recorded in story.records:
        once.evolve(recorded)
        twice.evolve(recorded)
        twice.evolve(Recorded(recorded.seq, recorded.at_ms, recorded.envelope, recorded.event))
    mine, theirs = once.state, twice.state
    assert (theirs.over, theirs.jobs, theirs.owner) == (mine.over, mine.jobs, mine.owner)
    assert theirs.usage.listing() == mine.usage.listing()
    assert [n._replace(verdict_seq=0) for n in theirs.nodes.values()] == [
        n._replace(verdict_seq=0) for n in mine.nodes.values()
    ]
    again = [a for r in story.records if isinstance(r.event, DecisionBatch) for a in r.event.actions]
    assert theirs.voided >= sum(isinstance(a, Place | Stop) for a in again), "nobody is placed or stopped twice"
    assert theirs.ignored > mine.ignored
