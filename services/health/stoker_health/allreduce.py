"""Which rank is at fault when an all-reduce gives wrong sums. Pure.

Every rank contributes to its own slot only, so the reduced vector shows each contribution by itself. A slot that is
wrong in every reader's copy was contributed wrong: its owner. A copy with slots wrong that others read right was
received wrong: its reader. When neither rule points to one side, or to every rank at once, the fault stays unpinned.
"""

from __future__ import annotations

from collections.abc import Mapping

STRIDE = 1_000_003


def contribution(rank: int) -> int:
    """What a healthy rank puts into its slot."""
    return (rank + 1) * STRIDE


def wrong_ranks(copies: Mapping[int, tuple[int, ...]], world: int) -> tuple[frozenset[int], bool]:
    """The ranks at fault, and whether anything was wrong at all. `copies` maps each reader to what it read back."""
    expected = [contribution(rank) for rank in range(world)]
    short = {reader for reader, slots in copies.items() if len(slots) != world}
    wrong = {
        (reader, slot)
        for reader, slots in copies.items()
        if reader not in short
        for slot in range(world)
        if slots[slot] != expected[slot]
    }
    missing = set(range(world)) - set(copies)
    if not wrong and not short and not missing:
        return frozenset(), False
    readers = set(copies) - short
    owners = {s for s in range(world) if readers and all((r, s) in wrong for r in readers)}
    partial = {(r, s) for r, s in wrong if s not in owners}
    bad_readers = {r for r, _ in partial}
    # One reader alone against the rest reads wrong; when most disagree, nobody can be told from here.
    named_readers = bad_readers if len(bad_readers) * 2 < len(readers) else set()
    named = frozenset(owners | named_readers | short)
    # What is wrong everywhere is what the ranks share: the network, or how they were set up.
    return (frozenset() if world > 1 and len(named) == world else named), True
