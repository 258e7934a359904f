"""What an `EventLog` promises, asked of the twin in memory and of JetStream alike."""

from __future__ import annotations

import asyncio

import pytest

from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import START, Appended, Burst, Conflict, Diverged, EventLog, Expect, Position
from stoker_chassis.stores import Bus
from stoker_proto import Envelope, NodeJoined, Recorded, Unknown
from tests.builders import joined, ready
from tests.waiting import take


@pytest.fixture
def log(either_bus: Bus) -> EventLog:
    return either_bus.log


def event(node: str = "n1", id: str | None = None) -> Envelope:
    return stamp(ready(node), "test", id=id)


async def fill(log: EventLog, count: int) -> None:
    for start in range(0, count, 100):
        await asyncio.gather(*(log.append(event(f"n{i}")) for i in range(start, min(count, start + 100))))


async def test_sequences_count_up_from_one(log: EventLog) -> None:
    assert await log.end() == 0
    assert [await log.append(event()), await log.append(event())] == [Appended(1), Appended(2)]
    assert await log.end() == 2


async def test_the_same_id_is_stored_once(log: EventLog) -> None:
    first = event(id="same")
    await log.append(first)
    await log.append(event())
    assert await log.append(first) == Appended(1, duplicate=True)
    assert await log.end() == 2


async def test_a_guard_of_zero_lets_only_the_first_in(log: EventLog) -> None:
    subject = event("n1").subject
    await log.append(event("n2"))
    await log.append(event("n1"), Expect(subject, 0))
    with pytest.raises(Conflict) as conflict:
        await log.append(event("n1"), Expect(subject, 0))
    assert conflict.value.actual == 2
    assert await log.end() == 2


async def test_a_guard_holds_while_nobody_wrote_on_its_subject(log: EventLog) -> None:
    subject = event("n1").subject
    at = (await log.append(event("n1"))).seq
    await log.append(event("n2"))
    assert await log.append(event("n1"), Expect(subject, at)) == Appended(3)


async def test_a_stale_leader_is_refused_by_a_guard_on_another_subject(log: EventLog) -> None:
    term = event("term")
    old = (await log.append(term)).seq
    new = (await log.append(event("term"))).seq
    with pytest.raises(Conflict) as conflict:
        await log.append(event("n1"), Expect(term.subject, old))
    assert conflict.value.actual == new
    await log.append(event("n1"), Expect(term.subject, new))


async def test_of_two_writers_under_one_guard_exactly_one_wins(log: EventLog) -> None:
    at = 0
    for _ in range(20):
        guard = Expect(event().subject, at)
        answers = await asyncio.gather(*(log.append(event(), guard) for _ in range(2)), return_exceptions=True)
        won = [answer for answer in answers if isinstance(answer, Appended)]
        lost = [answer for answer in answers if isinstance(answer, Conflict)]
        assert (len(won), len(lost)) == (1, 1)
        at = won[0].seq
        assert lost[0].actual == at


async def test_a_guarded_append_sent_again_is_a_duplicate_and_no_conflict(log: EventLog) -> None:
    guarded, guard = event(), Expect(event().subject, 0)
    await log.append(guarded, guard)
    assert await log.append(guarded, guard) == Appended(1, duplicate=True)
    await log.append(event())
    assert await log.append(guarded, guard) == Appended(1, duplicate=True)
    assert await log.end() == 2


async def test_last_knows_exact_subjects_only(log: EventLog) -> None:
    subject = event("n1").subject
    assert await log.last(subject) is None
    await log.append(event("n1"))
    newest = event("n1")
    await log.append(newest)
    await log.append(event("n2"))
    found = await log.last(subject)
    assert found is not None
    assert (found.seq, found.envelope) == (2, newest)


async def test_read_gives_what_matches_after_a_sequence(log: EventLog) -> None:
    for node in ("a", "b", "a", "c", "a"):
        await log.append(event(node))
    assert [r.seq async for r in log.read()] == [1, 2, 3, 4, 5]
    assert [r.seq async for r in log.read(1, event("a").subject)] == [3, 5]
    assert [r.seq async for r in log.read(2, "stoker.event.node.*.verdict")] == [3, 4, 5]
    assert [r.seq async for r in log.read(0, "stoker.event.node.b.>")] == [2]
    assert [r.seq async for r in log.read(0, "stoker.event.job.>")] == []


async def test_read_of_nothing_ends(log: EventLog) -> None:
    assert [r async for r in log.read()] == []
    await log.append(event())
    assert [r async for r in log.read(1)] == []
    assert [r async for r in log.read(7)] == []


async def test_read_stops_at_the_end_of_its_beginning(log: EventLog) -> None:
    await fill(log, 5)
    seen = []
    async for recorded in log.read():
        seen.append(recorded.seq)
        await log.append(event())
    assert seen == [1, 2, 3, 4, 5]


async def test_every_way_of_reading_tells_the_same(log: EventLog) -> None:
    await fill(log, 3)
    read = [r async for r in log.read()]
    assert await take(log.follow(), 3) == read
    assert [await log.last(r.envelope.subject) for r in read] == read


async def test_an_event_comes_back_as_it_was_sent(log: EventLog) -> None:
    sent = stamp(ready("n1"), "test", actor="agent:a", onbehalfof="user:u", causationid="c", traceparent=None)
    await log.append(sent)
    (found,) = [r async for r in log.read()]
    assert found.envelope == sent
    assert found.event == ready("n1")


async def test_an_unknown_type_is_kept(log: EventLog) -> None:
    await log.append(event().model_copy(update={"type": "stoker.later.v9", "data": {"a": 1}}))
    (found,) = await take(log.follow(), 1)
    assert found.event == Unknown(type="stoker.later.v9", data={"a": 1})


