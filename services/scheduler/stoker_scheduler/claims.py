"""What a pass keeps for whom: claims made for blocked gangs, given up when dead or outranked, else given back."""

from __future__ import annotations

from stoker_proto import Claim as ClaimAction
from stoker_proto import Place, Unclaim

from .board import Board, Pass
from .explain import gate_reasons, unknown_reasons
from .reserve import Forecast
from .rights import Rights
from .state import Claim, Job


class Claims:
    """The claims of the board, each change with the action that tells it."""

    def __init__(self, board: Board, out: Pass, rights: Rights, forecast: Forecast) -> None:
        self.board = board
        self.out = out
        self.rights = rights
        self.forecast = forecast
        self._reserved: dict[tuple[str, ...], int] = {}

    def check(self) -> None:
        """A claim keeps its nodes as long as all of them work; else the gang looks anew."""
        for claim in list(self.board.claims.values()):
            cause = self._dead(claim)
            if cause is not None:
                self.board.drop(claim.job_id)
                self.out.actions.append(Unclaim(job_id=claim.job_id, cause=cause))
        for claim in self.board.claims.values():
            self.count(claim)

    def _dead(self, claim: Claim) -> str | None:
        state, now_ms = self.board.state, self.board.now_ms
        job = state.jobs[claim.job_id]
        gates = gate_reasons(self.board, job) if job.state == "queued" else ()
        gates = gates or unknown_reasons(self.board, job)
        if gates:
            return gates[0].message
        if claim.until_ms is not None:
            if now_ms >= claim.until_ms:
                return "the node that the gang lost has not come back in time"
            self.out.wait(claim.until_ms)
        for allocation in claim.allocations:
            node = state.nodes.get(allocation.node)
            if node is None or not node.takes_work or node.boot_epoch != allocation.boot_epoch:
                return f"{allocation.node} takes no work now ({node.verdict if node else 'gone'})"
        return None

    def count(self, claim: Claim, change: int = 1) -> None:
        """Only so many gangs of the same GPU models have GPUs kept for them; those that rejoin are not counted."""
        if claim.kind == "reserve" and claim.until_ms is None:
            models = self.board.state.jobs[claim.job_id].demand.models
            self._reserved[models] = self._reserved.get(models, 0) + change

    def still_held(self, claim: Claim) -> bool:
        """Whether others still hold some of what is claimed."""
        return any(self.board.state.held(a.node, uuid) for a in claim.allocations for uuid in a.gpus)

    def drop_outranked(self, job: Job) -> tuple[Claim, ...]:
        """Take from the board the claims that the job may take from."""
        found = self.rights.outranked(job)
        for claim in found:
            self.board.drop(claim.job_id)
        return found

    def restore(self, lesser: tuple[Claim, ...], before: int, job: Job) -> None:
        """Claims that are in the way of what was decided since are given up; the others come back."""
        taken = {
            (allocation.node, uuid)
            for action in self.out.actions[before:]
            if isinstance(action, Place | ClaimAction)
            for allocation in action.allocations
            for uuid in allocation.gpus
        }
        for other in lesser:
            if taken.isdisjoint((a.node, uuid) for a in other.allocations for uuid in a.gpus):
                self.board.claim(other)
                continue
            self.out.actions.insert(before, Unclaim(job_id=other.job_id, cause=f"{job.id} goes first"))
            self.count(other, -1)

    def keep(self, claim: Claim) -> None:
        self.board.claim(claim)
        self.out.allocations += len(claim.allocations)
        self.out.actions.append(
            ClaimAction(job_id=claim.job_id, kind=claim.kind, allocations=claim.allocations, starts_ms=claim.starts_ms)
        )

    def reserve(self, job: Job) -> Claim | None:
        """A claim for a gang that is blocked, while its GPU models have one to give."""
        numbers = self.board.state.cluster.scheduling
        if job.demand.gpus * job.demand.nodes < 2:
            return None
        if self._reserved.get(job.demand.models, 0) >= numbers.reservations:
            return None
        since = job.since_ms + int(numbers.reserve_after_seconds * 1000)
        if since > self.board.now_ms:
            self.out.wait(since)
            return None
        claim = self.forecast.claim(job, self.board.usable(job), self.board.state.seq)
        if claim is not None:
            self.count(claim)
            self.keep(claim)
        return claim
