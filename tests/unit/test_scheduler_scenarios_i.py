"""Scenarios I, time: no clock but the log's own decides anything, and windows name their zone."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from stoker_chassis.clock import LogClock
from stoker_proto import Cluster as Configuration
from stoker_proto import Recorded, WindowOpened, seal
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.state import state_hash
from tests.builders import released, submitted
from tests.replay.cluster_story import TIMING, Story
from tests.unit.scheduler_cluster import Cluster

MINUTE_MS = 60_000
NIGHT = {"name": "night", "days": ["mon"], "start": "01:00", "end": "04:00"}


def test_I1_a_node_whose_clock_is_ten_minutes_off_changes_nothing() -> None:
    story = Story()
    for _ in story.ticks():
        pass
    true, off = Scheduler(TIMING), Scheduler(TIMING)
    for recorded in story.records:
        true.evolve(recorded)
        told = "2026-01-01T00:10:00Z" if recorded.seq % 2 else "1970-01-01T00:00:00Z"
        envelope = seal(recorded.event, id=recorded.envelope.id, source="node", time=told, actor="node")
        off.evolve(Recorded(recorded.seq, recorded.at_ms, envelope, recorded.event))
        assert off.decide(recorded.at_ms) == true.decide(recorded.at_ms)
    assert state_hash(off.state) == state_hash(true.state)


def test_I1_when_the_log_moves_to_a_server_whose_clock_is_behind_nothing_is_called_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    cluster = Cluster(Timing(start_deadline_ms=3 * MINUTE_MS), check=True)
    cluster.nodes("n1", "n2")
    cluster.run(submitted("runs"))
    clock, top_ms = LogClock(), cluster.log.at_ms
    clock.saw(top_ms)
    for minute in range(10):
        # Another server takes over the log: its clock is ten minutes behind, and goes on from there.
        seconds += 60
        cluster.log.at_ms = top_ms - (10 - minute) * MINUTE_MS
        cluster.fold(submitted("new") if minute == 4 else submitted(f"j{minute}", nodes=9))
        clock.saw(cluster.log.at_ms)
        while decisions := cluster.scheduler.decide(clock.now_ms()):
            for decision in decisions:
                cluster.fold(decision.event)
        assert cluster.state.at_ms == top_ms, "time stands still until the log's clock has caught up"
    assert cluster.attempt("runs").stop is None
    assert (cluster.attempt("new").number, cluster.attempt("new").stop) == (1, None)
    cluster.tell(released("runs", 1, "n1", cluster.attempt("runs").fence))
    assert cluster.job("runs").gpu_ms == 0, "never below zero"


@pytest.mark.parametrize(
    "wrong",
    [
        {"zone": None},
        {"zone": ""},
        {"zone": "Europe/Berlin", "start": "1:00"},
        {"zone": "Europe/Berlin", "start": "01:00-04:00"},
        {"zone": "Europe/Berlin", "end": "24:00"},
        {"zone": "Europe/Berlin", "days": []},
    ],
)
def test_I3_a_window_without_a_zone_or_a_whole_clock_time_is_refused(wrong: dict[str, object]) -> None:
    window = {key: value for key, value in (NIGHT | wrong).items() if value is not None}
    with pytest.raises(ValidationError):
        Configuration.model_validate({"windows": [window]})


def test_I3_a_window_whose_zone_is_not_known_here_stays_shut_and_its_jobs_say_so() -> None:
    cluster = Cluster(check=True)
    cluster.configure(windows=[NIGHT | {"zone": "Mars/Olympus"}])
    cluster.nodes("n1")
    cluster.tell(submitted("j", schedule={"window": "night"}))
    assert cluster.later(8 * 24 * 60 * MINUTE_MS) == []
    assert not any(isinstance(r.event, WindowOpened) for r in cluster.log.records)
    assert cluster.codes("j") == ["window_closed"]
    assert "Mars/Olympus" in cluster.job("j").reasons[0].message
