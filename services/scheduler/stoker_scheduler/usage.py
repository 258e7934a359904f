"""What queues hold and have held: the quota ledger, kept in step with allocations, at every level of the tree.

Whole numbers only. Past usage loses half its weight in every half-life; between the halvings it falls in a straight
line, so that every process computes the same number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

ALL = ""  # the key for all models together
PATH_END = 32


class Past:
    """GPU time used, as it counts now: thousandths of a GPU times milliseconds."""

    __slots__ = ("at_ms", "value")

    def __init__(self, value: int = 0, at_ms: int = 0) -> None:
        self.value = value
        self.at_ms = at_ms

    def at(self, now_ms: int, half_life_ms: int) -> int:
        halvings, rest = divmod(max(0, now_ms - self.at_ms), half_life_ms)
        value = self.value >> min(halvings, 200)
        return value - value * rest // (2 * half_life_ms)

    def add(self, amount: int, now_ms: int, half_life_ms: int) -> None:
        self.value = self.at(now_ms, half_life_ms) + amount
        self.at_ms = max(self.at_ms, now_ms)


class Usage:
    """By queue: thousandths of GPUs held by model, the part of it that is not preemptible, and the past."""

    def __init__(self, parents: Mapping[str, str | None] | None = None) -> None:
        self._parents: dict[str, str | None] = dict(parents or {})
        self._paths: dict[str, list[str]] = {}
        self.held: dict[str, dict[str, int]] = {}
        self.firm: dict[str, dict[str, int]] = {}
        self.active: dict[str, int] = {}
        self.past: dict[str, Past] = {}

    def path(self, queue: str) -> list[str]:
        """The queue and what is above it."""
        known = self._paths.get(queue)
        if known is not None:
            return known
        path = self._paths[queue] = [queue]
        above = self._parents.get(queue)
        while above is not None and len(path) < PATH_END:
            path.append(above)
            above = self._parents.get(above)
        return path

    def of(self, queue: str, model: str = ALL) -> int:
        held = self.held.get(queue)
        return held.get(model, 0) if held else 0

    def firm_of(self, queue: str, model: str = ALL) -> int:
        held = self.firm.get(queue)
        return held.get(model, 0) if held else 0

    def add(
        self, queue: str, charge: Iterable[tuple[str, int]], *, firm: bool, sign: int = 1,
        but: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Charge GPUs by model to a queue and all above it; `sign` -1 gives them back.

        Queues in `but` are charged already, by somebody who has to go first; what is not preemptible counts all the
        same.
        """
        charge = tuple(charge)
        total = sum(milli for _, milli in charge)
        for name in self.path(queue):
            ledgers = [self.firm] if firm else []
            if name not in but:
                ledgers.append(self.held)
            for ledger in ledgers:
                held = ledger.get(name)
                if held is None:
                    held = ledger[name] = {ALL: 0}
                held[ALL] += sign * total
                for model, milli in charge:
                    held[model] = held.get(model, 0) + sign * milli

    def count(self, queue: str, change: int) -> None:
        for name in self.path(queue):
            self.active[name] = self.active.get(name, 0) + change

    def spent(self, queue: str, amount: int, now_ms: int, half_life_ms: int) -> None:
        for name in self.path(queue):
            past = self.past.get(name)
            if past is None:
                past = self.past[name] = Past()
            past.add(amount, now_ms, half_life_ms)

    def past_of(self, queue: str, now_ms: int, half_life_ms: int) -> int:
        past = self.past.get(queue)
        return past.at(now_ms, half_life_ms) if past else 0

    def copy(self) -> Usage:
        """One to add to without touching this one; the past is shared, since a pass only reads it."""
        other = Usage(self._parents)
        other.held = {queue: dict(held) for queue, held in self.held.items()}
        other.firm = {queue: dict(held) for queue, held in self.firm.items()}
        other.active = dict(self.active)
        other.past = self.past
        return other

    def listing(self) -> list[object]:
        return [
            [(q, sorted((m, n) for m, n in held.items() if n)) for q, held in sorted(self.held.items()) if held[ALL]],
            [(q, sorted((m, n) for m, n in held.items() if n)) for q, held in sorted(self.firm.items()) if held[ALL]],
            [(q, n) for q, n in sorted(self.active.items()) if n],
            [(q, p.value, p.at_ms) for q, p in sorted(self.past.items())],
        ]
