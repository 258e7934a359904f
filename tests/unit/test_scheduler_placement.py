"""Placement: the arrays answer as plain arithmetic would, however they came to be what they are."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_scheduler import placement
from stoker_scheduler.fragments import Mix, Shape
from stoker_scheduler.placement import Capacity, Demand, Spot, choose, choose_nodes, fitting

MODELS = ("A100", "H100", "T4")
CORES, GIB = 1000, 1024


class Node(NamedTuple):
    models: tuple[str, ...]
    cpu: int
    memory: int


def named(models: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(models), max_size=2, unique=True).map(tuple)


one_model = st.tuples(st.sampled_from(MODELS), st.integers(0, 4)).map(lambda kind: (kind[0],) * kind[1])
mixed = st.lists(st.sampled_from(MODELS), max_size=4).map(tuple)
nodes = st.lists(
    st.builds(
        Node, one_model | mixed, st.integers(0, 8).map(lambda n: n * 4000), st.sampled_from((8, 64)).map(GIB.__mul__)
    ),
    min_size=1,
    max_size=6,
)
demands = st.builds(
    Demand,
    gpus=st.integers(0, 4),
    milli=st.sampled_from((200, 330, 500, 800, 1000, 1000)),
    cpu=st.integers(0, 4).map(lambda n: n * 2000),
    memory=st.sampled_from((0, 1, 8)).map(GIB.__mul__),
    models=named((*MODELS, "V100")),
)
mixes = st.dictionaries(demands.map(lambda demand: demand.shape), st.integers(1, 50), max_size=5).map(Mix.of)
unhurried = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def joined(cluster: list[Node]) -> Capacity:
    capacity = Capacity()
    for at, node in enumerate(cluster):
        capacity.join(f"node-{at}", *node)
    return capacity


def everywhere(capacity: Capacity) -> np.ndarray:
    return np.ones(len(capacity.names), dtype=np.bool_)


def take(capacity: Capacity, demand: Demand, spot: Spot) -> None:
    capacity.take(capacity.names[spot[0]], spot[1], demand.milli, demand.cpu, demand.memory)


def give(capacity: Capacity, demand: Demand, spot: Spot) -> None:
    capacity.give(capacity.names[spot[0]], spot[1], demand.milli, demand.cpu, demand.memory)


def fill(capacity: Capacity, asked: list[Demand], mix: Mix) -> list[tuple[Demand, Spot]]:
    placed = []
    for demand in asked:
        spot = choose(capacity, demand, everywhere(capacity), mix)
        if spot is not None:
            take(capacity, demand, spot)
            placed.append((demand, spot))
    return placed


class Plain:
    """The same choice in plain arithmetic, node by node."""

    def __init__(self, cluster: list[Node], capacity: Capacity, mix: Mix) -> None:
        self.cluster = cluster
        self.left = [capacity.left(name) for name in capacity.names]
        self.gpus = [model for node in cluster for model in node.models]
        self.cores = sum(node.cpu for node in cluster)
        self.kept = mix.kept
        self.mix = mix

    def price(self, model: str) -> Fraction:
        """In thousandths, of which each part is rounded down."""
        parts = [
            1000 * milli * len(self.gpus) // (self.mix.gpus * sum(self.gpus.count(other) for other in models))
            for models, milli in self.mix.named
            if model in models
        ]
        return Fraction(min(10_000, sum(parts)), 1000)

    def stranded(self, idle: int, cpu: int) -> Fraction:
        return max(Fraction(0), idle - Fraction(1000 * cpu, self.kept)) if self.kept else Fraction(0)

    def broken(self, free: list[int]) -> Fraction:
        who = sum(count for gpus, count in self.mix.several if gpus > free.count(1000))
        return sum(free) * Fraction(1000 * who // max(1, self.mix.shares), 1000)

    def spot(self, demand: Demand, row: int) -> tuple[int, ...] | None:
        free, cpu, memory = self.left[row]
        able = [
            (self.price(model), free[gpu], gpu)
            for gpu, model in enumerate(self.cluster[row].models)
            if free[gpu] >= demand.milli and (not demand.models or model in demand.models)
        ]
        if len(able) < demand.gpus or cpu < demand.cpu or memory < demand.memory:
            return None
        return tuple(sorted(gpu for _, _, gpu in sorted(able)[: demand.gpus]))

    def cost(self, demand: Demand, row: int, gpus: tuple[int, ...]) -> tuple[Fraction, Fraction]:
        free, cpu, _ = self.left[row]
        after = [milli - demand.milli * (gpu in gpus) for gpu, milli in enumerate(free)]
        cpu_after = cpu - demand.cpu
        stranded = self.stranded(sum(after), cpu_after) - self.stranded(sum(free), cpu)
        broken = self.broken(after) - self.broken(free)
        splintered = sum(m for m in after if m < 1000) - sum(m for m in free if m < 1000)
        scarce = sum((self.price(self.cluster[row].models[gpu]) for gpu in gpus), Fraction(0)) * demand.milli
        left = Fraction(sum(after), max(1, 1000 * len(self.gpus))) + Fraction(cpu_after, max(1, self.cores))
        return stranded + broken + Fraction(splintered, 4) + scarce * Fraction(3, 4), left

    def choose(self, demand: Demand) -> Spot | None:
        spots = [(row, gpus) for row in range(len(self.cluster)) if (gpus := self.spot(demand, row)) is not None]
        return min(spots, key=lambda spot: (*self.cost(demand, *spot), spot[0]), default=None)


@given(nodes, st.lists(demands, max_size=12), demands, mixes)
@unhurried
def test_the_choice_is_that_of_plain_arithmetic(
    cluster: list[Node], before: list[Demand], demand: Demand, mix: Mix
) -> None:
    capacity = joined(cluster)
    fill(capacity, before, mix)
    plain = Plain(cluster, capacity, mix)
    assert choose(capacity, demand, everywhere(capacity), mix) == plain.choose(demand)
    could = [plain.spot(demand, row) is not None for row in range(len(cluster))]
    assert fitting(capacity, demand, everywhere(capacity)).tolist() == could


@given(nodes, st.lists(demands, max_size=20), mixes)
@unhurried
def test_nothing_is_given_twice(cluster: list[Node], asked: list[Demand], mix: Mix) -> None:
    capacity = joined(cluster)
    placed = fill(capacity, asked, mix)
    for row, (node, name) in enumerate(zip(cluster, capacity.names, strict=True)):
        here = [(demand, gpus) for demand, (at, gpus) in placed if at == row]
        for demand, gpus in here:
            assert len(set(gpus)) == demand.gpus
            assert not demand.models or {node.models[gpu] for gpu in gpus} <= set(demand.models)
        free, cpu, memory = capacity.left(name)
        assert free == [1000 - sum(d.milli for d, gpus in here if g in gpus) for g in range(len(node.models))]
        assert (cpu, memory) == (node.cpu - sum(d.cpu for d, _ in here), node.memory - sum(d.memory for d, _ in here))
        assert min([*free, cpu, memory]) >= 0


@given(nodes, st.lists(demands, max_size=12), st.lists(demands, max_size=4), mixes, st.randoms(use_true_random=False))
@unhurried
def test_what_is_given_back_is_as_if_never_taken(
    cluster: list[Node], taken: list[Demand], asked: list[Demand], mix: Mix, order: Random
) -> None:
    capacity, fresh = joined(cluster), joined(cluster)
    placed = fill(capacity, taken, mix)
    order.shuffle(placed)
    for demand, spot in placed:
        give(capacity, demand, spot)
    assert [capacity.left(name) for name in capacity.names] == [fresh.left(name) for name in fresh.names]
    assert fill(capacity, asked, mix) == fill(fresh, asked, mix)


@given(nodes, st.lists(demands, max_size=12), st.lists(demands, max_size=6), mixes, mixes)
@unhurried
def test_a_rebuilt_capacity_chooses_the_same(
    cluster: list[Node], before: list[Demand], asked: list[Demand], old: Mix, mix: Mix
) -> None:
    capacity = joined(cluster)
    placed = fill(capacity, before, old)
    rebuilt = joined(cluster)
    for demand, spot in placed:
        take(rebuilt, demand, spot)
    assert fill(capacity, asked, mix) == fill(rebuilt, asked, mix)


@given(nodes, st.lists(demands, max_size=8), st.lists(demands, max_size=8), mixes)
@unhurried
def test_a_copy_and_its_original_do_not_see_each_other(
    cluster: list[Node], first: list[Demand], second: list[Demand], mix: Mix
) -> None:
    capacity = joined(cluster)
    fill(capacity, first, mix)
    copy = capacity.copy()
    before = [capacity.left(name) for name in capacity.names]
    in_copy = fill(copy, second, mix)
    copy.join("node-new", ("B200",), 8 * CORES, GIB)
    assert [capacity.left(name) for name in capacity.names] == before
    assert capacity.names == [f"node-{at}" for at in range(len(cluster))]
    assert fill(capacity, second, mix) == in_copy


@given(nodes, st.lists(demands, max_size=8), demands, st.integers(1, 4), mixes)
@unhurried
def test_a_gang_gets_the_nodes_that_its_shares_would_get_one_by_one(
    cluster: list[Node], before: list[Demand], demand: Demand, size: int, mix: Mix
) -> None:
    capacity = joined(cluster)
    fill(capacity, before, mix)
    usable = everywhere(capacity)
    spots: list[Spot] = []
    while len(spots) < size and (spot := choose(capacity, demand, usable, mix)) is not None:
        spots.append(spot)
        usable[spot[0]] = False
    expected = tuple(spots) if len(spots) == size else None
    assert choose_nodes(capacity, demand._replace(nodes=size), everywhere(capacity), mix) == expected


@given(nodes, st.lists(demands, max_size=20), mixes)
@unhurried
def test_forgetting_what_is_remembered_changes_no_choice(cluster: list[Node], asked: list[Demand], mix: Mix) -> None:
    remembering = fill(joined(cluster), asked, mix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "MOST_STATES", 0)
        patch.setattr(placement, "MOST_SHAPES", 1)
        assert fill(joined(cluster), asked, mix) == remembering


@given(nodes, demands, mixes)
@unhurried
def test_only_usable_nodes_are_chosen(cluster: list[Node], demand: Demand, mix: Mix) -> None:
    capacity = joined(cluster)
    best = choose(capacity, demand, everywhere(capacity), mix)
    if best is not None:
        usable = everywhere(capacity)
        usable[best[0]] = False
        other = choose(capacity, demand, usable, mix)
        assert other is None or other[0] != best[0]
        assert choose(capacity, demand, ~usable, mix) == best


def test_a_node_that_joins_anew_has_what_it_says_now() -> None:
    capacity = joined([Node(("T4",) * 2, 8 * CORES, GIB), Node(("T4",), 8 * CORES, GIB)])
    whole_node = Demand(2, 1000, 0, 0)
    assert choose(capacity, whole_node, everywhere(capacity), Mix()) == (0, (0, 1))
    capacity.take("node-0", (0,), 1000, 0, 0)
    assert choose(capacity, whole_node, everywhere(capacity), Mix()) is None
    capacity.join("node-0", ("T4",) * 2, 8 * CORES, GIB)
    assert choose(capacity, whole_node, everywhere(capacity), Mix()) == (0, (0, 1))
    capacity.join("node-0", ("H100",) * 4, 8 * CORES, GIB)
    assert capacity.row("node-0") == 0
    assert choose(capacity, Demand(4, 1000, 0, 0, ("H100",)), everywhere(capacity), Mix()) == (0, (0, 1, 2, 3))


def test_who_would_take_any_model_leaves_those_that_others_ask_for_by_name() -> None:
    capacity = joined([Node(("T4",), 8 * CORES, GIB), Node(("H100",) * 8, 64 * CORES, GIB)])
    anything = Demand(1, 1000, CORES, 0)
    nobody_asks = Mix.of({Shape(1, 1000, CORES, ()): 10})
    asked_for = Mix.of({Shape(1, 1000, CORES, ()): 10, Shape(1, 1000, CORES, ("T4",)): 5})
    assert choose(capacity, anything, everywhere(capacity), nobody_asks) == (0, (0,)), "the node that is left fullest"
    assert choose(capacity, anything, everywhere(capacity), asked_for) == (1, (0,))


def test_who_needs_much_cpu_does_not_leave_gpus_without() -> None:
    mix = Mix.of({Shape(1, 1000, 8 * CORES, ()): 10})
    capacity = joined([Node(("T4",) * 2, 16 * CORES, GIB), Node(("T4",) * 2, 64 * CORES, GIB)])
    hungry = Demand(1, 1000, 14 * CORES, 0)
    assert choose(capacity, hungry, everywhere(capacity), mix) == (1, (0,))
    assert choose(capacity, hungry, everywhere(capacity), Mix()) == (0, (0,)), "who knows of nobody's CPU fills"


@pytest.mark.parametrize("remembered", [0, 1000])
def test_on_a_mixed_node_too_the_model_that_nobody_asks_for_goes_first(
    remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MOST_STATES", remembered)
    mix = Mix.of({Shape(1, 1000, 0, ("A100",)): 1})
    capacity = joined([Node(("A100", "T4", "T4"), 8 * CORES, GIB)])
    share = Demand(1, 1000, 0, 0)
    assert [spot for _, spot in fill(capacity, [share] * 4, mix)] == [(0, (1,)), (0, (2,)), (0, (0,))]


def test_a_part_of_a_gpu_goes_where_a_part_is_taken_already() -> None:
    capacity = joined([Node(("T4",) * 2, 8 * CORES, GIB), Node(("T4",) * 4, 8 * CORES, GIB)])
    capacity.take("node-1", (2,), 600, 0, 0)
    part = Demand(1, 300, 0, 0)
    assert choose(capacity, part, everywhere(capacity), Mix()) == (1, (2,))
    capacity.take("node-1", (2,), 300, 0, 0)
    assert choose(capacity, part, everywhere(capacity), Mix()) == (0, (0,))


def test_a_small_job_leaves_whole_nodes_to_those_who_need_them() -> None:
    capacity = joined([Node(("T4",) * 4, 40 * CORES, GIB), Node(("T4",) * 4, 80 * CORES, GIB)])
    capacity.take("node-1", (3,), 1000, 0, 0)
    small = Demand(1, 1000, 0, 0)
    assert choose(capacity, small, everywhere(capacity), Mix()) == (0, (0,)), "the node that is left fullest"
    mix = Mix.of({Shape(1, 1000, 0, ()): 9, Shape(4, 1000, 0, ()): 1})
    assert choose(capacity, small, everywhere(capacity), mix) == (1, (0,))


def test_work_without_gpu_goes_to_nodes_without() -> None:
    mix = Mix.of({Shape(1, 1000, 4 * CORES, ()): 1})
    capacity = joined([Node(("T4",) * 2, 8 * CORES, GIB), Node((), 8 * CORES, GIB)])
    assert choose(capacity, Demand(0, 0, 4 * CORES, 0), everywhere(capacity), mix) == (1, ())


def test_nodes_that_declare_no_cpu_are_filled_one_after_the_other() -> None:
    capacity = joined([Node(("T4",) * 4, 0, GIB), Node(("T4",) * 2, 0, GIB)])
    spots = [spot for _, spot in fill(capacity, [Demand(1, 1000, 0, 0)] * 3, Mix())]
    assert spots == [(1, (0,)), (1, (1,)), (0, (0,))]


def test_nobody_fits_where_there_is_nothing() -> None:
    capacity = Capacity()
    nowhere = np.zeros(0, dtype=np.bool_)
    assert choose(capacity, Demand(1, 1000, 0, 0), nowhere, Mix()) is None
    assert choose_nodes(capacity, Demand(1, 1000, 0, 0), nowhere, Mix()) is None
    assert fitting(capacity, Demand(0, 0, 0, 0), nowhere).tolist() == []
