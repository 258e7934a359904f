"""Where a gang's node shares go: to the nodes on which the least of what stays idle becomes useless.

Idle GPU is useless when it is *stranded*, its node having too little CPU left for what GPUs are asked for with, and
less useful when it is *splintered*, the rest of a GPU of which a part is taken. A choice costs what it adds to
both, and more on GPU models that others ask for by name and that are few. Equal costs go to the fullest node, then to
the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

WHOLE = 1000
ABSENT = -1
# How many milli-GPU of asking the mix remembers: when they are reached, everything before counts half.
HORIZON = 100_000 * WHOLE
# Measured on the lists of benchmarks/placement.py; results change little between half and twice of each.
CPU_KEPT = (4, 5)  # of the mean CPU per GPU asked for: a GPU left with less is stranded
SPLINTERED = (1, 4)  # of a stranded milli-GPU
SCARCE = (3, 4)  # of a stranded milli-GPU, for a model that is asked for by name as much as there is of it
# GPUs of a node are told apart by price, then by how much of them is free.
PRICE_BITS = 11
NO_GPU = np.int64(1) << 62


class Demand(NamedTuple):
    """What each node of a gang must give."""

    gpus: int  # 0: CPU only
    milli: int  # of each GPU; 1000 is all of it
    cpu: int  # milli-cores
    memory: int  # MiB
    models: tuple[str, ...] = ()  # that will do; none named: any
    nodes: int = 1


class Mix(NamedTuple):
    """What was asked for lately, as far as it matters to where others go."""

    gpus: int = 0  # milli-GPU in all
    cpu: int = 0  # milli-cores that they were asked for with
    named: tuple[tuple[tuple[str, ...], int], ...] = ()  # milli-GPU that only these models would do for

    def plus(self, demand: Demand) -> Mix:
        """With one more gang that was asked for."""
        asked = demand.gpus * demand.milli * demand.nodes
        if not asked:
            return self
        named = self.named
        if demand.models:
            counts = dict(named)
            counts[demand.models] = counts.get(demand.models, 0) + asked
            named = tuple(sorted(counts.items()))
        mix = Mix(self.gpus + asked, self.cpu + demand.cpu * demand.nodes, named)
        if mix.gpus < HORIZON:
            return mix
        return Mix(mix.gpus // 2, mix.cpu // 2, tuple((models, n // 2) for models, n in mix.named if n > 1))


class _Models:
    """Which GPU is of which model: changes when nodes join, and is shared by all copies until then."""

    def __init__(self, nodes: Sequence[Sequence[str]], width: int) -> None:
        self.ids = {model: at for at, model in enumerate(sorted({m for node in nodes for m in node}))}
        # GPUs x nodes, as all arrays here: sums over the few GPUs are then sums of long rows.
        self.of = np.full((width, len(nodes)), len(self.ids), dtype=np.int64)
        for row, node in enumerate(nodes):
            self.of[: len(node), row] = [self.ids[model] for model in node]
        self.counts: list[int] = np.bincount(self.of.ravel(), minlength=len(self.ids))[: len(self.ids)].tolist()
        self._accepted: dict[tuple[str, ...], tuple[Bools, Ints]] = {}
        self._prices: tuple[Mix, Ints] = (Mix(), np.zeros(len(self.ids) + 1, dtype=np.int64))

    def accepted(self, models: tuple[str, ...]) -> tuple[Bools, Ints]:
        """Which GPUs would do, and how many of them each node has."""
        found = self._accepted.get(models)
        if found is None:
            wanted = [self.ids[m] for m in models if m in self.ids] if models else list(self.ids.values())
            flags = np.isin(self.of, wanted)
            found = self._accepted[models] = (flags, flags.sum(axis=0, dtype=np.int64))
        return found

    def prices(self, mix: Mix) -> Ints:
        """Per model, in thousandths: what is asked for by name, over the model's share of what is asked for at all."""
        known, prices = self._prices
        if known is mix or known == mix:
            return prices
        prices, every = np.zeros(len(self.ids) + 1, dtype=np.int64), sum(self.counts)
        for models, asked in mix.named:
            able = [self.ids[m] for m in set(models) if m in self.ids]
            if able:
                prices[able] += 1000 * asked * every // (mix.gpus * sum(self.counts[m] for m in able))
        self._prices = (mix, prices)
        return prices


