"""Where a gang's node shares go: to the nodes on which they make the least idle GPU useless.

A share costs what it adds to stranded, broken and splintered GPU there, and the scarcity of the GPUs that it takes.
Equal costs go to the node that is left fullest, then to the one that joined first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .fragments import SCARCE, SPLINTERED, WHOLE, Bools, Ints, Mix, Shape, stranded

UNKNOWN, NEVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max
# The GPUs of a node are taken in order of price, then of how much of them is free.
FREE_BITS = 11
# What is remembered of costs: when it is more, all is forgotten, and measured again as it is asked for.
MOST_STATES = 16_384  # beside one for each node
MOST_SHAPES = 512

Spot = tuple[int, tuple[int, ...]]


class Demand(NamedTuple):
    """What each node of a gang must give."""

    gpus: int  # 0: CPU only
    milli: int  # of each GPU; 1000 is all of it
    cpu: int  # milli-cores
    memory: int  # MiB
    models: tuple[str, ...] = ()  # that will do; none named: any
    nodes: int = 1

    @property
    def shape(self) -> Shape:
        return Shape(self.gpus, self.milli, self.cpu, self.models)


class _States:
    """What every shape would cost on every node state met: equal nodes are measured once, and copies share it.

    A state is each GPU's model and how much of it is free, and the free CPU.
    """

    def __init__(self, nodes: Sequence[Sequence[str]], cores: int) -> None:
        counts = Counter(model for node in nodes for model in node)
        self._counts = {model: counts[model] for model in sorted(counts)}
        self._ids = {model: at for at, model in enumerate(self._counts)}
        self.mix = Mix()
        self.prices = self.mix.prices(self._counts)
        self._all_gpus, self._all_cores = max(1, WHOLE * counts.total()), max(1, cores)
        self._index: dict[tuple[tuple[tuple[int, int], ...], int], int] = {}
        width = max(map(len, nodes), default=0)
        # By state: free milli-GPU and model of each GPU; an absent GPU is of no model.
        self._gpus = np.zeros((0, 2, width), dtype=np.int64)
        self._cpu = np.zeros(0, dtype=np.int64)
        self.idle = np.zeros(0, dtype=np.int64)  # GPU and CPU together: a core weighs as many GPUs as come with it
        self._costs: dict[Shape, Ints] = {}

    def __len__(self) -> int:
        return len(self._index)

    def of(self, models: Sequence[str], free: Sequence[int], cpu: int) -> int:
        """The number of the state that a node is in."""
        gpus = tuple(sorted(zip(map(self._ids.__getitem__, models), free, strict=True)))
        found = self._index.get((gpus, cpu))
        if found is not None:
            return found
        state = self._index[gpus, cpu] = len(self._index)
        if state == len(self._cpu):
            more = state + 64
            absent = np.zeros((more, *self._gpus.shape[1:]), dtype=np.int64)
            absent[:, 1] = len(self._ids)
            self._gpus = np.concatenate((self._gpus, absent))
            self._cpu = np.concatenate((self._cpu, np.zeros(more, dtype=np.int64)))
            self.idle = np.concatenate((self.idle, np.zeros(more, dtype=np.int64)))
        for at, (model, milli) in enumerate(gpus):
            self._gpus[state, :, at] = milli, model
        self._cpu[state] = cpu
        self.idle[state] = sum(free) * self._all_cores + cpu * self._all_gpus
        return state

    def suit(self, mix: Mix) -> None:
        """Go by this mix from now on."""
        if mix != self.mix:
            self._costs.clear()
            self.prices = mix.prices(self._counts)
        self.mix = mix

    def costs(self, shape: Shape, states: Ints) -> Ints:
        """Of one share of this shape, in each of these states; NEVER where it does not fit."""
        known = self._costs.get(shape)
        if known is None or len(known) < len(self._cpu):
            if len(self._costs) > MOST_SHAPES:
                self._costs.clear()
            before = np.zeros(0, dtype=np.int64) if known is None else known
            known = np.concatenate((before, np.full(len(self._cpu) - len(before), UNKNOWN)))
            self._costs[shape] = known
        costs: Ints = known[states]
        missing = costs == UNKNOWN
        if missing.any():
            asked = np.unique(states[missing])
            known[asked] = self._measure(shape, asked)
            costs = known[states]
        return costs

    def _measure(self, shape: Shape, states: Ints) -> Ints:
        free, models = self._gpus[states].transpose(1, 0, 2)
        cpu, idle = self._cpu[states], free.sum(axis=1)
        flags = [not shape.models or model in shape.models for model in self._ids]
        able = (free >= shape.milli) & np.array([*flags, False])[models]
        fits = (able.sum(axis=1) >= shape.gpus) & (cpu >= shape.cpu)
        taken, whole, kept = shape.gpus * shape.milli, (free == WHOLE).sum(axis=1), self.mix.kept
        begun = scarce = np.zeros(len(states), dtype=np.int64)
        if shape.gpus:
            prices = np.array([*self.prices.values(), 0], dtype=np.int64)
            keys = np.where(able, (prices[models] << FREE_BITS) + free, NEVER)
            keys.sort(axis=1)
            begun = (keys[:, : shape.gpus] & ((1 << FREE_BITS) - 1) == WHOLE).sum(axis=1)
            scarce = (keys[:, : shape.gpus] >> FREE_BITS).sum(axis=1) * shape.milli
        broken = np.array(self.mix.broken(free.shape[1]), dtype=np.int64)
        # Thousandths of milli-GPU times `unit` and the denominators: nothing is divided, so nothing is rounded.
        unit = max(1, kept)
        costs = (begun * WHOLE - taken) * (1000 * unit * SPLINTERED[0] * SCARCE[1])
        costs += scarce * (unit * SPLINTERED[1] * SCARCE[0])
        costs += ((idle - taken) * broken[whole - begun] - idle * broken[whole]) * (unit * SPLINTERED[1] * SCARCE[1])
        if kept:
            growth = stranded(idle - taken, cpu - shape.cpu, kept) - stranded(idle, cpu, kept)
            costs += growth * (1000 * SPLINTERED[1] * SCARCE[1])
        costs[~fits] = NEVER
        return costs


class Capacity:
    """What is free on every node, in the order of their names: whoever joins first must not decide where jobs go.

    Plain lists are the ledger, since facts arrive one by one; the arrays follow when somebody asks.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: dict[str, int] | None = None
        self._models: list[tuple[str, ...]] = []
        self._cores: list[int] = []  # milli-cores, when all is free
        self._free: list[list[int]] = []  # a list is replaced, never changed: copies share it
        self._cpu: list[int] = []
        self._memory: list[int] = []
        self._dirty: set[int] = set()
        self._states: _States | None = None
        self._state = np.zeros(0, dtype=np.int64)
        self._memory_now = np.zeros(0, dtype=np.int64)

    def row(self, name: str) -> int:
        rows = self._rows
        if rows is None:
            rows = self._rows = {known: row for row, known in enumerate(self.names)}
        return rows[name]

    def join(self, name: str, models: Sequence[str], cpu: int, memory: int) -> None:
        """Declare a node, or declare it anew: all that it has is free."""
        row = bisect_left(self.names, name)
        if row == len(self.names) or self.names[row] != name:
            self.names.insert(row, name)
            self._models.insert(row, ())
            for ledger in (self._cores, self._cpu, self._memory):
                ledger.insert(row, 0)
            self._free.insert(row, [])
            self._rows = self._states = None  # rows moved: all of it is looked up anew
            self._dirty.clear()
        if (self._models[row], self._cores[row]) != (tuple(models), cpu):
            self._models[row], self._cores[row] = tuple(models), cpu
            self._states = None
        self._free[row], self._cpu[row], self._memory[row] = [WHOLE] * len(models), cpu, memory
        self._dirty.add(row)

    def take(self, name: str, gpus: Sequence[int], milli: int, cpu: int, memory: int) -> None:
        """These GPUs, by their index on the node, `milli` of each."""
        row = self.row(name)
        free = self._free[row].copy()
        for gpu in gpus:
            free[gpu] -= milli
        self._free[row] = free
        self._cpu[row] -= cpu
        self._memory[row] -= memory
        self._dirty.add(row)

    def give(self, name: str, gpus: Sequence[int], milli: int, cpu: int, memory: int) -> None:
        """Undo `take`."""
        self.take(name, gpus, -milli, -cpu, -memory)

    def left(self, name: str) -> tuple[list[int], int, int]:
        """Free thousandths of each GPU, milli-cores and MiB of the node; not to be changed."""
        row = self.row(name)
        return self._free[row], self._cpu[row], self._memory[row]

    def holds(self, name: str, cpu: int, memory: int) -> bool:
        """Whether the node has that many cores and that much memory left."""
        row = self.row(name)
        return self._cpu[row] >= cpu and self._memory[row] >= memory

    def copy(self) -> Capacity:
        """One to try things on."""
        other = Capacity()
        other._states = self._synced()
        other.names, other._rows = self.names.copy(), self._rows
        other._models, other._cores = self._models.copy(), self._cores.copy()
        other._free, other._cpu, other._memory = self._free.copy(), self._cpu.copy(), self._memory.copy()
        other._state, other._memory_now = self._state.copy(), self._memory_now.copy()
        return other

    def _synced(self) -> _States:
        """Bring the arrays up to the ledger."""
        states, nodes = self._states, len(self.names)
        if not self._dirty and states is not None:
            return states
        if states is None or len(states) > MOST_STATES + nodes:
            self._states = states = _States(self._models, sum(self._cores))
            self._state, self._memory_now = np.zeros(nodes, dtype=np.int64), np.zeros(nodes, dtype=np.int64)
            self._dirty.update(range(nodes))
        for row in self._dirty:
            self._state[row] = states.of(self._models[row], self._free[row], self._cpu[row])
            self._memory_now[row] = self._memory[row]
        self._dirty.clear()
        return states

    def costs(self, demand: Demand, usable: Bools, mix: Mix | None = None) -> Ints:
        """Of one share on each node; NEVER where it does not fit now."""
        states = self._synced()
        if mix is not None and mix is not states.mix:
            states.suit(mix)
        costs = states.costs(demand.shape, self._state)
        costs[~usable | (self._memory_now < demand.memory)] = NEVER
        return costs

    def idle(self, rows: Ints) -> Ints:
        """How much of these nodes is free, GPU and CPU together: only good to compare them."""
        idle: Ints = self._synced().idle[self._state[rows]]
        return idle

    def pick(self, demand: Demand, row: int) -> tuple[int, ...]:
        """A share's GPUs on this node: those of cheap models first, then the most used, then the first."""
        prices = self._synced().prices
        able = [
            (prices[model], free, gpu)
            for gpu, (model, free) in enumerate(zip(self._models[row], self._free[row], strict=True))
            if free >= demand.milli and (not demand.models or model in demand.models)
        ]
        return tuple(sorted(gpu for _, _, gpu in sorted(able)[: demand.gpus]))


def fitting(capacity: Capacity, demand: Demand, usable: Bools) -> Bools:
    """Which nodes could hold one share of the demand now."""
    result: Bools = capacity.costs(demand, usable) != NEVER
    return result


def choose(capacity: Capacity, demand: Demand, usable: Bools, mix: Mix) -> Spot | None:
    """The best node for one share, as row and GPU indices, or None."""
    costs = capacity.costs(demand, usable, mix)
    best = costs.min(initial=NEVER)
    if best == NEVER:
        return None
    rows = (costs == best).nonzero()[0]
    row = int(rows[capacity.idle(rows).argmin()])
    return row, capacity.pick(demand, row)


def choose_nodes(capacity: Capacity, demand: Demand, usable: Bools, mix: Mix) -> tuple[Spot, ...] | None:
    """The best nodes for the whole gang, best first, or None: as if each was chosen after the other."""
    costs = capacity.costs(demand, usable, mix)
    rows = (costs != NEVER).nonzero()[0]
    if len(rows) < demand.nodes:
        return None
    best = rows[np.lexsort((capacity.idle(rows), costs[rows]))[: demand.nodes]].tolist()
    return tuple((row, capacity.pick(demand, row)) for row in best)
