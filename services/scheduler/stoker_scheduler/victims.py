"""Whom to preempt: jobs of a lower class in the same queue, or jobs of queues that have borrowed, and the fewest.

Only when all of the gang can be placed by it; else nobody. Protected are jobs that may not be preempted by their
class, were preempted as often as a job may be, have not run long enough, or have not yet saved their first checkpoint.
Borrowers give back first, then the lowest class. Among equal choices fewer jobs are better than more, and then those
that lose the least: GPU time since their last durable checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import combinations

from stoker_proto import Allocation, PreemptRule

from .board import Board
from .eligible import Eligible, key_of
from .fragments import WHOLE, Bools
from .gang import domains
from .offers import Cost, Offer, Offers, Victim, cost_of
from .placement import fitting
from .quota import refusal
from .rights import Group
from .state import Claim, Job
from .usage import ALL


@dataclass(frozen=True)
class Eviction:
    """Whom to stop, and the claim that is put on what that frees."""

    victims: tuple[Victim, ...]
    claim: Claim


class Hunt:
    """Finds evictions in one pass; what it learns about active jobs serves all preemptors of the pass."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.eligible = Eligible(board)

    def evict(self, job: Job, groups: dict[Group, tuple[PreemptRule, int]], usable: Bools, seq: int) -> Eviction | None:
        """The cheapest eviction from these that makes room for the whole gang, or None. The board is left as it was."""
        if not groups:
            return None
        victims = self.eligible.by_row(groups)
        if not victims:
            return None
        tiers = sorted({v.tier for found in victims.values() for v in found})
        usable = usable & (self.board.topology.ready | self.board.topology.suspect)
        for tier in tiers:
            allowed = victims
            if tier != tiers[-1]:
                allowed = {row: [v for v in found if v.tier <= tier] for row, found in victims.items()}
            chosen = self._choose(job, usable, allowed)
            if chosen is None:
                continue
            spots, picked = chosen
            picked = self._prune(job, spots, picked)
            picked = self._enough_quota(job, picked, [v for found in allowed.values() for v in found])
            if not picked:
                return None
            made = self._claim(job, spots, picked, seq)
            if made is not None:
                return Eviction(tuple(sorted(picked, key=key_of)), made)
        return None

    def _room(self, row: int, picked: tuple[Victim, ...] | list[Victim]) -> tuple[list[int], int, int]:
        """What the node would have with these gone and all that is stopping gone."""
        board = self.board
        name = board.topology.names[row]
        free, cpu, memory = board.capacity.left(name)
        room = list(free)
        going = list(self.eligible.coming.get(row, ()))
        for victim in picked:
            going += [p.allocation for p in victim.attempt.parts if p.allocation.node == name and p.released_ms is None]
        at = board.state.at[name]
        for allocation in going:
            cpu += allocation.cpu_milli
            memory += allocation.memory_mib
            for uuid in allocation.gpus:
                if (name, uuid) not in board.claimed:
                    room[at[uuid]] += allocation.milli
        return room, cpu, memory

    def _gpus(self, job: Job, row: int, picked: tuple[Victim, ...] | list[Victim]) -> tuple[int, ...] | None:
        """GPUs of the node for one share of the gang, those that are free already first."""
        demand = job.demand
        room, cpu, memory = self._room(row, picked)
        if cpu < demand.cpu or memory < demand.memory:
            return None
        name = self.board.topology.names[row]
        node = self.board.state.nodes[name]
        free, _, _ = self.board.capacity.left(name)
        able = [
            gpu
            for gpu in range(len(room))
            if room[gpu] >= demand.milli and (not demand.models or node.gpus[gpu].model in demand.models)
            and (name, node.gpus[gpu].uuid) not in self.board.claimed
        ]  # fmt: skip
        if len(able) < demand.gpus:
            return None
        able.sort(key=lambda gpu: (free[gpu] < demand.milli, room[gpu] if demand.milli < WHOLE else 0, gpu))
        return tuple(sorted(able[: demand.gpus]))

    def _choose(
        self, job: Job, usable: Bools, victims: dict[int, list[Victim]]
    ) -> tuple[dict[int, tuple[int, ...]], list[Victim]] | None:
        best: tuple[Cost, dict[int, tuple[int, ...]], list[Victim]] | None = None
        within = job.spec.compute.within
        for rows in domains(self.board.topology, usable, job.demand.nodes, within) if within else (usable,):
            found = self._choose_among(job, rows & usable, victims)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        return None if best is None else (best[1], best[2])

    def _choose_among(
        self, job: Job, rows: Bools, victims: dict[int, list[Victim]]
    ) -> tuple[Cost, dict[int, tuple[int, ...]], list[Victim]] | None:
        """Node after node, each time the one where one more share costs the least."""
        free = fitting(self.board.capacity, job.demand._replace(nodes=1), rows)
        worth = {int(row) for row in free.nonzero()[0]}
        worth.update(row for row in (*victims, *self.eligible.coming) if rows[row])
        offers = Offers(sorted(worth), victims, partial(self._fewest, job), partial(self._offer, job))
        picked: list[Victim] = []
        spots: dict[int, tuple[int, ...]] = {}
        while len(spots) < job.demand.nodes:
            offer = offers.cheapest(picked)
            if offer is None:
                return None
            spots[offer.row] = offer.gpus
            picked += offer.more
            offers.take(offer, picked)
        return cost_of(picked), spots, picked

    def _fewest(self, job: Job, row: int, others: list[Victim], picked: list[Victim]) -> int | None:
        """How many victims the node needs at least; None when all of them are not enough."""
        need = job.demand.gpus - self._able(job, row, picked)
        if need <= 0:
            return 0
        for size, freed in enumerate(sorted([v.held[row] for v in others], reverse=True), 1):
            need -= freed
            if need <= 0:
                return size
        return None

    def _able(self, job: Job, row: int, picked: list[Victim]) -> int:
        models, milli = job.demand.models, job.demand.milli
        name = self.board.topology.names[row]
        if row in self.eligible.coming or any(row in v.held for v in picked):
            room, _, _ = self._room(row, picked)
        else:
            room, _, _ = self.board.capacity.left(name)
            if max(room, default=0) < milli:
                return 0
        gpus = self.board.state.nodes[name].gpus
        return sum(r >= milli and (not models or g.model in models) for r, g in zip(room, gpus, strict=True))

    def _offer(self, job: Job, row: int, size: int, others: list[Victim], picked: list[Victim]) -> Offer | None:
        """The cheapest so many victims on the node that make room for one share."""
        alike = len({v.held[row] for v in others}) <= 1
        best: Offer | None = None
        for more in combinations(others, size):
            cost = cost_of(more)
            if best is not None and cost >= best.cost:
                continue
            gpus = self._gpus(job, row, [*picked, *more])
            if gpus is not None:
                best = Offer(cost, row, list(more), gpus)
                if alike:  # cheapest first, and any so many of them free as much
                    break
        return best

    def _prune(self, job: Job, spots: dict[int, tuple[int, ...]], picked: list[Victim]) -> list[Victim]:
        """Leave out, dearest first, whoever is not needed after all."""
        for victim in sorted(picked, key=key_of, reverse=True):
            without = [v for v in picked if v is not victim]
            if all(self._gpus(job, row, without) is not None for row in spots):
                picked = without
        return picked

    def _enough_quota(self, job: Job, picked: list[Victim], others: list[Victim]) -> list[Victim]:
        """With more victims, if the queue may take the gang only when they are gone; [] when not even then."""
        board = self.board
        usage = board.usage.copy()

        def gone(victim: Victim, sign: int) -> None:
            firm = not board.class_of(victim.job).preemptible
            for part in victim.attempt.parts:
                if part.released_ms is None:
                    usage.add(victim.job.queue, part.charge, firm=firm, sign=sign)

        def refused() -> bool:
            return refusal(board.tree, usage, board.totals, job.queue, board.class_of(job), asked) is not None

        asked = [(ALL, job.milli)] + ([(job.demand.models[0], job.milli)] if len(job.demand.models) == 1 else [])
        for victim in picked:
            gone(victim, -1)
        if not refused():
            return picked
        picked = list(picked)
        known = {v.job.id for v in picked}
        for victim in sorted({v.job.id: v for v in others}.values(), key=key_of):
            if victim.job.id not in known and victim.rule == "higher_class":
                gone(victim, -1)
                picked.append(victim)
                if not refused():
                    return picked
        return []

    def _claim(self, job: Job, spots: dict[int, tuple[int, ...]], picked: list[Victim], seq: int) -> Claim | None:
        board = self.board
        allocations = []
        for rank, row in enumerate(sorted(spots)):
            gpus = self._gpus(job, row, picked)
            if gpus is None:
                return None
            node = board.state.nodes[board.topology.names[row]]
            allocations.append(
                Allocation(
                    node=node.name, boot_epoch=node.boot_epoch, gpus=tuple(node.gpus[g].uuid for g in gpus),
                    node_rank=rank, milli=job.demand.milli, cpu_milli=job.demand.cpu, memory_mib=job.demand.memory,
                )
            )  # fmt: skip
        grace = max((grace_ms(board, v.job) for v in picked), default=0)
        return Claim(job.id, seq, "preempt", tuple(allocations), board.now_ms + grace)


def grace_ms(board: Board, job: Job) -> int:
    """From the checkpoint signal to the kill: what the job asks for, at most what its class allows."""
    own = int(job.spec.limits.grace_seconds * 1000)
    allowed = board.class_of(job).grace_seconds
    return own if allowed is None else min(own, int(allowed * 1000))
