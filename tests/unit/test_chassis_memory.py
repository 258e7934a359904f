"""The twins in memory: an injected clock, and NATS wildcards."""

from __future__ import annotations

import pytest

from stoker_chassis.clock import LogClock, stamp
from stoker_chassis.memory import MemoryLease, MemoryLog, subject_matches
from tests.builders import ready


@pytest.mark.parametrize(
    ("pattern", "subject", "matches"),
    [
        (">", "a", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        ("*.b", "a.b", True),
        ("a.b", "a.b", True),
        ("a.b", "a.bc", False),
        ("a.b.c", "a.b", False),
    ],
)
def test_wildcards_match_as_in_nats(pattern: str, subject: str, matches: bool) -> None:
    assert subject_matches(pattern, subject) is matches


async def test_log_time_comes_from_the_given_clock_and_never_runs_back() -> None:
    times = iter([1_000, 900, 1_500])
    log = MemoryLog(lambda: next(times))
    for i in range(3):
        await log.append(stamp(ready(f"n{i}"), "test"))
    assert [r.at_ms async for r in log.read()] == [1_000, 1_000, 1_500]


async def test_a_lease_lasts_by_the_given_clock() -> None:
    now = 0.0
    lease = MemoryLease(lambda: now)
    assert await lease.acquire("s", "a", 3)
    now = 2.9
    assert not await lease.acquire("s", "b", 3)
    now = 3.0
    assert await lease.acquire("s", "b", 3)


def test_the_logs_clock_knows_no_time_before_the_first_event_and_never_runs_back() -> None:
    clock = LogClock()
    assert clock.now_ms() == 0
    clock.saw(5_000)
    assert clock.now_ms() >= 5_000
    clock.saw(1_000)
    assert clock.now_ms() >= 5_000
