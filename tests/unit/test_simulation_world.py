"""The simulated world: hand-computed waits, preempted work that resumes, nodes that break, and every invariant."""

from __future__ import annotations

import random

import pytest

from stoker_proto import AttemptPlaced, Claim, Cluster, DecisionBatch
from stoker_scheduler.invariants import violations
from stoker_scheduler.simulation.breakdowns import breakdowns
from stoker_scheduler.simulation.workload import MS_IN_MINUTE, START_MS, Work, alike
from stoker_scheduler.simulation.world import Options
from stoker_scheduler.state import State
from tests.unit.simulated import Play, minutes, work

SAVES = {"checkpoint_ms": 10 * MS_IN_MINUTE}


def test_a_job_waits_until_what_it_needs_is_free() -> None:
    play = Play([work("a", 0, 2, 10), work("b", 1, 1, 5), work("c", 3, 1, 4), work("d", 12, 1, 6)])
    assert play.starts == {"a": [0], "b": [10], "c": [10], "d": [14]}
    assert play.ends == {"a": 10, "b": 15, "c": 14, "d": 20}
    told = play.result
    assert told.waits.mean_s == (0 + 9 + 7 + 2) * 60 / 4
    assert (told.waits.p50_s, told.waits.max_s) == (7 * 60, 9 * 60)
    assert told.makespan_s == 20 * 60
    assert told.utilisation == told.allocation == pytest.approx((20 + 5 + 4 + 6) / 40, abs=1e-4)
    assert told.fragmentation == pytest.approx(5 / 40, abs=1e-4), "one GPU is idle from 15 to 20"
    assert told.mean_slowdown == pytest.approx((1 + 14 / 5 + 11 / 4 + 8 / 6) / 4, abs=1e-3)


def test_short_jobs_fill_in_before_a_gang_and_long_ones_wait_behind_it() -> None:
    play = Play([work("a", 0, 2, 10), work("gang", 1, 4, 3), work("short", 2, 2, 5), work("long", 2, 2, 9)], nodes=2)
    assert play.starts == {"a": [0], "gang": [10], "short": [2], "long": [13]}
    assert play.result.waits_by_gpus["4"].mean_s == 9 * 60


def test_when_nobody_says_how_long_jobs_take_nothing_fills_in() -> None:
    jobs = [work("a", 0, 2, 10, limit=False), work("gang", 1, 4, 3, limit=False), work("short", 2, 2, 5, limit=False)]
    assert Play(jobs, nodes=2).starts == {"a": [0], "gang": [10], "short": [13]}


def test_preempted_work_resumes_from_its_last_checkpoint_and_the_rest_is_wasted() -> None:
    jobs = [work("low", 0, 2, 60, limit=False, priority_class="BEST_EFFORT"), work("high", 25, 2, 5)]
    play = Play(jobs, options=Options(**SAVES))
    assert play.starts == {"low": [0, 30], "high": [25]}
    assert play.ends == {"high": 30, "low": 70}, "20 minutes were saved, 5 were lost"
    told = play.result
    assert (told.preemptions, told.preempted_jobs) == (1, 1)
    assert told.wasted_gpu_s == 5 * 60 * 2
    assert told.utilisation == pytest.approx(65 / 70, abs=1e-4)


def test_without_checkpoints_all_of_it_is_done_again() -> None:
    jobs = [work("low", 0, 2, 60, limit=False, priority_class="BEST_EFFORT"), work("high", 25, 2, 5)]
    assert Play(jobs, options=Options(checkpoint_ms=0)).ends["low"] == 90


@pytest.mark.parametrize(("stop_s", "left_s", "ends"), [(6, 6, 65 + 6 / 60), (30, 10, 70 + 10 / 60)])
def test_a_job_asked_to_stop_saves_itself_if_its_grace_allows(stop_s: int, left_s: int, ends: float) -> None:
    jobs = [work("low", 0, 2, 60, limit=False, priority_class="BEST_EFFORT"), work("high", 25, 2, 5)]
    play = Play(jobs, options=Options(**SAVES, stop_ms=stop_s * 1000))
    assert play.starts["high"] == [pytest.approx(25 + left_s / 60, abs=1e-3)]
    assert play.ends["low"] == pytest.approx(ends, abs=1e-3)


SEED = 4  # breaks it after 24 minutes


