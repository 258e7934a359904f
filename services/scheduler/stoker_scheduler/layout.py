"""What follows from nodes and configuration alone, kept as long as neither changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from .placement import Demand
from .quota import Tree
from .state import Node, State
from .topology import Topology
from .usage import ALL


@dataclass(frozen=True)
class Layout:
    """Queues ready to be asked, domains, GPUs to share by model, and nodes whose GPUs count only while in use."""

    version: int
    tree: Tree
    topology: Topology
    working: dict[str, int]
    cordoned: tuple[str, ...]
    nodes: tuple[Node, ...]
    kinds: tuple[tuple[int, ...], ...]  # rows of nodes of one size and the same GPUs
    _able: dict[Demand, tuple[Node, ...]] = field(default_factory=dict, repr=False, compare=False)
    _same: dict[tuple[int, ...], tuple[Node, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, state: State) -> Layout:
        working = {ALL: 0}
        cordoned = []
        for node in state.nodes.values():
            if not node.takes_work:
                cordoned.append(node.name)
                continue
            for gpu in node.gpus:
                working[ALL] += 1000
                working[gpu.model] = working.get(gpu.model, 0) + 1000
        return cls(
            state.layout,
            Tree.of(state.cluster),
            Topology.of(state),
            working,
            tuple(cordoned),
            tuple(state.nodes.values()),
            _kinds(state),
        )

    def able(self, demand: Demand) -> tuple[Node, ...]:
        """Nodes that could hold one share when they are empty: the same tuple for all demands that have the same."""
        demand = demand._replace(nodes=1)
        found = self._able.get(demand)
        if found is None:
            kinds = tuple(at for at, rows in enumerate(self.kinds) if whole(self.nodes[rows[0]], demand))
            found = self._same.get(kinds)
            if found is None:
                rows = sorted(row for at in kinds for row in self.kinds[at])
                found = self._same[kinds] = tuple(self.nodes[row] for row in rows)
            self._able[demand] = found
        return found

    def totals(self, state: State) -> dict[str, int]:
        """GPUs there are to share, by model: those that take work, and those in use on nodes that take none."""
        found = dict(self.working)
        for name in self.cordoned:
            owner = state.owner[name]
            for gpu in state.nodes[name].gpus if owner else ():
                held = sum(owner.get(gpu.uuid, {}).values())
                if held:
                    found[ALL] += held
                    found[gpu.model] = found.get(gpu.model, 0) + held
        return found


def _kinds(state: State) -> tuple[tuple[int, ...], ...]:
    found: dict[object, list[int]] = {}
    for row, node in enumerate(state.nodes.values()):
        models = tuple([gpu.model for gpu in node.gpus])
        found.setdefault((models, node.cpu_milli, node.memory_mib), []).append(row)
    return tuple(tuple(rows) for rows in found.values())


def whole(node: Node, demand: Demand) -> bool:
    """Whether the node could hold one share when it is empty."""
    if node.cpu_milli < demand.cpu or node.memory_mib < demand.memory or len(node.gpus) < demand.gpus:
        return False
    return not demand.models or sum(gpu.model in demand.models for gpu in node.gpus) >= demand.gpus


class Layouts:
    """The newest layout."""

    def __init__(self) -> None:
        self._known: Layout | None = None

    def of(self, state: State) -> Layout:
        if self._known is None or self._known.version != state.layout:
            self._known = Layout.of(state)
        return self._known
