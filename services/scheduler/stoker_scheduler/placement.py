"""Where one node's share of a gang goes: free capacity as arrays, and the choice that wastes the least of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .fragments import NO_MODEL, WHOLE, Bools, Fragments, Ints, Mix, Shape, accepted

UNKNOWN, NEVER = -2, -1
# One step of the score, in milli-GPU of fragments: smaller differences are noise, and best fit decides.
STEP = 40
FULLNESS = 1 << 16
MOST_STATES = 1 << 16


class Demand(NamedTuple):
    """What each node of a gang must give."""

    gpus: int  # 0 = CPU only
    milli: int  # of each GPU; 1000 = whole
    cpu: int  # milli-cores
    memory: int  # MiB
    models: tuple[str, ...] = ()  # accepted ones; () = any
    nodes: int = 1

    @property
    def shape(self) -> Shape:
        return Shape(self.gpus, self.milli, self.cpu, self.models)


class _Scores:
    """What is known of one shape, by node state: its rank there, higher is better, and which GPU it would get."""

    def __init__(self) -> None:
        self.rank = np.empty(0, dtype=np.int64)
        self.pick = np.empty(0, dtype=np.int16)

    def grow(self, size: int) -> None:
        more = size - len(self.rank)
        if more > 0:
            more += size
            self.rank = np.concatenate((self.rank, np.full(more, UNKNOWN, dtype=np.int64)))
            self.pick = np.concatenate((self.pick, np.zeros(more, dtype=np.int16)))


class _States:
    """Every distinct node state met: equal nodes are scored once, and copies of a capacity share what is known.

    A state is the GPUs' models and free parts, in canonical order, and the free CPU.
    """

    def __init__(self, models: dict[str, int]) -> None:
        self.models = models
        self.index: dict[tuple[tuple[tuple[int, int], ...], int], int] = {}
        self.free = np.zeros((0, 0), dtype=np.int64)
        self.kind = np.full((0, 0), NO_MODEL, dtype=np.int64)
        self.cpu = np.zeros(0, dtype=np.int64)
        self.size = np.zeros(0, dtype=np.int64)
        self.mix = Mix()
        self.fragments = Fragments(self.mix, models)
        self.scores: dict[Shape, _Scores] = {}

    def of(self, gpus: tuple[tuple[int, int], ...], cpu: int, size: int) -> int:
        key = (gpus, cpu)
        found = self.index.get(key)
        if found is not None:
            return found
        row = self.index[key] = len(self.index)
        if row >= len(self.cpu) or len(gpus) > self.free.shape[1]:
            self._grow(row, len(gpus))
        for at, (model, free) in enumerate(gpus):
            self.kind[row, at] = model
            self.free[row, at] = free
        self.cpu[row] = cpu
        self.size[row] = size
        return row

    def _grow(self, row: int, gpus: int) -> None:
        rows = max(64, 2 * row, len(self.cpu))
        width = max(gpus, self.free.shape[1])
        free, kind = np.zeros((rows, width), dtype=np.int64), np.full((rows, width), NO_MODEL, dtype=np.int64)
        free[: self.free.shape[0], : self.free.shape[1]] = self.free
        kind[: self.kind.shape[0], : self.kind.shape[1]] = self.kind
        self.free, self.kind = free, kind
        self.cpu = np.concatenate((self.cpu, np.zeros(rows - len(self.cpu), dtype=np.int64)))
        self.size = np.concatenate((self.size, np.zeros(rows - len(self.size), dtype=np.int64)))

    def known(self, shape: Shape, mix: Mix, states: NDArray[np.int32]) -> _Scores:
        """The shape's scores, with those of all these states among them."""
        if mix is not self.mix:
            if mix != self.mix:
                self.scores = {}
                self.fragments = Fragments(mix, self.models)
            self.mix = mix
        scores = self.scores.get(shape)
        if scores is None:
            scores = self.scores[shape] = _Scores()
        scores.grow(len(self.index))
        missing = states[scores.rank[states] == UNKNOWN]
        if missing.size:
            self._score(shape, np.unique(missing), scores)
        return scores

    def _score(self, shape: Shape, states: NDArray[np.int32], scores: _Scores) -> None:
        scores.rank[states] = NEVER
        free, kind, cpu = self.free[states], self.kind[states], self.cpu[states]
        large = (free >= shape.milli) & accepted(shape.models, self.models)[kind]
        fits = (large.sum(axis=1) >= shape.gpus) & (cpu >= shape.cpu)
        states, free, kind, cpu, large = states[fits], free[fits], kind[fits], cpu[fits] - shape.cpu, large[fits]
        if not states.size:
            return
        before = self.fragments.measure(free, kind, cpu + shape.cpu)
        if shape.gpus == 1:
            tried, pick = large.nonzero()
        else:
            tried, pick = np.arange(len(states)), large.argmax(axis=1) if large.size else np.zeros(len(states), int)
        after = free[tried]
        if shape.gpus == 1:
            after[np.arange(len(tried)), pick] -= shape.milli
        elif shape.gpus:
            chosen = large & (large.cumsum(axis=1) <= shape.gpus)
            after -= chosen * shape.milli
        weight = max(1, int(self.fragments.weights.sum()))
        grown = self.fragments.measure(after, kind[tried], cpu[tried]) - before[tried]
        full = FULLNESS // 2 - (cpu[tried] * FULLNESS // 4) // 128_000 - (after.sum(axis=1) * FULLNESS // 4) // 8_000
        rank = (1_000 - grown // (STEP * weight)) * FULLNESS + full
        order = np.lexsort((pick, -rank, tried))
        first = np.unique(tried[order], return_index=True)[1]
        best = order[first]
        scores.rank[states] = rank[best]
        scores.pick[states] = pick[best]


class Capacity:
    """Free capacity of all nodes, in the order in which they joined.

    Plain lists are the ledger, since facts arrive one by one; the arrays follow when somebody asks.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: dict[str, int] = {}
        self._kinds: list[tuple[int, ...]] = []
        self._free: list[list[int]] = []
        self._cpu: list[int] = []
        self._memory: list[int] = []
        self._models: dict[str, int] = {}
        self._dirty: set[int] = set()
        self._states = _States(self._models)
        self._state = np.zeros(0, dtype=np.int32)
        self._memory_now = np.zeros(0, dtype=np.int64)

    def row(self, name: str) -> int:
        return self._rows[name]

    def join(self, name: str, models: Sequence[str], cpu: int, memory: int) -> None:
        """(Re)declare a node: all that it has is free."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self.names)
            self.names.append(name)
            self._kinds.append(())
            self._free.append([])
            self._cpu.append(0)
            self._memory.append(0)
        if not self._models.keys() >= set(models):
            known = dict.fromkeys((*self._models, *models))
            self._models = {model: at for at, model in enumerate(known)}
            self._forget()
        self._kinds[row] = tuple(self._models[model] for model in models)
        self._free[row] = [WHOLE] * len(models)
        self._cpu[row] = cpu
        self._memory[row] = memory
        self._dirty.add(row)

    def take(self, name: str, gpus: Sequence[int], milli: int, cpu: int, memory: int) -> None:
        row = self._rows[name]
        free = self._free[row]
        for gpu in gpus:
            free[gpu] -= milli
        self._cpu[row] -= cpu
        self._memory[row] -= memory
        self._dirty.add(row)

    def give(self, name: str, gpus: Sequence[int], milli: int, cpu: int, memory: int) -> None:
        self.take(name, gpus, -milli, -cpu, -memory)

    def left(self, name: str) -> tuple[list[int], int, int]:
        """Free thousandths of each GPU, milli-cores and MiB of the node; not to be changed."""
        row = self._rows[name]
        return self._free[row], self._cpu[row], self._memory[row]

    def holds(self, name: str, cpu: int, memory: int) -> bool:
        """Whether the node has that many cores and that much memory left."""
        row = self._rows[name]
        return self._cpu[row] >= cpu and self._memory[row] >= memory

    def copy(self) -> Capacity:
        """One that can be taken from without touching this one; what is known of scores is shared."""
        self.sync()
        other = Capacity.__new__(Capacity)
        other.names = self.names.copy()
        other._rows = self._rows.copy()
        other._kinds = self._kinds.copy()
        other._free = [free.copy() for free in self._free]
        other._cpu = self._cpu.copy()
        other._memory = self._memory.copy()
        other._models = self._models
        other._dirty = set()
        other._states = self._states
        other._state = self._state.copy()
        other._memory_now = self._memory_now.copy()
        return other

    def _forget(self) -> None:
        self._states = _States(self._models)
        self._dirty.update(range(len(self.names)))

    def sync(self) -> None:
        """Bring the arrays up to the ledger."""
        if not self._dirty:
            return
        if len(self._states.index) + len(self._dirty) > MOST_STATES + len(self.names):
            self._forget()
        more = len(self.names) - len(self._state)
        if more:
            self._state = np.concatenate((self._state, np.zeros(more, dtype=np.int32)))
            self._memory_now = np.concatenate((self._memory_now, np.zeros(more, dtype=np.int64)))
        for row in self._dirty:
            free = self._free[row]
            gpus = tuple(sorted(zip(self._kinds[row], free, strict=True)))
            self._state[row] = self._states.of(gpus, self._cpu[row], len(free))
            self._memory_now[row] = self._memory[row]
        self._dirty.clear()

    def canonical(self, row: int) -> list[int]:
        """The node's GPUs in the order in which its state names them."""
        kind, free = self._kinds[row], self._free[row]
        return sorted(range(len(free)), key=lambda gpu: (kind[gpu], free[gpu]))


def fitting(capacity: Capacity, demand: Demand, usable: Bools) -> Bools:
    """Which nodes could hold one node's share now."""
    capacity.sync()
    states, at = capacity._states, capacity._state
    large = (states.free[at] >= demand.milli) & accepted(demand.models, states.models)[states.kind[at]]
    fits = (large.sum(axis=1) >= demand.gpus) & (states.cpu[at] >= demand.cpu)
    result: Bools = fits & (capacity._memory_now >= demand.memory) & usable
    return result


def choose(capacity: Capacity, demand: Demand, usable: Bools, mix: Mix) -> tuple[int, tuple[int, ...]] | None:
    """The best node for one node's share, as row and GPU indices, or None. Ties go to the first node."""
    capacity.sync()
    scores = capacity._states.known(demand.shape, mix, capacity._state)
    rank = scores.rank[capacity._state]
    rank[~usable | (capacity._memory_now < demand.memory)] = NEVER
    if not rank.size:
        return None
    row = int(rank.argmax())
    if rank[row] < 0:
        return None
    if not demand.gpus:
        return row, ()
    order = capacity.canonical(row)
    first = int(scores.pick[capacity._state[row]])
    if demand.gpus == 1:
        return row, (order[first],)
    kind, free = capacity._kinds[row], capacity._free[row]
    flags: Ints = accepted(demand.models, capacity._models).astype(np.int64)
    able = [gpu for gpu in order if free[gpu] >= demand.milli and flags[kind[gpu]]]
    return row, tuple(sorted(able[: demand.gpus]))