class Capacity:
    """What is free on every node, in the order in which they joined.

    Plain lists are the ledger, since facts arrive one by one; the arrays follow when somebody asks.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: dict[str, int] = {}
        self._models: list[tuple[str, ...]] = []
        self._free: list[list[int]] = []  # a list is replaced, never changed: copies share it
        self._cpu: list[int] = []
        self._memory: list[int] = []
        self._size: list[tuple[int, int]] = []  # milli-GPU and milli-cores, when all is free
        self._dirty: set[int] = set()
        self._arrays = np.zeros((4, 0), dtype=np.int64)  # CPU, memory, idle milli-GPU, whole idle GPUs
        self._gpus = np.zeros((0, 0), dtype=np.int64)
        self._kinds: _Models | None = None

    def row(self, name: str) -> int:
        return self._rows[name]

    def join(self, name: str, models: Sequence[str], cpu: int, memory: int) -> None:
        """Declare a node, or declare it anew: all that it has is free."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self.names)
            self.names.append(name)
            for ledger in (self._models, self._free, self._cpu, self._memory, self._size):
                ledger.append(None)  # type: ignore[arg-type]
        if self._models[row] != tuple(models):
            self._models[row] = tuple(models)
            self._kinds = None
        self._free[row] = [WHOLE] * len(models)
        self._cpu[row], self._memory[row] = cpu, memory
        self._size[row] = (WHOLE * len(models), cpu)
        self._dirty.add(row)

    def take(self, name: str, gpus: Sequence[int], milli: int, cpu: int, memory: int) -> None:
        """These GPUs, by their index on the node, `milli` of each."""
        row = self._rows[name]
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
        row = self._rows[name]
        return self._free[row], self._cpu[row], self._memory[row]

    def holds(self, name: str, cpu: int, memory: int) -> bool:
        """Whether the node has that many cores and that much memory left."""
        row = self._rows[name]
        return self._cpu[row] >= cpu and self._memory[row] >= memory

    def copy(self) -> Capacity:
        """One to try things on."""
        self.sync()
        other = Capacity()
        other.names, other._rows = self.names.copy(), self._rows.copy()
        other._models, other._free, other._size = self._models.copy(), self._free.copy(), self._size.copy()
        other._cpu, other._memory = self._cpu.copy(), self._memory.copy()
        other._arrays, other._gpus, other._kinds = self._arrays.copy(), self._gpus.copy(), self._kinds
        return other

    def sync(self) -> _Models:
        """Bring the arrays up to the ledger."""
        kinds = self._kinds
        if kinds is None:
            width, nodes = max(map(len, self._models), default=0), len(self.names)
            self._kinds = kinds = _Models(self._models, width)
            self._arrays = np.zeros((4, nodes), dtype=np.int64)
            self._gpus = np.full((width, nodes), ABSENT, dtype=np.int64)
            self._dirty.update(range(nodes))
        if self._dirty:
            rows = sorted(self._dirty)
            self._dirty.clear()
            width = len(self._gpus)
            frees = [self._free[row] for row in rows]
            self._gpus[:, rows] = np.array([free + [ABSENT] * (width - len(free)) for free in frees]).T
            self._arrays[:, rows] = [
                [self._cpu[row] for row in rows],
                [self._memory[row] for row in rows],
                [sum(free) for free in frees],
                [free.count(WHOLE) for free in frees],
            ]
        return kinds

    def fits(self, demand: Demand, usable: Bools) -> tuple[Ints, Bools]:
        """Rows that could hold one share now, and which of their GPUs are able to."""
        kinds = self.sync()
        cpu, memory, idle, whole = self._arrays
        fits = usable & (cpu >= demand.cpu) & (memory >= demand.memory)
        if not demand.gpus:
            rows = fits.nonzero()[0]
            return rows, np.zeros((0, len(rows)), dtype=np.bool_)
        able, count = kinds.accepted(demand.models)
        fits &= (count >= demand.gpus) & (idle >= demand.gpus * demand.milli)
        if demand.milli == WHOLE:
            fits &= whole >= demand.gpus
        rows = fits.nonzero()[0]
        if rows.size:
            able = able[:, rows] & (self._gpus[:, rows] >= demand.milli)
            enough = able.sum(axis=0) >= demand.gpus
            rows, able = rows[enough], able[:, enough]
        return rows, able

    def costs(self, demand: Demand, rows: Ints, able: Bools, mix: Mix) -> tuple[Ints, Ints]:
        """What one share on each of these rows would cost, and how much it would leave."""
        kinds, taken = self.sync(), demand.gpus * demand.milli
        cpu, _, idle, _ = self._arrays[:, rows]
        cpu_after, idle_after = cpu - demand.cpu, idle - taken
        # Everything times `kept`, so that nothing is divided.
        kept = max(1, mix.cpu * WHOLE * CPU_KEPT[0] // (max(1, mix.gpus) * CPU_KEPT[1]))
        costs = np.zeros(len(rows), dtype=np.int64)
        if mix.cpu:
            costs += np.maximum(idle_after * kept - cpu_after * WHOLE, 0)
            costs -= np.maximum(idle * kept - cpu * WHOLE, 0)
            costs *= SPLINTERED[1] * WHOLE
        if demand.gpus:
            keys = np.where(able, (kinds.prices(mix)[kinds.of[:, rows]] << PRICE_BITS) + self._gpus[:, rows], NO_GPU)
            first = keys.min(axis=0)[None] if demand.gpus == 1 else np.sort(keys, axis=0)[: demand.gpus]
            broken = (first & ((1 << PRICE_BITS) - 1) == WHOLE).sum(axis=0)
            costs += (broken * WHOLE - taken) * (kept * WHOLE)
            costs += (first >> PRICE_BITS).sum(axis=0) * (SCARCE[0] * kept * demand.milli)
        gpus, cores = (max(1, sum(column)) for column in zip(*self._size, strict=True))
        return costs, idle_after * cores + cpu_after * gpus

    def pick(self, demand: Demand, row: int, mix: Mix) -> tuple[int, ...]:
        """The share's GPUs on this node: cheap models first, then the most used, then the first."""
        kinds = self.sync()
        prices, free, models = kinds.prices(mix), self._free[row], self._models[row]
        able = [
            (int(prices[kinds.ids[model]]), free[gpu], gpu)
            for gpu, model in enumerate(models)
            if free[gpu] >= demand.milli and (not demand.models or model in demand.models)
        ]
        return tuple(sorted(gpu for _, _, gpu in sorted(able)[: demand.gpus]))


def fitting(capacity: Capacity, demand: Demand, usable: Bools) -> Bools:
    """Which nodes could hold one share of the demand now."""
    result = np.zeros(len(capacity.names), dtype=np.bool_)
    result[capacity.fits(demand, usable)[0]] = True
    return result


def choose(capacity: Capacity, demand: Demand, usable: Bools, mix: Mix) -> tuple[int, tuple[int, ...]] | None:
    """The best node for one share, as row and GPU indices, or None."""
    chosen = choose_all(capacity, demand._replace(nodes=1), usable, mix)
    return chosen[0] if chosen else None


def choose_all(
    capacity: Capacity, demand: Demand, usable: Bools, mix: Mix
) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """The best nodes for the whole gang, best first, or None: the same as to choose again and again."""
    rows, able = capacity.fits(demand, usable)
    if len(rows) < demand.nodes:
        return None
    costs, left = capacity.costs(demand, rows, able, mix)
    if demand.nodes == 1:
        cheapest = (costs == costs.min()).nonzero()[0]
        best: Any = cheapest[left[cheapest].argmin()][None]
    else:
        best = np.lexsort((left, costs))[: demand.nodes]
    return tuple((int(row), capacity.pick(demand, int(row), mix)) for row in rows[best])
