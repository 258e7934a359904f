"""`schedule(state, now_ms)`: one pass over all that waits or runs; decisions and reasons out, nothing touched.

In order: end what has ended and stop what must stop; then go through the queue, and for each job in turn place it, or
keep GPUs for it, or stop others for it, or say why it waits. A lane whose first job finds no place is left out whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import islice
from typing import ParamSpec

from stoker_proto import Allocation, Boost, Place, PreemptRule, Reason, Stop, Unclaim
from stoker_proto import Claim as ClaimAction

from . import gang
from .attend import Watch, attend, end_waiting
from .board import ENDLESS, Board, Pass, Timing
from .explain import (
    Context,
    gate_reasons,
    held_back,
    not_looked_at,
    rejoin_reasons,
    unknown_reasons,
    why_not_placed,
)
from .layout import Layouts
from .offers import Victim
from .order import Candidate, Walk
from .queueing import lane_of
from .quota import Refusal
from .reserve import Forecast, gone_by
from .rights import Group, Rights
from .state import Claim, Job, State
from .victims import Eviction, Hunt, Turns, grace_ms
from .waiting import Lane

MOST_ALLOCATIONS = 1_000  # in one batch, some 700 bytes each: beyond a megabyte messages of the log get slow
MOST_HUNTS = 12  # looks for victims in one pass, each by another lane
HUNT_AGAIN_MS = 1_000  # until the next pass, when not every lane could look
LOOK_BEHIND = 64  # jobs behind a blocked one of their lane that may fit in before a claim starts
MINUTE_MS = 60_000
P = ParamSpec("P")


def schedule(state: State, now_ms: int, timing: Timing, layouts: Layouts | None = None) -> Pass:
    """Decide."""
    return Cycle(state, now_ms, timing, (layouts or Layouts())).run()


class Cycle:
    """One pass. `out` is what it decides; the board is what is left to give out."""

    def __init__(
        self, state: State, now_ms: int, timing: Timing, layouts: Layouts, watch: Watch | None = None, *,
        turns: Turns | None = None, tells: bool = True,
    ) -> None:  # fmt: skip
        self.state = state
        self.now_ms = now_ms
        self.timing = timing
        self.watch = watch or Watch()
        self.out = Pass()
        self.board = Board(state, layouts.of(state), now_ms)
        self.walk = Walk(state, self.board.tree, self.board.usage, self.board.totals, now_ms)
        self.hunt = Hunt(self.board)
        self.rights = Rights(self.board)
        self.forecast = Forecast(self.board)
        self.context = Context(self.board, self.forecast)
        self._tells = tells
        self._turns = turns or Turns()
        self._hunts = 0
        self._nowhere: dict[object, int] = {}
        self._free_kept: dict[int, tuple[bool, int]] = {}
        self._look_again = self._passed_over = False
        self._allocations = 0
        self._lanes: dict[tuple[str, Lane], tuple[Reason, ...]] = {}
        self._reserved: dict[tuple[str, ...], int] = {}
        self._preemptions_left = self._budget()

    def run(self) -> Pass:
        attend(self.board, self.timing, self.out, self.watch)
        end_waiting(self.board, self.out)
        self._boost()
        self._drop_dead_claims()
        for claim in self.board.claims.values():
            self._count(self.state.jobs[claim.job_id], claim)
        while not self._full():
            candidate = self.walk.next()
            if candidate is None:
                break
            self._consider(candidate)
        if not self._passed_over:
            self._turns.looked.clear()
        if self._passed_over or self._look_again:
            self.out.wait(self.now_ms + HUNT_AGAIN_MS)
        return self.out

    def why(self, job: Job) -> tuple[Reason, ...]:
        """Why the job waits, as this pass saw it."""
        told = self.out.reasons.get(job.id)
        if told is not None:
            return told
        if job.gated:
            return gate_reasons(self.board, job)
        if job.queue not in self.board.tree.queues or job.class_name not in self.board.tree.classes:
            return unknown_reasons(self.board, job)
        if job.id in self.board.claims:
            return self.context.claimed(job, self.board.claims[job.id])
        return self._lanes.get((job.queue, lane_of(job))) or not_looked_at()

    def consider_alone(self, job: Job) -> tuple[tuple[Reason, ...], tuple[str, ...]]:
        """For a job that nobody has submitted: why it would wait, or the nodes it would get, after this pass."""
        board = self.board
        if job.queue not in board.tree.queues or job.class_name not in board.tree.classes:
            return unknown_reasons(board, job), ()
        gates = gate_reasons(board, job)
        if gates:
            return gates, ()
        models, refused = board.allowed(job)
        spots = None if models is None else self._spots(job, models)
        if spots is None:
            lesser = self._drop_outranked(job)
            models, _ = board.allowed(job)
            spots = None if models is None else self._spots(job, models)
            for other in lesser:
                board.claim(other)
        if spots is not None:
            return (), tuple(board.topology.names[row] for row, _ in spots)
        if refused is not None:
            return self.context.refused(job, refused), ()
        return why_not_placed(self.context, job), ()

    def would_evict(self, job: Job) -> tuple[Victim, ...]:
        """Whom a job that nobody has submitted would displace."""
        if job.gated:
            return ()
        lesser = self._drop_outranked(job)
        found = self.hunt.evict(job, self.rights.displaces(job), self.board.usable(job), self.state.seq)
        for other in lesser:
            self.board.claim(other)
        return found.victims if found else ()

    def _spots(self, job: Job, models: tuple[str, ...]) -> tuple[gang.Spot, ...] | None:
        board, demand = self.board, job.demand._replace(models=models)
        within, mix = job.spec.compute.within, self.state.popular.mix
        return gang.place(board.capacity, demand, board.topology, board.usable(job), mix, within)

    def _allocated(self, job: Job, spots: tuple[gang.Spot, ...]) -> tuple[Allocation, ...]:
        return gang.allocations(self.state, self.board.topology, job.demand, spots)

    def _full(self) -> bool:
        return self.out.full or self._allocations >= MOST_ALLOCATIONS

    def _budget(self) -> int:
        lately = [t for t in self.state.preempted_ms if t > self.now_ms - MINUTE_MS]
        left = self.state.cluster.scheduling.preemptions_per_minute - len(lately)
        if left <= 0 and lately:
            self.out.wait(lately[0] + MINUTE_MS + 1)
        return left

    def _boost(self) -> None:
        """Jobs that have waited as long as their queue lets jobs wait go first from now on."""
        for queue, lanes in self.state.waiting.queues.items():
            known = self.board.tree.queues.get(queue)
            if known is None or known.max_wait_minutes is None:
                continue
            patience = int(known.max_wait_minutes * MINUTE_MS)
            for keys in lanes.values():
                early = 0
                for key in islice(keys, bisect_left(keys, (True,)), None):  # those behind the boosted ones
                    job = self.state.jobs[key[3]]
                    if self.out.full:
                        return
                    if self.now_ms >= job.since_ms + patience:
                        self.out.actions.append(Boost(job_id=job.id, cause="waited"))
                        continue
                    self.out.wait(job.since_ms + patience)
                    early += 1
                    if early == LOOK_BEHIND:
                        break

    def _drop_dead_claims(self) -> None:
        """A claim keeps its nodes as long as all of them work; else the gang looks anew."""
        for claim in list(self.board.claims.values()):
            cause = self._dead(claim)
            if cause is not None:
                self.board.drop(claim.job_id)
                self.out.actions.append(Unclaim(job_id=claim.job_id, cause=cause))

    def _dead(self, claim: Claim) -> str | None:
        job = self.state.jobs[claim.job_id]
        gates = gate_reasons(self.board, job) if job.state == "queued" else ()
        gates = gates or unknown_reasons(self.board, job)
        if gates:
            return gates[0].message
        if claim.until_ms is not None:
            if self.now_ms >= claim.until_ms:
                return "the node that the gang lost has not come back in time"
            self.out.wait(claim.until_ms)
        for allocation in claim.allocations:
            node = self.state.nodes.get(allocation.node)
            if node is None or not node.takes_work or node.boot_epoch != allocation.boot_epoch:
                return f"{allocation.node} takes no work now ({node.verdict if node else 'gone'})"
        return None

    def _count(self, job: Job, claim: Claim, change: int = 1) -> None:
        if claim.kind == "reserve" and claim.until_ms is None:
            self._reserved[job.demand.models] = self._reserved.get(job.demand.models, 0) + change

    def _consider(self, candidate: Candidate) -> None:
        job = candidate.job
        gates = gate_reasons(self.board, job)
        if gates:
            self._blocked(candidate, gates)
            return
        if job.not_before_ms > self.now_ms:
            self.out.reasons[job.id] = (held_back(job, self.now_ms),)
            self.out.wait(job.not_before_ms)
            self.walk.skip(candidate)
            return
        for exclusion in job.exclusions:
            if exclusion.until_ms > self.now_ms:
                self.out.wait(exclusion.until_ms)
        claim, had = self.board.claims.get(job.id), None
        if claim is not None and claim.kind == "reserve":
            # Free GPUs or victims elsewhere may be had sooner; until it has those it keeps what it has.
            self.board.drop(job.id)
            claim, had = None, claim
        elif claim is not None:
            self.board.open(job.id)
        reserves = claim is None and (had is None or had.until_ms is not None)
        done, refused = self._put(candidate, claim)
        done = done or self._take(candidate, claim, reserves=reserves)
        if not done and claim is None and refused is None:
            done = self._fill(candidate, job) or (reserves and self._reserve(candidate))
        if done:
            if had is not None:
                self._count(job, had, -1)
            return
        held = claim or had
        if held is not None and refused is not None and not self._still_held(held):
            # All that was kept is free, and quota says no: it has changed, and others may use it.
            if claim is not None:
                self._forget_claim(job.id)
            self.out.actions.append(Unclaim(job_id=job.id, cause=f"queue {refused.queue} may not take it any more"))
            self._refused(candidate, self._told(self.context.refused, job, refused))
        elif claim is not None:
            self.board.keep(claim)
            self._told_alone(candidate, self._told(self.context.claimed, job, claim))
        elif had is not None:
            self.board.claim(had)
            told = self._told(self.context.claimed, job, had)
            if had.until_ms is not None:
                told = self._told(rejoin_reasons, self.context, job, had)
            self._told_alone(candidate, told)
        elif refused is not None:
            self._refused(candidate, self._told(self.context.refused, job, refused))
        else:
            self._blocked(candidate, self._told(why_not_placed, self.context, job))

    def _still_held(self, claim: Claim) -> bool:
        return any(self.state.held(a.node, uuid) for a in claim.allocations for uuid in a.gpus)

    def _put(self, candidate: Candidate, claim: Claim | None) -> tuple[bool, Refusal | None]:
        """Place the job, whose own claim is open, on GPUs that are free; else what quota has against it."""
        job = candidate.job
        models, refused = self.board.allowed(job)
        if models is None:
            return False, refused
        # What is free only gets less in a pass, but for claims that are given up: a shape is tried once between those.
        shape = (job.demand, models, job.spec.compute.within, job.exclusions)
        if claim is None and self._nowhere.get(shape) == self.board.freed:
            return False, refused
        spots = self._spots(job, models)
        if spots is None:
            if claim is None:
                self._nowhere[shape] = self.board.freed
            return False, refused
        if claim is not None:
            self._forget_claim(job.id)
        self._place(candidate, self._allocated(job, spots))
        return True, None

    def _drop_outranked(self, job: Job) -> tuple[Claim, ...]:
        found = self.rights.outranked(job)
        for claim in found:
            self.board.drop(claim.job_id)
        return found

    def _take(self, candidate: Candidate, claim: Claim | None, *, reserves: bool) -> bool:
        """Find room that others hold, or that is kept for them, when the lane has a right to and it is its turn."""
        job, before = candidate.job, len(self.out.actions)
        groups = self._may_evict(job) if claim is None else {}
        if not (groups or self.rights.outranked(job)) or not self._has_turn(candidate):
            return False
        lesser = self._drop_outranked(job)
        done, refused = self._put(candidate, claim) if lesser else (False, None)
        done = done or (bool(groups) and self._evict(candidate, groups))
        if not done and lesser and reserves and refused is None:
            done = self._reserve(candidate)
        self._restore(lesser, before, job)
        if not done:
            self._turns.looked[candidate.queue, candidate.lane] = (self.state.seq, self.hunt.wake_ms)
        return done

    def _restore(self, lesser: tuple[Claim, ...], before: int, job: Job) -> None:
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
            self._count(self.state.jobs[other.job_id], other, -1)

    def _forget_claim(self, job_id: str) -> None:
        self.board.freed += 1
        claim = self.board.claims.pop(job_id)
        for allocation in claim.allocations:
            for uuid in allocation.gpus:
                self.board.claimed.pop((allocation.node, uuid), None)

    def _place(self, candidate: Candidate, chosen: tuple[Allocation, ...]) -> None:
        self.board.take(candidate.job, chosen)
        self._start(candidate.job, chosen, ())
        self.walk.placed(candidate)

    def _start(self, job: Job, chosen: tuple[Allocation, ...], over: tuple[str, ...]) -> None:
        self._allocations += len(chosen)
        fresh = _fresh(self.state, tuple(sorted(a.node for a in chosen)), self.now_ms, self.timing)
        self.out.actions.append(
            Place(
                job_id=job.id,
                attempt=job.attempts + 1,
                allocations=chosen,
                preflight="fresh" if fresh else "required",
                over=over,
            )
        )

    def _blocked(self, candidate: Candidate, reasons: tuple[Reason, ...]) -> None:
        """Nobody of the lane fits; but some that will be gone soon may fit in before a claim starts."""
        self._tell_lane(candidate, reasons)
        if self._keeps_free(candidate.job):
            self._fill_behind(candidate)
        self.walk.drop_lane(candidate)

    def _keeps_free(self, job: Job) -> bool:
        """Whether claims that start at a known time keep GPUs that are free now and large enough a part for the job."""
        known, at = self._free_kept.get(job.demand.milli, (False, -1))
        if at != self.board.charges:
            over = tuple(
                c.job_id for c in self.board.claims.values() if c.kind == "reserve" and c.starts_ms is not None
            )
            known = self.board.has_free(over, job)
            self._free_kept[job.demand.milli] = (known, self.board.charges)
        return known

    def _fill_behind(self, candidate: Candidate) -> None:
        tried_ms = ENDLESS  # one of the lane that would be gone by then found no place: one that stays longer won't
        for key in self.walk.behind(candidate, LOOK_BEHIND):
            other = self.state.jobs[key[3]]
            ends_ms = gone_by(self.board, other)
            if ends_ms < tried_ms and other.id not in self.board.claims and not self._fill(candidate, other):
                tried_ms = ends_ms

    def _told(self, why: Callable[P, tuple[Reason, ...]], *about: P.args, **more: P.kwargs) -> tuple[Reason, ...]:
        """Reasons, unless nobody wants them: they cost more than decisions."""
        return why(*about, **more) if self._tells else ()

    def _told_alone(self, candidate: Candidate, reasons: tuple[Reason, ...]) -> None:
        """It waits for GPUs that are its own: the next of its lane may find others, or evict, or have some kept too."""
        self.out.reasons[candidate.job.id] = reasons
        self.walk.skip(candidate)

    def _tell_lane(self, candidate: Candidate, reasons: tuple[Reason, ...]) -> None:
        self.out.reasons[candidate.job.id] = reasons
        self._lanes[(candidate.queue, candidate.lane)] = reasons

    def _refused(self, candidate: Candidate, reasons: tuple[Reason, ...]) -> None:
        """Quota says no. A boosted job is not overtaken inside its queue, so that small ones cannot use it up."""
        self._tell_lane(candidate, reasons)
        if not candidate.job.boosted:
            self.walk.drop_lane(candidate)
            return
        behind = self.context.behind(candidate.job)
        for lane, first in self.walk.drop_queue(candidate.queue):
            if lane != candidate.lane:
                self.out.reasons[first] = self._lanes[(candidate.queue, lane)] = behind

    def _fill(self, candidate: Candidate, job: Job) -> bool:
        """Backfill: place the job on GPUs kept for others, if it will be gone before they can start."""
        ends = gone_by(self.board, job)
        if ends >= ENDLESS or job.not_before_ms > self.now_ms or job.gated or self._full():
            return False
        over = tuple(
            claim.job_id
            for claim in self.board.claims.values()
            if claim.kind == "reserve" and claim.starts_ms is not None and claim.starts_ms >= ends
        )
        if not over or not self.board.has_free(over, job):
            return False
        models, _ = self.board.allowed(job)
        if models is None:
            return False
        claims = [self.board.claims[job_id] for job_id in over]
        for job_id in over:
            self.board.open(job_id)
        spots = self._spots(job, models)
        chosen = self._allocated(job, spots) if spots is not None else ()
        if chosen:
            self.board.take(job, chosen)
        for claim in claims:
            self.board.keep(claim)
        if not chosen:
            return False
        self._start(job, chosen, over)
        if job.id == candidate.job.id:
            self.walk.placed(candidate)
        return True

    def _may_evict(self, job: Job) -> dict[Group, tuple[PreemptRule, int]]:
        """Whom the job may displace now, if anybody."""
        if self._preemptions_left <= 0:
            return {}
        groups = self.rights.displaces(job)
        since = job.since_ms + int(self.state.cluster.scheduling.preempt_after_seconds * 1000)
        if groups and since > self.now_ms:
            self.out.wait(since)
            return {}
        return groups

    def _has_turn(self, candidate: Candidate) -> bool:
        """Whether the lane may look at others' GPUs in this pass: that takes long, and only so many may."""
        seq, wake_ms = self._turns.looked.get((candidate.queue, candidate.lane), (0, self.now_ms))
        if wake_ms is None or wake_ms > self.now_ms:
            self._look_again = self._look_again or seq != self.state.seq
            if wake_ms is not None:
                self.out.wait(wake_ms)
            return False
        if self._hunts >= MOST_HUNTS:
            self._passed_over = True
            return False
        self._hunts += 1
        self.hunt.wake_ms = None
        return True

    def _evict(self, candidate: Candidate, groups: dict[Group, tuple[PreemptRule, int]]) -> bool:
        """Stop others for the job, and keep for it what that frees."""
        job = candidate.job
        found = self.hunt.evict(job, groups, self.board.usable(job), self.state.seq)
        if self.hunt.wake_ms is not None:
            self.out.wait(self.hunt.wake_ms)
        if found is None or len(found.victims) > self._preemptions_left:
            return False
        self._claim(job, found.claim, found)
        self._told_alone(candidate, self._told(self.context.claimed, job, found.claim))
        return True

    def _claim(self, job: Job, claim: Claim, eviction: Eviction) -> None:
        for victim in eviction.victims:
            self.out.actions.append(
                Stop(
                    job_id=victim.job.id, attempt=victim.attempt.number, reason="preempted",
                    grace_ms=grace_ms(self.board, victim.job), by=job.id, rule=victim.rule,
                )
            )  # fmt: skip
            self.board.stopping.add(victim.job.id)
        self.hunt.stopped(eviction.victims)
        self._preemptions_left -= len(eviction.victims)
        self._keep(claim)

    def _keep(self, claim: Claim) -> None:
        self.board.claim(claim)
        self._allocations += len(claim.allocations)
        self.out.actions.append(
            ClaimAction(job_id=claim.job_id, kind=claim.kind, allocations=claim.allocations, starts_ms=claim.starts_ms)
        )

    def _reserve(self, candidate: Candidate) -> bool:
        """A claim for a gang that is blocked, while its GPU models have one to give."""
        job, numbers = candidate.job, self.state.cluster.scheduling
        if job.demand.gpus * job.demand.nodes < 2:
            return False
        if self._reserved.get(job.demand.models, 0) >= numbers.reservations:
            return False
        since = job.since_ms + int(numbers.reserve_after_seconds * 1000)
        if since > self.now_ms:
            self.out.wait(since)
            return False
        claim = self.forecast.claim(job, self.board.usable(job), self.state.seq)
        if claim is None:
            return False
        self._count(job, claim)
        self._keep(claim)
        self._told_alone(candidate, self._told(self.context.claimed, job, claim))
        return True


def _fresh(state: State, names: tuple[str, ...], now_ms: int, timing: Timing) -> bool:
    """Whether these nodes passed one test together lately, with nothing found on any of them since."""
    known = state.tested.get(names)
    if known is not None and now_ms - known < timing.fresh_ms:
        return True
    wanted = set(names)
    return any(wanted <= set(nodes) and now_ms - at_ms < timing.fresh_ms for nodes, at_ms in state.tested.items())
