"""What the scheduler answers when it is asked: by a pass over its present state, the very one that decides."""

from __future__ import annotations

from bisect import bisect_left

from stoker_proto import (
    Displaced,
    ExplainAsked,
    Explained,
    JobSpec,
    PlanAsked,
    Planned,
    Problem,
    QueueStatus,
    QueuesTold,
    Reason,
    WaitingShape,
    problem,
)
from stoker_proto.jobs import Stop

from .board import Pass
from .cycle import Cycle
from .eligible import lost_by
from .explain import estimate
from .order import MS_IN_HOUR
from .queueing import demand_of, first_gates
from .quota import ROOT, borrowed, share
from .state import Job, State
from .unplaced import gpus_of
from .usage import ALL
from .waiting import Lane

MOST_SHAPES = 50
NEW = "(this job)"


def explain(cycle: Cycle, asked: ExplainAsked) -> Explained | Problem:
    """Why the job waits, what stands before it, and when it may start."""
    state, board = cycle.state, cycle.board
    job = state.jobs.get(asked.job_id)
    if job is None:
        over = state.over.get(asked.job_id)
        if over is None:
            return problem("not_found", f"There is no job {asked.job_id}")
        return Explained(seq=state.seq, at_ms=cycle.now_ms, job_id=asked.job_id, state=over.state)
    told = {"seq": state.seq, "at_ms": cycle.now_ms, "job_id": job.id, "state": job.state}
    if job.state != "queued":
        return Explained.model_validate(told)
    placed = any(action.action == "place" and action.job_id == job.id for action in cycle.out.actions)
    if placed:
        return Explained.model_validate(told | {"starts_ms": cycle.now_ms})
    reasons = cycle.why(job)
    waits = not job.gated and job.id in state.waiting
    return Explained(
        **told,
        reasons=reasons,
        starts_ms=estimate(cycle.context, job) if waits and job.queue in board.tree.queues else None,
        ahead=ahead_of(state, job) if waits else 0,
        displaces=displaced(state, cycle.out, job.id, cycle.now_ms),
    )


def ahead_of(state: State, job: Job) -> int:
    """Jobs of the same queue and class that come before it."""
    place = state.waiting.place(job.id)
    lanes = state.waiting.queues[place.queue]
    return sum(
        bisect_left(keys, place.key) for lane, keys in lanes.items() if lane.priority_class == place.lane.priority_class
    )


def displaced(state: State, out: Pass, job_id: str, now_ms: int) -> tuple[Displaced, ...]:
    """Jobs that are stopped for this one in the pass, or are being stopped for it already."""
    found = {a.job_id: a.rule for a in out.actions if isinstance(a, Stop) and a.by == job_id and a.rule}
    for active in state.active:
        attempt = state.jobs[active].attempt
        if attempt is not None and attempt.by == job_id and attempt.rule and attempt.stop == "preempted":
            found[active] = attempt.rule
    return tuple(_displaced(state, name, rule, now_ms) for name, rule in found.items())


def _displaced(state: State, job_id: str, rule: str, now_ms: int) -> Displaced:
    job = state.jobs[job_id]
    lost = lost_by(job.attempt, now_ms) if job.attempt else 0
    return Displaced(
        job_id=job_id, queue=job.queue, priority_class=job.class_name, rule=rule,
        lost_gpu_seconds=round(lost / 1_000_000, 3),
    )  # fmt: skip


def plan(cycle: Cycle, asked: PlanAsked) -> Planned:
    """What would become of a job like this, submitted now behind all that waits."""
    state = cycle.state
    job = hypothetical(state, asked.spec, cycle.now_ms)
    reasons, nodes = cycle.consider_alone(job)
    told = {"seq": state.seq, "at_ms": cycle.now_ms, "reasons": reasons, "ahead": _ahead_of_new(state, job)}
    if nodes:
        return Planned.model_validate(told | {"starts": "now", "nodes": nodes, "starts_ms": cycle.now_ms})
    never = any(reason.code in NEVER for reason in reasons)
    victims = cycle.would_evict(job) if not never else ()
    return Planned.model_validate(
        told
        | {
            "starts": "never" if never else "later",
            "starts_ms": None if never or job.gated else estimate(cycle.context, job),
            "displaces": [
                Displaced(
                    job_id=v.job.id, queue=v.job.queue, priority_class=v.job.class_name, rule=v.rule,
                    lost_gpu_seconds=round(v.lost / 1_000_000, 3),
                )
                for v in victims
            ],
        }
    )  # fmt: skip


NEVER = ("too_few_nodes", "no_such_gpu", "nodes_too_small", "unknown_queue", "unknown_class", "dependency_failed")


def hypothetical(state: State, spec: JobSpec, now_ms: int) -> Job:
    """A job that nobody has submitted."""
    known = state.dependents
    state.dependents = dict(known)
    waits_for, refused = first_gates(state, NEW, spec)
    state.dependents = known
    return Job(
        id=NEW, seq=1 << 60, spec=spec, code=None, submitted_ms=now_ms, since_ms=now_ms,
        priority=spec.compute.priority, demand=demand_of(spec), held=spec.schedule.hold, waits_for=waits_for,
        refused=refused,
    )  # fmt: skip


def _ahead_of_new(state: State, job: Job) -> int:
    lanes = state.waiting.queues.get(job.queue, {})
    key = (True, -job.priority, job.seq, job.id)
    return sum(bisect_left(keys, key) for lane, keys in lanes.items() if lane.priority_class == job.class_name)


