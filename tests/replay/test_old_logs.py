"""Logs that were written once are read for ever: every line decodes and comes out again as it went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker_proto import (
    REGISTRY,
    AttemptPlaced,
    AttemptStarted,
    CheckpointSaved,
    DecisionBatch,
    JobFinished,
    JobRequeued,
    NodeQuarantined,
    Recorded,
    Unknown,
    decode,
    encode,
    from_line,
    to_line,
)
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.invariants import violations

HERE = Path(__file__).parent
GOLDEN = sorted((HERE / "golden").glob("*.jsonl"))
CORPUS = sorted((HERE / "corpus").glob("*.json"))
LINES = [(file.name, line) for file in GOLDEN + CORPUS for line in file.read_text().splitlines()]
XID79 = HERE / "golden" / "v1-xid79.jsonl"
SHARING = HERE / "golden" / "v1-sharing.jsonl"


def read(file: Path) -> list[Recorded]:
    return [from_line(line) for line in file.read_text().splitlines()]


def said_by(now: Any, then: Any) -> bool:
    """Is all of `then` in `now`, which may say more?"""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and said_by(now[key], then[key]) for key in then)
    if isinstance(then, list):
        return isinstance(now, list) and len(now) == len(then) and all(map(said_by, now, then))
    return bool(now == then)


def test_no_event_type_lacks_a_corpus_file() -> None:
    assert {file.name.removesuffix(".json") for file in CORPUS} >= REGISTRY.keys(), "python -m tests.replay.samples"


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.name)
def test_a_corpus_file_holds_one_event_of_its_type(file: Path) -> None:
    (recorded,) = read(file)
    assert recorded.envelope.type == file.name.removesuffix(".json")
    assert not isinstance(recorded.event, Unknown)


def test_every_line_comes_out_as_it_went_in() -> None:
    for name, line in LINES:
        assert to_line(from_line(line)) == line, name


def test_every_event_still_says_all_that_its_line_says() -> None:
    for name, line in LINES:
        assert said_by(from_line(line).event.model_dump(mode="json"), json.loads(line)["data"]), name


def test_every_event_survives_the_wire() -> None:
    for name, line in LINES:
        recorded = from_line(line)
        assert decode(encode(recorded.envelope), seq=recorded.seq, at_ms=recorded.at_ms) == recorded, name


def test_every_event_lies_on_the_subject_that_its_envelope_names() -> None:
    for name, line in LINES:
        recorded = from_line(line)
        assert recorded.event.subject() == recorded.envelope.subject, name


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.name)
def test_a_golden_log_has_one_total_order_and_no_id_twice(file: Path) -> None:
    records = read(file)
    assert [r.seq for r in records] == list(range(1, len(records) + 1))
    assert [r.at_ms for r in records] == sorted(r.at_ms for r in records)
    assert len({r.envelope.id for r in records}) == len(records)


def test_the_first_golden_log_tells_the_story_of_the_demo() -> None:
    records = read(XID79)
    events = [r.event for r in records]
    placed = [e for e in events if isinstance(e, AttemptPlaced)]
    assert [[a.node for a in p.allocations] for p in placed] == [["node-1", "node-2"], ["node-1", "node-3"]]
    (quarantined,) = [e for e in events if isinstance(e, NodeQuarantined)]
    (requeued,) = [e for e in events if isinstance(e, JobRequeued)]
    assert quarantined.node == "node-2" and requeued.exclude_nodes == ("node-2",)
    resumed = {e.resume_step for e in events if isinstance(e, AttemptStarted) and e.attempt == 2}
    saved = [e.step for e in events if isinstance(e, CheckpointSaved) and e.attempt == 1]
    assert resumed == {saved[-1]}
    (finished,) = [e for e in events if isinstance(e, JobFinished)]
    assert finished.state == "succeeded" and finished.attempts == 2


def test_the_scheduler_folds_the_first_golden_log_with_nothing_void_and_nothing_left_to_say() -> None:
    scheduler = Scheduler(Timing())
    records = read(XID79)
    for recorded in records:
        scheduler.evolve(recorded)
    state = scheduler.state
    assert (state.voided, state.ignored, dict(state.to_announce)) == (0, 0, {})
    assert [over.state for over in state.over.values()] == ["succeeded"]
    assert not state.jobs and not any(state.owner.values())
    assert scheduler.decide(records[-1].at_ms) == []


def test_the_log_of_a_shared_cluster_has_every_kind_of_decision_in_it() -> None:
    batches = [r.event for r in read(SHARING) if isinstance(r.event, DecisionBatch)]
    actions = [action for batch in batches for action in batch.actions]
    told = {action.action for action in actions}
    assert told == {"place", "claim", "unclaim", "stop", "requeue", "finish", "fence", "boost"}
    rules = {action.rule for action in actions if action.action == "stop" and action.rule}
    reasons = {action.reason for action in actions if action.action == "stop"}
    assert (rules, "window_closed" in reasons) == ({"reclaim", "higher_class"}, True)


def test_the_scheduler_folds_the_log_of_a_shared_cluster_with_every_promise_kept() -> None:
    scheduler, ends = Scheduler(Timing()), {}
    records = read(SHARING)
    for recorded in records:
        scheduler.evolve(recorded)
        assert violations(scheduler.state) == [], f"after {recorded.seq}"
        if isinstance(recorded.event, JobFinished):
            ends[recorded.event.job_id] = recorded.event.state
    state = scheduler.state
    assert (state.voided, dict(state.to_announce), dict(state.jobs), dict(state.claims)) == (0, {}, {}, {})
    assert {job_id: over.state for job_id, over in state.over.items()} == ends
    assert len(ends) == 29 and not any(state.owner.values())
    assert scheduler.decide(records[-1].at_ms) == []