async def test_follow_gives_old_and_new_events_without_a_gap(log: EventLog) -> None:
    await fill(log, 700)
    following = log.follow()
    seen = await take(following, 700)
    writing = asyncio.create_task(fill(log, 700))
    seen += await take(following, 700)
    await writing
    assert [r.seq for r in seen] == list(range(1, 1401))
    assert [r.at_ms for r in seen] == sorted(r.at_ms for r in seen)


async def test_follow_goes_on_after_a_position(log: EventLog) -> None:
    await fill(log, 5)
    third = [r async for r in log.read()][2]
    following = log.follow(Position(3, third.envelope.id))
    assert [r.seq for r in await take(following, 2)] == [4, 5]
    await log.append(event())
    assert [r.seq for r in await take(following, 1)] == [6]
    assert [r.seq for r in await take(log.follow(Position(3)), 2)] == [4, 5]


async def test_followers_see_one_order(log: EventLog) -> None:
    following = [log.follow(), log.follow()]
    writing = asyncio.create_task(fill(log, 50))
    first, second = await asyncio.gather(*(take(each, 50) for each in following))
    await writing
    assert first == second


async def read_to(log: EventLog, end: int, wants: frozenset[str] | None, position: Position = START) -> list[Burst]:
    """The bursts after the position up to the sequence `end`."""
    bursts: list[Burst] = []
    async with asyncio.timeout(20):
        async for burst in log.bursts(position, wants):
            bursts.append(burst)
            if burst.position.seq >= end:
                break
    return bursts


def folded(bursts: list[Burst]) -> list[Recorded]:
    return [recorded for burst in bursts for recorded in burst.recorded]


async def mixed(log: EventLog, count: int) -> list[Recorded]:
    """Every third event is a node that joined."""
    for i in range(count):
        await log.append(stamp(joined(f"n{i}") if i % 3 == 1 else ready(f"n{i}"), "test"))
    return [r async for r in log.read()]


async def test_bursts_together_are_what_follow_gives(log: EventLog) -> None:
    everything = await mixed(log, 30)
    bursts = await read_to(log, 30, None)
    assert folded(bursts) == everything
    for burst in bursts:
        last = burst.recorded[-1]
        assert burst.position == Position(last.seq, last.envelope.id, last.at_ms)


async def test_bursts_hold_the_wanted_types_and_tell_how_far_the_log_was_read(log: EventLog) -> None:
    everything = await mixed(log, 30)
    bursts = await read_to(log, 30, frozenset({NodeJoined.type_name}))
    assert folded(bursts) == [r for r in everything if isinstance(r.event, NodeJoined)]
    assert bursts[-1].position == Position(30, everything[-1].envelope.id, everything[-1].at_ms)
    assert [b.position.seq for b in bursts] == sorted({b.position.seq for b in bursts})


async def test_a_fold_that_wants_nothing_still_learns_how_far_the_log_goes(log: EventLog) -> None:
    await mixed(log, 6)
    bursts = await read_to(log, 6, frozenset())
    assert folded(bursts) == []
    assert bursts[-1].position.seq == 6
    following = log.bursts(bursts[-1].position, frozenset())
    coming = asyncio.create_task(take(following, 1))
    await asyncio.sleep(0.05)
    assert not coming.done()
    at = await log.append(event())
    (burst,) = await coming
    assert (burst.recorded, burst.position.seq) == ([], at.seq)


async def test_bursts_go_on_after_a_position(log: EventLog) -> None:
    everything = await mixed(log, 9)
    wants = frozenset({NodeJoined.type_name})
    bursts = await read_to(log, 9, wants, Position(4, everything[3].envelope.id))
    assert [r.seq for r in folded(bursts)] == [5, 8]


async def test_an_unknown_type_is_wanted_by_its_name_or_among_all(log: EventLog) -> None:
    later = event().model_copy(update={"type": "stoker.later.v9", "data": {"type": "stoker.node.joined.v1"}})
    await log.append(later)
    assert [r.event for r in folded(await read_to(log, 1, None))] == [Unknown(type=later.type, data=later.data)]
    assert [r.envelope for r in folded(await read_to(log, 1, frozenset({later.type})))] == [later]
    assert folded(await read_to(log, 1, frozenset({NodeJoined.type_name}))) == []


@pytest.mark.parametrize(
    "position",
    [
        pytest.param(Position(2, "other"), id="another event lies there"),
        pytest.param(Position(9, "e9"), id="the log ends before it"),
        pytest.param(Position(9), id="the log ends before it, no id"),
    ],
)
async def test_follow_refuses_a_position_of_another_log(log: EventLog, position: Position) -> None:
    await fill(log, 3)
    with pytest.raises(Diverged):
        await take(log.follow(position), 1)


async def test_events_appended_together_lie_in_their_order_and_only_once(log: EventLog) -> None:
    await log.append(event("n0", id="e3"))
    many = [event(f"n{i}", id=f"e{i}") for i in range(30)]
    landed = await log.append_all(many)
    assert landed[3] == Appended(1, duplicate=True)
    assert sorted(found.seq for found in landed) == list(range(1, 31))
    again = await log.append_all(many)
    assert [found.seq for found in again] == [found.seq for found in landed]
    assert await log.end() == 30
    more = await log.append_all([event(f"m{i}") for i in range(700)])
    assert [found.seq for found in more] == list(range(31, 731))
    assert [r.envelope.subject for r in [r async for r in log.read(30)]][:2] == [
        event("m0").subject,
        event("m1").subject,
    ]


async def test_nothing_appended_together_is_nothing(log: EventLog) -> None:
    assert await log.append_all([]) == []
    assert await log.end() == 0
