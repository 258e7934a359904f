"""Starting jobs on what is free: which GPUs, and whether their nodes are to be tested first."""

from __future__ import annotations

from stoker_proto import Allocation, Place

from . import gang
from .board import Board, Pass, Timing
from .quota import Refusal
from .state import Claim, Job, State


class Starts:
    """Puts jobs on the board's free GPUs, and says so in the pass."""

    def __init__(self, board: Board, out: Pass, timing: Timing) -> None:
        self.board = board
        self.out = out
        self.timing = timing
        self._nowhere: dict[object, int] = {}

    def spots(self, job: Job, models: tuple[str, ...]) -> tuple[gang.Spot, ...] | None:
        """Where the whole gang fits now."""
        board, demand = self.board, job.demand._replace(models=models)
        within, mix = job.spec.compute.within, board.state.popular.mix
        return gang.place(board.capacity, demand, board.topology, board.usable(job), mix, within)

    def allocated(self, job: Job, spots: tuple[gang.Spot, ...]) -> tuple[Allocation, ...]:
        return gang.allocations(self.board.state, self.board.topology, job.demand, spots)

    def put(self, job: Job, claim: Claim | None) -> tuple[bool, Refusal | None]:
        """Start the job, whose own claim is open, on GPUs that are free; else what quota has against it."""
        models, refused = self.board.allowed(job)
        if models is None:
            return False, refused
        # What is free only gets less in a pass, but for claims that are given up: a shape is tried once between those.
        shape = (job.demand, models, job.spec.compute.within, job.exclusions)
        if claim is None and self._nowhere.get(shape) == self.board.freed:
            return False, refused
        spots = self.spots(job, models)
        if spots is None:
            if claim is None:
                self._nowhere[shape] = self.board.freed
            return False, refused
        if claim is not None:
            self.board.drop(job.id)
        chosen = self.allocated(job, spots)
        self.board.take(job, chosen)
        self.start(job, chosen, ())
        return True, None

    def start(self, job: Job, chosen: tuple[Allocation, ...], over: tuple[str, ...]) -> None:
        """Say that the job starts there, on GPUs that are kept for these others too."""
        self.out.allocations += len(chosen)
        nodes = tuple(sorted(a.node for a in chosen))
        fresh = _fresh(self.board.state, nodes, self.board.now_ms, self.timing)
        self.out.actions.append(
            Place(
                job_id=job.id,
                attempt=job.attempts + 1,
                allocations=chosen,
                preflight="fresh" if fresh else "required",
                over=over,
            )
        )


def _fresh(state: State, names: tuple[str, ...], now_ms: int, timing: Timing) -> bool:
    """Whether these nodes passed one test together lately, with nothing found on any of them since."""
    known = state.tested.get(names)
    if known is not None and now_ms - known < timing.fresh_ms:
        return True
    wanted = set(names)
    return any(wanted <= set(nodes) and now_ms - at_ms < timing.fresh_ms for nodes, at_ms in state.tested.items())
