"""The plain orders that the queue benchmark compares with, on jobs whose waits can be worked out by hand."""

from __future__ import annotations

import pytest
from benchmarks.queue_baselines import Ask, Nodes, Order, waits

# Two nodes of 4. Until 10 one is full; the gang of 8 needs both; two smaller ones come behind it.
ASKS = [Ask(0, 4, 10), Ask(1, 8, 5), Ask(2, 2, 8), Ask(2, 2, 9), Ask(3, 1, 3)]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fifo", [0, 9, 13, 13, 12]),  # everybody behind the gang, which runs from 10 to 15
        ("easy", [0, 9, 0, 13, 0]),  # those of 8 and 3 minutes are gone by 10, the one of 9 minutes is not
        ("easy_deep", [0, 9, 0, 13, 0]),
        ("skip", [0, 12, 0, 0, 7]),  # all that fits goes first: the last one starts at 10, and the gang waits for it
    ],
)
def test_each_order_lets_wait_whom_it_should(order: Order, expected: list[int]) -> None:
    assert waits(ASKS, 2, 4, order) == expected


def test_what_is_left_of_a_gang_goes_where_it_fits_best() -> None:
    nodes = Nodes(3, 4)
    assert nodes.take(1) == ((0, 1),)
    assert nodes.take(6) == ((1, 4), (0, 2))
    assert nodes.fits(6) is False
    assert nodes.fits(5) is True
    nodes.give(((1, 4), (0, 2)))
    assert nodes.free == [3, 4, 4]
