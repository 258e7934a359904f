"""The scheduler is lost after every single event of a long log: nothing is placed twice and no GPU leaks."""

from __future__ import annotations

from stoker_proto import AttemptPlaced, DecisionBatch, Event, JobFinished, JobRequeued, LeaderElected
from tests.replay.cluster_story import Story

LEAST_EVENTS = 300


def whole() -> tuple[Story, list[Story]]:
    """The story without any loss, and as it stood before each tick."""
    story = Story(check=True)
    before = [s.copy(0) for s in story.ticks()]
    return story, before


def test_the_story_has_everything_in_it_and_ends_well() -> None:
    story, _ = whole()
    assert len(story.records) >= LEAST_EVENTS
    actions = [a for r in story.records if isinstance(r.event, DecisionBatch) for a in r.event.actions]
    assert {a.action for a in actions} >= {"place", "stop", "requeue", "finish", "fence", "claim", "unclaim"}
    assert {a.reason for a in actions if a.action == "stop"} >= {"preempted", "node_quarantined", "peer_failed"}
    assert len(set(story.ends().values())) > 1
    assert (story.leaks(), story.scheduler.state.voided) == ([], 0)


def test_lost_after_every_single_event_the_cluster_comes_to_stand_where_it_would_have_stood() -> None:
    story, before = whole()
    ends, after = story.ends(), [*before[1:], story]
    stands = [base.standing() for base in before]
    landed: dict[type[Event], int] = {}
    for at, (start, base) in enumerate(zip(before, after, strict=True)):
        for seq in range(len(start.records) + 1, len(base.records) + 1):
            kind = type(story.records[seq - 1].event)
            if kind is LeaderElected:
                continue
            landed[kind] = landed.get(kind, 0) + 1
            lost = start.copy(seq)
            for _ in lost.ticks():
                # Where it stands as it would have without the loss, it goes on as it would have.
                if at < lost.tick < len(stands) and lost.standing() == stands[lost.tick]:
                    break
            else:
                assert (lost.ends(), lost.leaks()) == (ends, []), f"lost after {seq}, {kind.__name__}"
    assert sum(landed.values()) >= LEAST_EVENTS
    told = (DecisionBatch, AttemptPlaced, JobRequeued, JobFinished)
    assert all(landed[kind] > 5 for kind in told), "also when decisions had landed and were not told yet"


def test_a_cluster_that_loses_its_scheduler_every_three_events_still_finishes_every_job() -> None:
    plain, story = Story(), Story(lose_every=3)
    for one in (plain, story):
        for _ in one.ticks():
            assert len(one.records) < 2_000
    assert (story.ends(), story.leaks()) == (plain.ends(), [])
