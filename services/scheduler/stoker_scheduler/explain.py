"""Why a job waits: true reasons with numbers, the binding one first, and what the submitter may do.

Tiers, highest first: held, refused, dependency; unknown queue or class; window, array; quota; never fits; nodes away;
GPUs busy; kept for others; claimed; behind.
"""

from __future__ import annotations

from stoker_proto import Reason

from .board import ENDLESS, Board
from .placement import Demand
from .quota import Refusal, refusal
from .reserve import Forecast
from .state import Claim, Job
from .unplaced import SHOWN, Around, Fact, around, gpus_of, why_unplaced
from .usage import ALL


def held_back(job: Job, now_ms: int) -> Reason:
    return Reason(
        code="backoff",
        message="The last attempt ended early; the next one starts after a pause",
        facts={
            "starts_in_ms": job.not_before_ms - now_ms,
            "retries": sum(count for _, count in job.retried),
            "preemptions": job.preemptions,
        },
    )


def not_looked_at() -> tuple[Reason, ...]:
    return (Reason(code="not_evaluated", message="The scheduler has not come to this job yet"),)


def gate_reasons(board: Board, job: Job) -> tuple[Reason, ...]:
    """Why the job may not start whatever is free; all of them, since each must go."""
    reasons: list[Reason] = []
    if job.cancel:
        reasons.append(Reason(code="cancelled", message="It is being cancelled"))
    if job.refused:
        reasons.append(Reason(code="dependency_failed", message=job.refused))
    if job.held:
        told = "It is on hold until somebody releases it"
        reasons.append(Reason(code="held", message=told, actions=(f"stoker release {job.id}",)))
    if job.waits_for:
        reasons.append(
            Reason(
                code="dependency",
                message=f"{len(job.waits_for)} job(s) must be over first: {', '.join(job.waits_for[:3])}",
                facts={"jobs": len(job.waits_for)},
                blockers=job.waits_for[:SHOWN],
                actions=("wait for them", "cancel it and submit it without schedule.after"),
            )
        )
    return (*reasons, *_shut(board, job))


def _shut(board: Board, job: Job) -> list[Reason]:
    reasons: list[Reason] = []
    queue = board.tree.queues.get(job.queue)
    for name in dict.fromkeys((job.spec.schedule.window, queue.window if queue else None)):
        if name is None or board.state.windows.get(name, False):
            continue
        known = next((w for w in board.state.cluster.windows if w.name == name), None)
        if known is None:
            told = f"There is no window {name!r} any more"
        else:
            days = ", ".join(known.days)
            told = f"Window {name} is shut; it opens at {known.start} on {days} ({known.zone}) until {known.end}"
        reasons.append(
            Reason(code="window_closed", message=told, facts={"window": name}, actions=("wait until it opens",))
        )
    limit = job.spec.array.at_once if job.spec.array else None
    if limit is not None and job.array_id and board.state.arrays.get(job.array_id, 0) >= limit:
        told = f"{limit} jobs of the array may be active at once, and so many are"
        reasons.append(Reason(code="array_limit", message=told, facts={"array": job.array_id, "at_once": limit}))
    return reasons


def unknown_reasons(board: Board, job: Job) -> tuple[Reason, ...]:
    """A queue or class that the configuration does not have: nobody else would ever look at such a job."""
    reasons: list[Reason] = []
    if job.queue not in board.tree.queues:
        known = sorted(board.tree.queues)
        told = f"There is no queue {job.queue!r} any more; the queues are {', '.join(known[:SHOWN])}"
        action = f"stoker queue set {job.queue}"
        reasons.append(Reason(code="unknown_queue", message=told, facts={"queues": known[:SHOWN]}, actions=(action,)))
    if job.class_name not in board.tree.classes:
        names = sorted(board.tree.classes)
        told = f"There is no priority class {job.class_name!r} any more; the classes are {', '.join(names)}"
        reasons.append(Reason(code="unknown_class", message=told, facts={"classes": names}))
    return tuple(reasons)


