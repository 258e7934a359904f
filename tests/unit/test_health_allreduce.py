"""Wrong sums name whoever made them wrong, and nobody when that cannot be told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker_health.allreduce import contribution, wrong_ranks


def copies(world: int, *wrong: tuple[int, int]) -> dict[int, tuple[int, ...]]:
    """What each reader read: right but for the (reader, slot) pairs."""
    return {r: tuple(contribution(s) + ((r, s) in wrong) for s in range(world)) for r in range(world)}


def test_right_sums_name_nobody() -> None:
    assert wrong_ranks(copies(4), 4) == (frozenset(), False)


@given(st.integers(2, 16), st.data())
def test_a_slot_that_is_wrong_for_every_reader_names_its_owner(world: int, data: st.DataObject) -> None:
    owner = data.draw(st.integers(0, world - 1))
    assert wrong_ranks(copies(world, *((r, owner) for r in range(world))), world) == (frozenset({owner}), True)


@given(st.integers(3, 16), st.data())
def test_slots_that_one_reader_alone_reads_wrong_name_that_reader(world: int, data: st.DataObject) -> None:
    reader = data.draw(st.integers(0, world - 1))
    slots = data.draw(st.sets(st.integers(0, world - 1), min_size=1))
    assert wrong_ranks(copies(world, *((reader, s) for s in slots)), world) == (frozenset({reader}), True)


def test_of_two_ranks_that_read_differently_neither_is_named() -> None:
    assert wrong_ranks(copies(2, (0, 1)), 2) == (frozenset(), True)


def test_when_most_readers_disagree_in_part_nobody_is_named() -> None:
    assert wrong_ranks(copies(4, (0, 1), (1, 2), (2, 3)), 4) == (frozenset(), True)


def test_an_owner_and_a_reader_can_both_be_at_fault() -> None:
    wrong = [(r, 1) for r in range(5)] + [(3, 0)]
    assert wrong_ranks(copies(5, *wrong), 5) == (frozenset({1, 3}), True)


def test_when_every_slot_is_wrong_everywhere_nobody_is_named() -> None:
    assert wrong_ranks(copies(4, *((r, s) for r in range(4) for s in range(4))), 4) == (frozenset(), True)


def test_a_single_rank_that_adds_wrong_is_named() -> None:
    assert wrong_ranks(copies(1, (0, 0)), 1) == (frozenset({0}), True)


def test_a_copy_that_is_missing_is_wrong_and_pins_nobody() -> None:
    told = copies(3)
    del told[1]
    assert wrong_ranks(told, 3) == (frozenset(), True)


@given(st.integers(1, 8), st.data())
def test_somebody_is_named_only_when_something_was_wrong(world: int, data: st.DataObject) -> None:
    pairs = st.tuples(st.integers(0, world - 1), st.integers(0, world - 1))
    wrong = data.draw(st.sets(pairs))
    named, anything = wrong_ranks(copies(world, *wrong), world)
    assert anything == bool(wrong)
    assert named <= {rank for pair in wrong for rank in pair}