def test_a_job_on_a_node_that_breaks_starts_again_elsewhere_from_its_checkpoint() -> None:
    broken = breakdowns(alike(1, 2, "SIM"), START_MS, START_MS + 40 * MS_IN_MINUTE, 30 * MS_IN_MINUTE, 60_000, SEED)
    at = (broken[0].at_ms - START_MS) / MS_IN_MINUTE
    assert 10 < at < 40, "this seed breaks the only node while the job runs"
    play = Play([work("a", 0, 2, 40, limit=False)], happenings=broken[:3], options=Options(**SAVES))
    assert play.starts["a"][1] == pytest.approx(at + 1, abs=1e-3), "when the node has booted"
    saved = at // 10 * 10
    assert play.ends["a"] == pytest.approx(at + 1 + 40 - saved, abs=1e-3)
    assert play.result.wasted_gpu_s == pytest.approx((at - saved) * 60 * 2, abs=0.01)


def test_time_up_leaves_the_rest_as_it_is() -> None:
    play = Play([work("a", 0, 2, 10), work("b", 1, 2, 5)], options=Options(until_ms=START_MS + 8 * MS_IN_MINUTE))
    told = play.result
    assert (told.jobs, told.finished, told.never_started) == (2, 0, 1)
    assert told.allocation == 1.0


def test_a_job_that_can_never_start_does_not_keep_the_simulation_going() -> None:
    told = Play([work("a", 0, 2, 10), work("huge", 1, 64, 5)]).result
    assert (told.finished, told.never_started) == (1, 1)


def contention(seed: int) -> list[Work]:
    draw = random.Random(seed)
    classes = ("BEST_EFFORT", "NORMAL", "CRITICAL")
    return [
        work(
            f"job-{n}", draw.randrange(120), draw.choice([1, 1, 2, 4, 8]), draw.randint(1, 40), per_node=4,
            limit=draw.random() < 0.5, priority_class=draw.choice(classes), queue=draw.choice(["a", "b"]),
        )
        for n in range(60)
    ]  # fmt: skip


SHARED = Cluster.model_validate(
    {"queues": [{"name": "a", "gpus": {"nominal": 8}}, {"name": "b", "gpus": {"nominal": 8, "limit": 12}}]}
)


@pytest.mark.parametrize("seed", range(3))
def test_every_promise_holds_after_every_event_of_a_simulated_history(seed: int) -> None:
    def check(state: State) -> None:
        assert violations(state) == []

    broken = breakdowns(
        alike(4, 4, "SIM"), START_MS, START_MS + 300 * MS_IN_MINUTE, 200 * MS_IN_MINUTE, 10 * MS_IN_MINUTE, seed
    )
    play = Play(
        contention(seed), 4, gpus=4, cluster=SHARED, happenings=broken, check=check, options=Options(stop_ms=5_000)
    )
    told = play.result
    assert told.finished == told.jobs == 60
    assert told.preemptions > 0
    assert not play.scheduler.state.active


def test_the_same_world_goes_the_same_way_twice() -> None:
    first, second = (Play(contention(7), 4, gpus=4, cluster=SHARED) for _ in range(2))
    assert [(r.at_ms, r.event) for r in first.records] == [(r.at_ms, r.event) for r in second.records]
    assert first.result == second.result


def test_a_job_of_a_window_waits_until_it_opens() -> None:
    weekend = {"name": "weekend", "zone": "Europe/Berlin", "days": ["sat", "sun"], "start": "00:00", "end": "00:00"}
    cluster = Cluster.model_validate({"queues": [{"name": "default", "window": "weekend"}], "windows": [weekend]})
    play = Play([work("a", 5, 2, 10)], cluster=cluster)
    until_saturday = 5 * 24 * 60 - 60  # from Monday's midnight in UTC; Berlin is an hour ahead
    assert play.starts == {"a": [until_saturday]}


def test_gpus_are_not_kept_where_the_same_pass_has_just_placed_a_job() -> None:
    play = Play([work("a", 0, 2, 10), work("b", 1, 2, 30), work("gang", 1, 2, 5)], nodes=2)
    placed = {r.event.job_id: r.event.allocations[0].node for r in play.records if isinstance(r.event, AttemptPlaced)}
    (claim,) = [
        action
        for r in play.records
        if isinstance(r.event, DecisionBatch)
        for action in r.event.actions
        if isinstance(action, Claim)
    ]
    assert [allocation.node for allocation in claim.allocations] == [placed["a"]]
    assert placed["gang"] == placed["a"] != placed["b"]
    assert claim.starts_ms is not None
    assert minutes(claim.starts_ms) == pytest.approx(10.25), "with the grace and the release that it may take"