def queues(cycle: Cycle) -> QueuesTold:
    """Shares, usage, borrowing, and what waits."""
    state, board = cycle.state, cycle.board
    order: list[str] = []
    stack = list(reversed(board.tree.children.get(ROOT, ())))
    while stack:
        name = stack.pop()
        order.append(name)
        stack += reversed(board.tree.children.get(name, ()))
    waiting = _waiting(cycle)
    gone = sorted(
        {*waiting, *(name for name, held in state.usage.held.items() if held[ALL])} - board.tree.queues.keys()
    )
    return QueuesTold(
        seq=state.seq,
        at_ms=cycle.now_ms,
        version=state.version,
        gpus=gpus_of(board.totals[ALL]),
        gpus_free=gpus_of(sum(sum(state.capacity.left(n.name)[0]) for n in state.nodes.values() if n.takes_work)),
        gpus_claimed=gpus_of(1000 * len(state.claimed)),
        queues=(*(_status(cycle, name, waiting) for name in order), *(_gone(state, name, waiting) for name in gone)),
    )


def _gone(state: State, name: str, waiting: dict[str, tuple[int, int, list[WaitingShape]]]) -> QueueStatus:
    """A queue that the configuration does not have any more, as long as it has jobs: they must be seen somewhere."""
    jobs, milli, shapes = waiting.get(name, (0, 0, []))
    held = state.usage.held.get(name, {})
    return QueueStatus(
        name=name, parent=None, weight=0, nominal=None, limit=None, lend=None, used=gpus_of(held.get(ALL, 0)),
        borrowed=0, lent=0, used_by_model={m: gpus_of(n) for m, n in sorted(held.items()) if m != ALL and n},
        active_jobs=state.usage.active.get(name, 0), waiting_jobs=jobs, waiting_gpus=gpus_of(milli), share=0,
        past_gpu_hours=0, window_open=False, shapes=tuple(shapes),
    )  # fmt: skip


def _waiting(cycle: Cycle) -> dict[str, tuple[int, int, list[WaitingShape]]]:
    """By queue: jobs, thousandths of GPUs and shapes that wait in it, not below it."""
    state = cycle.state
    found: dict[str, tuple[int, int, list[WaitingShape]]] = {}
    for queue, lanes in state.waiting.queues.items():
        jobs, milli, shapes = 0, 0, []
        for lane, keys in lanes.items():
            first = state.jobs[keys[0][3]]
            asked = len(keys) * first.milli
            jobs, milli = jobs + len(keys), milli + asked
            told: Reason | None = next(iter(cycle.why(first)), None)
            shapes.append(
                WaitingShape(
                    shape=shape_of(lane), priority_class=lane.priority_class, jobs=len(keys), gpus=gpus_of(asked),
                    first_job=first.id, waiting_ms=max(0, cycle.now_ms - first.since_ms),
                    reason=told.code if told else "", message=told.message if told else "",
                )
            )  # fmt: skip
        shapes.sort(key=lambda s: (-s.jobs, s.first_job))
        found[queue] = (jobs, milli, shapes[:MOST_SHAPES])
    return found


def shape_of(lane: Lane) -> str:
    """A lane's demand, for people: 2 nodes x 8 H100."""
    demand = lane.demand
    kind = "|".join(demand.models) or "ANY"
    each = f"{demand.gpus} {kind}" if demand.milli == 1000 else f"{demand.gpus} x {gpus_of(demand.milli):g} {kind}"
    host = f", {demand.cpu / 1000:g} cores" if demand.cpu else ""
    host += f", {demand.memory / 1024:g} GiB" if demand.memory else ""
    return (f"{demand.nodes} nodes x " if demand.nodes > 1 else "") + each + host


def _status(cycle: Cycle, name: str, waiting: dict[str, tuple[int, int, list[WaitingShape]]]) -> QueueStatus:
    state, board = cycle.state, cycle.board
    tree, usage = board.tree, state.usage
    queue, bound = tree.queues[name], tree.bounds[name][ALL]
    used = usage.of(name)
    half_life = int(state.cluster.scheduling.half_life_hours * MS_IN_HOUR)
    below = [q for q in tree.queues if name in usage.path(q)]
    idle = max(0, (bound.nominal or 0) - used)
    lendable = idle if bound.lend is None else min(idle, bound.lend)
    others = sum(max(0, borrowed(tree, usage, q)) for q in tree.children.get(tree.parent(name), ()) if q != name)
    return QueueStatus(
        name=name,
        parent=queue.parent,
        weight=queue.weight,
        nominal=queue.gpus.nominal,
        limit=queue.gpus.limit,
        lend=queue.gpus.lend,
        used=gpus_of(used),
        borrowed=gpus_of(max(0, borrowed(tree, usage, name))),
        lent=gpus_of(min(lendable, others)),
        used_by_model={m: gpus_of(n) for m, n in sorted(usage.held.get(name, {}).items()) if m != ALL and n},
        active_jobs=usage.active.get(name, 0),
        waiting_jobs=sum(waiting[q][0] for q in below if q in waiting),
        waiting_gpus=gpus_of(sum(waiting[q][1] for q in below if q in waiting)),
        share=share(tree, usage, board.totals, name, {}, cycle.now_ms, half_life) * queue.weight // 1000,
        past_gpu_hours=round(usage.past_of(name, cycle.now_ms, half_life) / 1000 / MS_IN_HOUR, 3),
        window_open=queue.window is None or state.windows.get(queue.window, False),
        shapes=tuple(waiting[name][2]) if name in waiting else (),
    )
