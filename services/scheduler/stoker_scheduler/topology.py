"""Which nodes are near each other: domains by node labels, from the narrowest level to the widest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .fragments import Bools
from .state import State


@dataclass(frozen=True)
class Topology:
    """By level: each row's domain, -1 where a node lacks the label. Rows are those of the capacity."""

    names: tuple[str, ...]
    domains: dict[str, NDArray[np.int64]]
    ready: Bools
    suspect: Bools

    @classmethod
    def of(cls, state: State) -> Topology:
        names = state.capacity.names
        levels = state.cluster.topology
        domains = {level: np.full(len(names), -1, dtype=np.int64) for level in levels}
        known: dict[tuple[str, ...], int] = {}
        ready = np.zeros(len(names), dtype=np.bool_)
        suspect = np.zeros(len(names), dtype=np.bool_)
        for row, name in enumerate(names):
            node = state.nodes[name]
            ready[row] = node.takes_work and not node.suspect
            suspect[row] = node.takes_work and node.suspect
            labels = node.labels | state.cluster.labels.get(name, {})
            path: tuple[str, ...] = ()
            for level in levels:
                if level not in labels:
                    break
                path = (*path, level, labels[level])
                domains[level][row] = known.setdefault(path, len(known))
        return cls(tuple(names), domains, ready, suspect)

    def groups(self, level: str, among: Bools) -> list[tuple[int, int]]:
        """Domains of the level by (rows among these, domain), smallest first."""
        found = self.domains.get(level)
        if found is None:
            return []
        ids, counts = np.unique(found[among & (found >= 0)], return_counts=True)
        return sorted((int(count), int(domain)) for domain, count in zip(ids, counts, strict=True))

    def rows(self, level: str, domain: int) -> Bools:
        result: Bools = self.domains[level] == domain
        return result