def quota_reasons(board: Board, job: Job, told: Refusal) -> tuple[Reason, ...]:
    """Which number of which queue says no."""
    kind = f"{told.model} GPUs" if told.model != ALL else "GPUs"
    used, asked, bound = gpus_of(told.used), gpus_of(told.asked), gpus_of(told.bound)
    message = {
        "queue_limit": f"Queue {told.queue} holds {used:g} {kind} and may hold {bound:g}; the job asks for {asked:g}",
        "class_may_not_borrow": (
            f"Class {job.class_name} may not borrow; queue {told.queue} holds {used:g} of its nominal {bound:g} {kind}"
        ),
        "not_preemptible_beyond_nominal": (
            f"Class {job.class_name} is not preemptible, so it stays inside the nominal of queue {told.queue}: "
            f"{used:g} of {bound:g} {kind} are held by such jobs"
        ),
        "kept_by_others": (
            f"Queue {told.queue} would borrow {kind} that others keep from lending: {used:g} of {bound:g} are taken"
        ),
    }[told.code]
    facts: dict[str, Fact] = {"queue": told.queue, "used_gpus": used, "asked_gpus": asked, "bound_gpus": bound}
    actions = ["wait for a job of the queue to end", "ask for fewer accelerators"]
    if told.asked > told.bound:
        actions = [f"ask for at most {bound:g} GPUs", "ask an operator for a higher limit"]
    elif told.code in ("class_may_not_borrow", "not_preemptible_beyond_nominal"):
        actions.append("use a preemptible class that may borrow")
    blockers = board.users(told.queue, SHOWN)
    return (Reason(code=told.code, message=message, facts=facts, blockers=blockers, actions=tuple(actions)),)


class Context:
    """What the reasons of one pass have in common."""

    def __init__(self, board: Board, forecast: Forecast) -> None:
        self.board = board
        self.forecast = forecast
        self.shapes: dict[object, tuple[Reason, ...]] = {}
        self.quotas: dict[object, tuple[Reason, ...]] = {}
        self._around: dict[tuple[int, tuple[str, ...]], Around] = {}

    def around(self, demand: Demand, avoid: tuple[str, ...]) -> Around:
        """The nodes of a kind, as the pass found them."""
        every = self.board.layout.able(demand)
        key = (id(every), avoid)
        found = self._around.get(key)
        if found is None:
            found = self._around[key] = around(self.board, every, avoid)
        return found

    def refused(self, job: Job, told: Refusal) -> tuple[Reason, ...]:
        """What quota has against the job; and what would keep it from starting if quota had nothing."""
        key = (told, job.class_name)
        found = self.quotas.get(key)
        if found is None:
            found = self.quotas[key] = quota_reasons(self.board, job, told)
        return (*found, *(r for r in why_not_placed(self, job) if r.code not in FOLLOWING))

    def behind(self, job: Job) -> tuple[Reason, ...]:
        told = f"{job.id} has waited longest in this queue and is not overtaken any more"
        return (Reason(code="behind", message=told, blockers=(job.id,)),)

    def claimed(self, job: Job, claim: Claim) -> tuple[Reason, ...]:
        """GPUs are kept for the job; what holds them, and until when."""
        state = self.board.state
        held = [(a.node, uuid) for a in claim.allocations for uuid in a.gpus if state.held(a.node, uuid)]
        holders = sorted({h for node, uuid in held for h in state.owner[node].get(uuid, {})})
        total = sum(len(a.gpus) for a in claim.allocations)
        draining = claim.kind == "preempt"
        facts: dict[str, Fact] = {
            "nodes": [a.node for a in claim.allocations],
            "gpus_kept": total,
            "gpus_still_held": len(held),
        }
        if claim.starts_ms is not None:
            facts["starts_in_ms"] = max(0, claim.starts_ms - self.board.now_ms)
        if draining:
            told = f"Jobs are being preempted for it; {len(held)} of its {total} GPUs are still held"
        else:
            told = f"{total} GPUs are kept for it, and {len(held)} of them are still held"
        when = "" if claim.starts_ms is not None else "; some holder has no time limit, so nobody can say for how long"
        reason = Reason(
            code="draining" if draining else "reserved", message=told + when, facts=facts,
            blockers=tuple(holders[:SHOWN]), actions=("wait for them to end",),
        )  # fmt: skip
        return (reason, *_above_nominal(self.board, job))


