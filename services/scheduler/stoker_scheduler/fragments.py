"""When idle GPU is useless: what placement adds as little to as it can.

Idle GPU is *stranded* when its node has too little CPU left for what GPUs are asked for with; *broken* for those who
need more whole GPUs than its node has left; and *splintered* when it is the rest of a GPU of which a part is taken. A
model that others ask for by name is *scarce*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WHOLE = 1000

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Measured with benchmarks/placement.py. Half or twice of the last two changes little there; more than 0.85 of the first
# breaks up nodes that gangs need. Broken GPU counts as much as stranded GPU, for each who cannot use it.
CPU_KEPT = (4, 5)  # of the mean CPU per GPU asked for: idle GPU with less is stranded
SPLINTERED = (1, 4)  # of what a stranded milli-GPU counts
SCARCE = (3, 4)  # likewise, at price 1
# Bounds that keep every cost within 64 bits, far beyond what clusters are like.
MOST_KEPT = 1_000_000  # milli-cores for each GPU
MOST_PRICE = 10_000


class Shape(NamedTuple):
    """What is asked for on one node, as far as it matters to where others go."""

    gpus: int
    milli: int
    cpu: int
    models: tuple[str, ...]


class Mix(NamedTuple):
    """What is asked for lately, in all."""

    gpus: int = 0  # milli-GPU
    cpu: int = 0  # milli-cores, by those who ask for GPUs
    named: tuple[tuple[tuple[str, ...], int], ...] = ()  # milli-GPU that must be of one of these models
    shares: int = 0  # how many ask for GPUs of a node
    several: tuple[tuple[int, int], ...] = ()  # and how many of them for so many whole ones, two or more

    @classmethod
    def of(cls, counts: Mapping[Shape, int]) -> Mix:
        gpus = cpu = shares = 0
        named: dict[tuple[str, ...], int] = {}
        several: dict[int, int] = {}
        for shape, count in counts.items():
            asked = shape.gpus * shape.milli * count
            if asked:
                gpus += asked
                cpu += shape.cpu * count
                shares += count
                if shape.gpus > 1 and shape.milli == WHOLE:
                    several[shape.gpus] = several.get(shape.gpus, 0) + count
                if shape.models:
                    models = tuple(sorted(set(shape.models)))
                    named[models] = named.get(models, 0) + asked
        return cls(gpus, cpu, tuple(sorted(named.items())), shares, tuple(sorted(several.items())))

    @property
    def kept(self) -> int:
        """Milli-cores that must be left for each idle GPU."""
        return min(MOST_KEPT, self.cpu * WHOLE * CPU_KEPT[0] // (max(1, self.gpus) * CPU_KEPT[1]))

    def broken(self, most: int) -> list[int]:
        """How many in a thousand need more whole GPUs of a node than none, one, ... and the most that there are."""
        return [
            1000 * sum(count for gpus, count in self.several if gpus > whole) // max(1, self.shares)
            for whole in range(most + 1)
        ]

    def prices(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Of each model, in thousandths, given how many GPUs there are of each.

        1 is the price when all GPUs of the model would be asked for by name if as much were asked for as there is.
        """
        prices, every = dict.fromkeys(counts, 0), sum(counts.values())
        for models, asked in self.named:
            able = [model for model in models if counts.get(model)]
            for model in able:
                prices[model] += 1000 * asked * every // (self.gpus * sum(counts[m] for m in able))
        return {model: min(MOST_PRICE, price) for model, price in prices.items()}


def stranded(idle: Ints, cpu: Ints, kept: int) -> Ints:
    """Milli-GPU without CPU, times `kept`: nothing is divided, so nothing is rounded."""
    result: Ints = np.maximum(idle * kept - cpu * WHOLE, 0)
    return result
