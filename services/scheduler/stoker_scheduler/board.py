"""The pass's own copy of what changes while it decides: free capacity, usage, claims, and who is being stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from stoker_proto import Action, Allocation, PriorityClass, Reason

from .fragments import WHOLE, Bools
from .layout import Layout
from .placement import Capacity
from .quota import Refusal, refusal
from .state import Attempt, Claim, Job, State
from .usage import ALL, Usage

ENDLESS = 1 << 62
MOST_ACTIONS = 400  # in one batch
MOST_ALLOCATIONS = 1_000  # in one batch, some 700 bytes each: beyond a megabyte messages of the log get slow


Asked = tuple[str, str, tuple[str, ...], int]


def asked_by(job: Job) -> Asked:
    """What quota looks at: jobs that are the same in this are let in or refused alike."""
    return job.queue, job.class_name, job.demand.models, job.milli


@dataclass(frozen=True, slots=True)
class Timing:
    """The numbers that the pass goes by and that no user sets, in milliseconds of the log's clock."""

    fresh_ms: int = 600_000
    start_deadline_ms: int = 180_000
    fence_ms: int = 300_000


@dataclass(slots=True)
class Pass:
    """What one pass decided. `due_ms` is the next moment at which deciding again could matter without a new event."""

    actions: list[Action] = field(default_factory=list)
    reasons: dict[str, tuple[Reason, ...]] = field(default_factory=dict)
    due_ms: int | None = None
    allocations: int = 0  # in the actions so far

    @property
    def full(self) -> bool:
        """Whether a message of the log should hold no more; the next pass goes on."""
        return len(self.actions) >= MOST_ACTIONS or self.allocations >= MOST_ALLOCATIONS

    def wait(self, until_ms: int) -> None:
        self.due_ms = until_ms if self.due_ms is None else min(self.due_ms, until_ms)