def why_not_placed(context: Context, job: Job) -> tuple[Reason, ...]:
    """Reasons in the order in which they bind, for a job that no set of free GPUs can hold now.

    Those of the job's shape are found once in a pass, for the first that asks.
    """
    board = context.board
    avoid = board.avoided(job)
    job, closed = _open_to(board, job)
    key = (job.demand, job.spec.compute.within, avoid)
    found = context.shapes.get(key)
    if found is None:
        found = context.shapes[key] = why_unplaced(board, job, avoid, context.around(job.demand, avoid))
    if closed is not None:
        found = (*found, *quota_reasons(board, job, closed))
    if found[0].code in FINAL:
        return found
    return (*found, *_above_nominal(board, job))


FINAL = ("too_few_nodes", "no_such_gpu", "nodes_too_small", "nodes_unavailable")
FOLLOWING = ("behind", "above_nominal")  # said of jobs that would fit, or that quota lets borrow


def _open_to(board: Board, job: Job) -> tuple[Job, Refusal | None]:
    """The job as one that asks only for the models that quota leaves open to it, and what closes the others."""
    if not board.models_with_quota:
        return job, None
    models, _ = board.allowed(job)
    if models is None or models == job.demand.models:
        return job, None
    for model in job.demand.models or sorted(m for m in board.totals if m != ALL):
        asked = ((model, job.milli),)
        told = refusal(board.tree, board.usage, board.totals, job.queue, board.class_of(job), asked)
        if told is not None:
            return job._replace(demand=job.demand._replace(models=models)), told
    return job, None


def rejoin_reasons(context: Context, job: Job, had: Claim) -> tuple[Reason, ...]:
    """A gang that lost a node: why it does not start, and what is kept for it until when."""
    left_ms = max(0, (had.until_ms or 0) - context.board.now_ms)
    told = f"It lost a node; its other {len(had.allocations)} are kept for it for {left_ms // 1000} s more"
    facts: dict[str, Fact] = {"nodes": [a.node for a in had.allocations], "kept_for_ms": left_ms}
    return (*why_not_placed(context, job), Reason(code="rejoining", message=told, facts=facts))


def _above_nominal(board: Board, job: Job) -> list[Reason]:
    """That the job would borrow, which is why others go before it and whose job it is to give way."""
    for name in board.usage.path(job.queue):
        bound = board.tree.bounds[name][ALL] if name in board.tree.bounds else None
        held = board.state.usage.of(name)
        if bound is not None and bound.nominal is not None and held + job.milli > bound.nominal:
            would, own = gpus_of(held + job.milli), gpus_of(bound.nominal)
            told = f"Queue {name} would hold {would:g} GPUs and is guaranteed {own:g}; queues within theirs go first"
            facts: dict[str, Fact] = {"queue": name, "nominal_gpus": own, "would_hold_gpus": would}
            return [Reason(code="above_nominal", message=told, facts=facts)]
    return []


def estimate(context: Context, job: Job) -> int | None:
    """When the job can start if nothing else comes: its claim's start, or the forecast. None: unknown."""
    board = context.board
    claim = board.claims.get(job.id)
    if claim is not None:
        return claim.starts_ms
    found = context.forecast.claim(job, board.usable(job), board.state.seq)
    if found is None or found.starts_ms is None or found.starts_ms >= ENDLESS:
        return None
    return max(found.starts_ms, board.now_ms)
