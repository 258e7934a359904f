"""Where a gang fits: all of its nodes or none, in the narrowest domain that can hold it."""

from __future__ import annotations

from collections.abc import Iterator

from stoker_proto import Allocation

from .fragments import Bools, Mix
from .placement import Capacity, Demand, choose_nodes, fitting
from .state import State
from .topology import Topology

Spot = tuple[int, tuple[int, ...]]


def place(
    capacity: Capacity, demand: Demand, topology: Topology, usable: Bools, mix: Mix, within: str | None = None
) -> tuple[Spot, ...] | None:
    """A row and GPU indices for each node of the gang, or None. Nodes under suspicion come last."""
    trusted = usable & topology.ready
    found = _place(capacity, demand, topology, trusted, mix, within)
    if found is not None:
        return found
    all_rows = usable & (topology.ready | topology.suspect)
    if (all_rows == trusted).all():
        return None
    return _place(capacity, demand, topology, all_rows, mix, within)


def _place(
    capacity: Capacity, demand: Demand, topology: Topology, usable: Bools, mix: Mix, within: str | None
) -> tuple[Spot, ...] | None:
    if demand.nodes == 1:
        return choose_nodes(capacity, demand, usable, mix)
    fits = fitting(capacity, demand, usable)
    if int(fits.sum()) < demand.nodes:
        return None
    for rows in domains(topology, fits, demand.nodes, within):
        spots = choose_nodes(capacity, demand, fits & rows, mix)
        if spots is not None:
            return tuple(sorted(spots))
    return None


def domains(topology: Topology, among: Bools, nodes: int, within: str | None) -> Iterator[Bools]:
    """Sets of rows that could hold so many nodes: narrow domains first, small ones first, at last all rows.

    With `within` only domains of that level or narrower ones.
    """
    levels = list(topology.domains)
    if within is not None:
        levels = levels[levels.index(within) :] if within in levels else []
    for level in reversed(levels):
        for count, domain in topology.groups(level, among):
            if count >= nodes:
                yield topology.rows(level, domain)
    if within is None:
        yield among


def allocations(state: State, topology: Topology, demand: Demand, spots: tuple[Spot, ...]) -> tuple[Allocation, ...]:
    """The gang's allocations, its node ranks in the order of the rows."""
    made = []
    for rank, (row, gpus) in enumerate(spots):
        node = state.nodes[topology.names[row]]
        made.append(
            Allocation(
                node=node.name,
                boot_epoch=node.boot_epoch,
                gpus=tuple(node.gpus[gpu].uuid for gpu in gpus),
                node_rank=rank,
                milli=demand.milli,
                cpu_milli=demand.cpu,
                memory_mib=demand.memory,
            )
        )
    return tuple(made)