class Board:
    """Starts as the state is, with all that is claimed taken away; the pass then takes what it gives out."""

    def __init__(self, state: State, layout: Layout, now_ms: int) -> None:
        self.state = state
        self.now_ms = now_ms
        self.layout = layout
        self.tree = layout.tree
        self.topology = layout.topology
        self.totals = layout.totals(state)
        self.capacity: Capacity = state.capacity.copy()
        self.usage: Usage = state.usage.copy()
        self.claims: dict[str, Claim] = dict(state.claims)
        self.claimed: dict[tuple[str, str], str] = dict(state.claimed)
        self.stopping: set[str] = set()
        self.freed = 0  # claims given up so far
        self.charges = 0  # changes of usage so far
        self._allowed: dict[Asked, tuple[tuple[str, ...] | None, Refusal | None]] = {}
        self._allowed_at = 0
        self.given: list[tuple[Job, Allocation]] = []
        self.models_with_quota = any(len(bounds) > 1 for bounds in self.tree.bounds.values())
        self.all_rows: Bools = np.ones(len(self.capacity.names), dtype=np.bool_)
        self._kept: dict[str, list[tuple[str, list[int], int, int, int]]] = {}
        self._users: dict[str, tuple[str, ...]] = {}
        self._charges: dict[str, tuple[Claim, list[tuple[frozenset[str], tuple[tuple[str, int], ...]]]]] = {}
        for claim in self.claims.values():
            self.keep(claim)

    def usable(self, job: Job) -> Bools:
        """Rows of nodes that this job does not avoid."""
        avoid = self.avoided(job)
        if not avoid:
            return self.all_rows
        rows = self.all_rows.copy()
        for name in avoid:
            rows[self.capacity.row(name)] = False
        return rows

    def avoided(self, job: Job) -> tuple[str, ...]:
        """Nodes that the job still avoids: not after a later test, not after the exclusion's end."""
        names = []
        for exclusion in job.exclusions:
            node = self.state.nodes.get(exclusion.node)
            retested = node is not None and node.verdict == "ready" and node.verdict_seq > exclusion.seq
            if node is not None and not retested and exclusion.until_ms > self.now_ms:
                names.append(exclusion.node)
        return tuple(names)

    def keep(self, claim: Claim) -> None:
        """Take away what of a claim is free, and count it as its queue's."""
        taken = []
        for allocation in claim.allocations:
            at = self.state.at[allocation.node]
            free, cpu, memory = self.capacity.left(allocation.node)
            for uuid in allocation.gpus:
                gpu = at.get(uuid)
                milli = min(free[gpu], WHOLE) if gpu is not None else 0
                if gpu is not None and milli > 0:
                    taken.append((allocation.node, [gpu], milli, 0, 0))
            cpu, memory = min(cpu, allocation.cpu_milli), min(memory, allocation.memory_mib)
            if cpu > 0 or memory > 0:
                taken.append((allocation.node, [], 0, max(0, cpu), max(0, memory)))
        for node, gpus, milli, cpu, memory in taken:
            self.capacity.take(node, gpus, milli, cpu, memory)
        self._kept[claim.job_id] = taken
        self._charge_claim(claim, 1)

    def open(self, job_id: str) -> None:
        """Give back what a claim keeps."""
        for node, gpus, milli, cpu, memory in self._kept.pop(job_id):
            self.capacity.give(node, gpus, milli, cpu, memory)
        self._charge_claim(self.claims[job_id], -1)

    def has_free(self, job_ids: tuple[str, ...], job: Job) -> bool:
        """Whether these claims keep enough GPUs that are free now to be worth a look."""
        kept = sum(
            len(gpus) for job_id in job_ids for _, gpus, milli, _, _ in self._kept[job_id] if milli >= job.demand.milli
        )
        return kept > 0

    def charge(self, job_id: str, allocations: tuple[Allocation, ...], sign: int) -> None:
        job = self.state.jobs[job_id]
        charge: dict[str, int] = {}
        for allocation in allocations:
            gpus, at = self.state.nodes[allocation.node].gpus, self.state.at[allocation.node]
            for uuid in allocation.gpus:
                model = gpus[at[uuid]].model if uuid in at else ""
                charge[model] = charge.get(model, 0) + allocation.milli
        if job.queue in self.tree.queues:
            self.usage.add(job.queue, charge.items(), firm=not self.class_of(job).preemptible, sign=sign)
            self.charges += 1

    def _charge_claim(self, claim: Claim, sign: int) -> None:
        """Charge what is claimed, except to queues that are charged for it as long as its present holder is there."""
        job = self.state.jobs[claim.job_id]
        if job.queue not in self.tree.queues:
            return
        firm = not self.class_of(job).preemptible
        known = self._charges.get(job.id)
        if known is None or known[0] is not claim:
            known = self._charges[job.id] = (claim, self._charges_of(claim))
        for but, charge in known[1]:
            self.usage.add(job.queue, charge, firm=firm, sign=sign, but=but)
            self.charges += 1

    def _charges_of(self, claim: Claim) -> list[tuple[frozenset[str], tuple[tuple[str, int], ...]]]:
        """What is claimed by model, and by the queues that are charged for it already."""
        state = self.state
        charges: dict[frozenset[str], dict[str, int]] = {}
        for allocation in claim.allocations:
            gpus, at, owner = state.nodes[allocation.node].gpus, state.at[allocation.node], state.owner[allocation.node]
            for uuid in allocation.gpus:
                model = gpus[at[uuid]].model if uuid in at else ""
                paths = [frozenset(self.usage.path(state.jobs[holder].queue)) for holder in owner.get(uuid, ())]
                charge = charges.setdefault(frozenset.intersection(*paths) if paths else frozenset(), {})
                charge[model] = charge.get(model, 0) + allocation.milli
        return [(but, tuple(charge.items())) for but, charge in charges.items()]

    def users(self, queue: str, most: int) -> tuple[str, ...]:
        """The first active jobs of a queue and of those below it."""
        found = self._users.get(queue)
        if found is None:
            jobs, usage = self.state.jobs, self.usage
            below = {name for name in self.tree.queues if queue in usage.path(name)}
            users = (job_id for job_id in self.state.active if jobs[job_id].queue in below)
            found = self._users[queue] = tuple(islice(users, most))
        return found

    def class_of(self, job: Job) -> PriorityClass:
        return self.tree.class_of(job)

    def take(self, job: Job, allocations: tuple[Allocation, ...]) -> None:
        """The job gets these."""
        for allocation in allocations:
            at = self.state.at[allocation.node]
            gpus = [at[uuid] for uuid in allocation.gpus]
            self.capacity.take(allocation.node, gpus, allocation.milli, allocation.cpu_milli, allocation.memory_mib)
            self.given.append((job, allocation))
        self.charge(job.id, allocations, 1)

    def claim(self, claim: Claim) -> None:
        self.drop(claim.job_id)
        self.claims[claim.job_id] = claim
        for allocation in claim.allocations:
            for uuid in allocation.gpus:
                self.claimed[(allocation.node, uuid)] = claim.job_id
        self.keep(claim)

    def drop(self, job_id: str) -> None:
        """Forget a claim, in this pass."""
        if job_id not in self.claims:
            return
        if job_id in self._kept:
            self.open(job_id)
        self.freed += 1
        claim = self.claims.pop(job_id)
        for allocation in claim.allocations:
            for uuid in allocation.gpus:
                self.claimed.pop((allocation.node, uuid), None)

    def allowed(self, job: Job) -> tuple[tuple[str, ...] | None, Refusal | None]:
        """GPU models that quota lets the job take, () for any; or None and why."""
        if self._allowed_at != self.charges:
            self._allowed, self._allowed_at = {}, self.charges
        key = asked_by(job)
        found = self._allowed.get(key)
        if found is None:
            found = self._allowed[key] = self._allows(job)
        return found

    def _allows(self, job: Job) -> tuple[tuple[str, ...] | None, Refusal | None]:
        demand, milli = job.demand, job.milli
        priority, usage, totals = self.class_of(job), self.usage, self.totals
        told = refusal(self.tree, usage, totals, job.queue, priority, ((ALL, milli),))
        if told is not None:
            return None, told
        if not self.models_with_quota:
            return demand.models, None
        names = demand.models or tuple(sorted(m for m in totals if m != ALL))
        open_: list[str] = []
        first: Refusal | None = None
        for model in names:
            told = refusal(self.tree, usage, totals, job.queue, priority, ((model, milli),))
            if told is None:
                open_.append(model)
            elif first is None:
                first = told
        if not open_ and first is not None:
            return None, first
        return (demand.models if len(open_) == len(names) else tuple(open_)), None

    def coming(self, attempt: Attempt) -> bool:
        """Whether what the attempt holds is on its way back."""
        return attempt.stop is not None or all(p.exited is not None for p in attempt.parts)
