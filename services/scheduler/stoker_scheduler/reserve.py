"""Keeping GPUs for blocked gangs: which ones, and from when on they will all be free.

Small jobs would keep a large gang waiting for ever, since single GPUs free up all the time and whole nodes do not. So
the first blocked gangs of a GPU model get a claim on the GPUs that will be free together first; later jobs may use
them only as long as they will be gone by then. What has no time limit counts as endless.
"""

from __future__ import annotations

from stoker_proto import Allocation

from .board import ENDLESS, Board
from .fragments import Bools
from .gang import domains
from .placement import Demand
from .state import Attempt, Claim, Job, Node
from .victims import grace_ms

RELEASE_MS = 5_000  # from the kill to the proof of release, as a launcher needs it


class Forecast:
    """When what is held will be free again, in one pass."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._until: dict[tuple[str, str], int] = {}
        self._order: dict[str, list[tuple[int, int, str, str]]] = {}
        self._leaving: dict[str, list[tuple[int, int, int]]] = {}
        self._given: int | None = None

    def _see(self) -> None:
        """Who holds what, and what this pass has given out since it was seen last."""
        board = self.board
        if self._given is None:
            self._given = 0
            for job_id in board.state.active:
                job = board.state.jobs[job_id]
                if job.attempt is not None:
                    ends = ends_ms(board, job, job.attempt)
                    for part in job.attempt.parts:
                        if part.released_ms is None:
                            self._holds(part.allocation, ends)
        for job, allocation in board.given[self._given :]:
            self._holds(allocation, gone_by(board, job))
        self._given = len(board.given)

    def _holds(self, held: Allocation, ends: int) -> None:
        self._order.pop(held.node, None)
        self._leaving.setdefault(held.node, []).append((ends, held.cpu_milli, held.memory_mib))
        for gpu in held.gpus:
            self._until[held.node, gpu] = max(self._until.get((held.node, gpu), 0), ends)

    def until(self, node: str, uuid: str) -> int:
        """When the GPU is free: 0 when it is, ENDLESS when nobody can say."""
        return self._until.get((node, uuid), 0)

    def _gpus(self, node: Node) -> list[tuple[int, int, str, str]]:
        """When each GPU of the node is free, the first one first: with its index, uuid and model."""
        found = self._order.get(node.name)
        if found is None:
            found = sorted((self.until(node.name, gpu.uuid), gpu.index, gpu.uuid, gpu.model) for gpu in node.gpus)
            self._order[node.name] = found
        return found

    def _host_until(self, node: str, demand: Demand) -> int:
        """When so many cores and so much memory are free there."""
        _, cpu, memory = self.board.capacity.left(node)
        if cpu >= demand.cpu and memory >= demand.memory:
            return 0
        until = 0
        for ends, more_cpu, more_memory in sorted(self._leaving.get(node, ())):
            if cpu >= demand.cpu and memory >= demand.memory:
                break
            cpu, memory, until = cpu + more_cpu, memory + more_memory, ends
        return until if cpu >= demand.cpu and memory >= demand.memory else ENDLESS

    def claim(self, job: Job, usable: Bools, seq: int) -> Claim | None:
        """The GPUs that will be free together first, for the whole gang. Ties: more free now, then node order."""
        self._see()
        rows = usable & self.board.topology.ready
        best: tuple[int, int, tuple[Allocation, ...]] | None = None
        within = job.spec.compute.within
        for among in domains(self.board.topology, rows, job.demand.nodes, within) if within else (rows,):
            found = self._among(job, among & rows)
            if found is not None and (best is None or found[:2] < best[:2]):
                best = found
        if best is None:
            return None
        starts = best[0]
        return Claim(job.id, seq, "reserve", best[2], None if starts >= ENDLESS else starts)

    def _among(self, job: Job, rows: Bools) -> tuple[int, int, tuple[Allocation, ...]] | None:
        board, demand = self.board, job.demand
        asked, models = demand.gpus, demand.models
        found: list[tuple[int, int, list[tuple[int, int, str, str]]]] = []
        claimed = {name for name, _ in board.claimed}
        for row in rows.nonzero()[0].tolist():
            node = board.state.nodes[board.topology.names[row]]
            if node.cpu_milli < demand.cpu or node.memory_mib < demand.memory:
                continue
            gpus = self._gpus(node)
            if models:
                gpus = [gpu for gpu in gpus if gpu[3] in models]
            if node.name in claimed:
                gpus = [gpu for gpu in gpus if (node.name, gpu[2]) not in board.claimed]
            if len(gpus) >= asked:
                found.append((max(gpus[asked - 1][0], self._host_until(node.name, demand)), row, gpus))
        if len(found) < demand.nodes:
            return None
        last = sorted([starts for starts, _, _ in found])[demand.nodes - 1]
        offers = sorted(
            (starts, sum([gpu[0] > 0 for gpu in gpus[:asked]]), row, tuple([gpu[2] for gpu in gpus[:asked]]))
            for starts, row, gpus in found
            if starts <= last
        )
        taken = sorted(offers[: demand.nodes], key=lambda offer: offer[2])
        made = []
        for rank, (_, _, row, uuids) in enumerate(taken):
            node = board.state.nodes[board.topology.names[row]]
            made.append(
                Allocation(
                    node=node.name, boot_epoch=node.boot_epoch, gpus=uuids, node_rank=rank, milli=demand.milli,
                    cpu_milli=demand.cpu, memory_mib=demand.memory,
                )
            )  # fmt: skip
        return max(o[0] for o in taken), sum(o[1] for o in taken), tuple(made)


def ends_ms(board: Board, job: Job, attempt: Attempt) -> int:
    """When the attempt will have given its GPUs back, at the latest; ENDLESS without a limit."""
    if attempt.stop is not None:
        return max(attempt.stop_ms + attempt.grace_ms, board.now_ms) + RELEASE_MS
    limit = limit_ms(job)
    if limit is None:
        return ENDLESS
    began = attempt.running_ms if attempt.running_ms is not None else board.now_ms
    return max(began + limit, board.now_ms) + grace_ms(board, job) + RELEASE_MS


def limit_ms(job: Job) -> int | None:
    """How long one attempt may run."""
    minutes = job.spec.limits.timeout_minutes
    return None if minutes is None else int(minutes * 60_000)


def gone_by(board: Board, job: Job) -> int:
    """When the job would have given its GPUs back, were it placed now."""
    limit = limit_ms(job)
    return ENDLESS if limit is None else board.now_ms + limit + grace_ms(board, job) + RELEASE_MS
