"""Which shapes are asked for lately: what placement keeps room for."""

from __future__ import annotations

from .fragments import Mix, Shape

FADES_AT = 16_384  # node shares counted, until the older half of their weight goes
FIRST = 64


class Popular:
    """Counts shapes as jobs are submitted. The mix is renewed rarely, since all costs depend on it."""

    def __init__(self) -> None:
        self.counts: dict[Shape, int] = {}
        self.mix = Mix()
        self.total = 0
        self.renew_at = 1

    def add(self, shape: Shape, nodes: int) -> None:
        self.counts[shape] = self.counts.get(shape, 0) + nodes
        self.total += nodes
        if self.total >= FADES_AT:
            self.counts = {s: n // 2 for s, n in self.counts.items() if n > 1}
            self.total = sum(self.counts.values())
            self.renew_at = 0
        if self.total >= self.renew_at:
            self.mix = Mix.of(self.counts)
            self.renew_at = max(FIRST, self.total + self.total // 4)

    def listing(self) -> list[object]:
        return [list(self.counts.items()), self.mix, self.total, self.renew_at]
