"""How much idle GPU a popular demand could not use: the measure that placement keeps small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WHOLE = 1000
NO_MODEL = -1

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Shape(NamedTuple):
    """The part of a demand that decides which GPUs could serve it."""

    gpus: int
    milli: int
    cpu: int
    models: tuple[str, ...]


class Mix(NamedTuple):
    """Popular shapes and how often each is asked for, per mille of what they stand for."""

    shapes: tuple[Shape, ...] = ()
    weights: tuple[int, ...] = ()

    @classmethod
    def of(cls, counts: Mapping[Shape, int]) -> Mix:
        """The most popular shapes that cover 95 % of all that was asked for."""
        total = sum(counts.values())
        kept: list[tuple[Shape, int]] = []
        covered = 0
        for shape, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            if covered * 100 >= total * 95:
                break
            kept.append((shape, count))
            covered += count
        return cls(tuple(s for s, _ in kept), tuple(max(1, c * 1000 // covered) for _, c in kept))


class Fragments:
    """A mix against known models, as arrays: measures many node states at once."""

    def __init__(self, mix: Mix, models: Mapping[str, int]) -> None:
        self.gpus: Ints = np.array([s.gpus for s in mix.shapes], dtype=np.int64)
        self.milli: Ints = np.array([s.milli for s in mix.shapes], dtype=np.int64)
        self.cpu: Ints = np.array([s.cpu for s in mix.shapes], dtype=np.int64)
        self.weights: Ints = np.array(mix.weights, dtype=np.int64)
        self.accepts: Bools = np.array([accepted(s.models, models) for s in mix.shapes], dtype=np.bool_)

    def measure(self, free: Ints, models: Ints, cpu: Ints) -> Ints:
        """Idle milli-GPU that the mix could not use, times its weights, of each state (states x GPUs)."""
        idle = free.sum(axis=1)
        if not self.weights.size:
            return np.zeros_like(idle)
        large = (free[:, None, :] >= self.milli[None, :, None]) & self.accepts[:, models].transpose(1, 0, 2)
        served = (large.sum(axis=2) >= self.gpus) & (cpu[:, None] >= self.cpu) & (self.gpus > 0)
        used = (large * free[:, None, :]).sum(axis=2) * served
        result: Ints = idle * self.weights.sum() - used @ self.weights
        return result


def accepted(models: tuple[str, ...], known: Mapping[str, int]) -> Bools:
    """One flag a known model, and a last one, always false, for GPUs that are not there."""
    flags = np.full(len(known) + 1, not models, dtype=np.bool_)
    for model in models:
        if model in known:
            flags[known[model]] = True
    flags[-1] = False
    return flags
