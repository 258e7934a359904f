"""The state as bytes and back. What follows from the rest is not kept, but made anew and so cannot disagree with it."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import TypeAdapter

from stoker_proto import REGISTRY, Cluster

from .fragments import Mix, Shape
from .leaving import OVER
from .placement import Capacity
from .queueing import is_firm, lane_of
from .state import Claim, Job, Node, Over, State
from .usage import Past, Usage
from .waiting import Place


class Saved(NamedTuple):
    """What of a state is kept. Jobs that are over are a list of ids, and for each how it ended."""

    seq: int
    at_ms: int
    decision_seq: int
    led_seq: int
    led_ms: int
    cluster: Cluster
    version: int
    windows: dict[str, bool]
    jobs: list[Job]
    over: list[str]
    ended: list[int]
    ends: list[Over]
    active: list[str]
    gated: list[str]
    ending: list[str]
    untold: list[str]
    dependents: dict[str, tuple[str, ...]]
    deadlines: dict[str, int]
    claims: list[Claim]
    nodes: list[Node]
    past: list[tuple[str, int, int]]
    counts: list[tuple[Shape, int]]
    mix: Mix
    total: int
    renew_at: int
    tested: list[tuple[tuple[str, ...], int]]
    preempted_ms: tuple[int, ...]
    to_announce: list[tuple[str, str, dict[str, Any]]]
    voided: int
    ignored: int
    layout: int


SAVED: TypeAdapter[Saved] = TypeAdapter(Saved)


def dump(state: State) -> bytes:
    ends = list(dict.fromkeys(state.over.values()))
    number = {over: at for at, over in enumerate(ends)}
    popular = state.popular
    saved = Saved(
        seq=state.seq,
        at_ms=state.at_ms,
        decision_seq=state.decision_seq,
        led_seq=state.led_seq,
        led_ms=state.led_ms,
        cluster=state.cluster,
        version=state.version,
        windows=state.windows,
        jobs=list(state.jobs.values()),
        over=list(state.over),
        ended=[number[over] for over in state.over.values()],
        ends=ends,
        active=list(state.active),
        gated=list(state.gated),
        ending=list(state.ending),
        untold=list(state.untold),
        dependents=state.dependents,
        deadlines=state.deadlines,
        claims=list(state.claims.values()),
        nodes=list(state.nodes.values()),
        past=[(queue, past.value, past.at_ms) for queue, past in state.usage.past.items()],
        counts=list(popular.counts.items()),
        mix=popular.mix,
        total=popular.total,
        renew_at=popular.renew_at,
        tested=list(state.tested.items()),
        preempted_ms=state.preempted_ms,
        to_announce=[(k, e.type_name, e.model_dump(mode="json")) for k, e in state.to_announce.items()],
        voided=state.voided,
        ignored=state.ignored,
        layout=state.layout,
    )
    return SAVED.dump_json(saved)


def load(data: bytes) -> State:
    """The state that was dumped. Raises ValueError when these bytes are none."""
    saved = SAVED.validate_json(data)
    ends = [OVER.setdefault((over.state, over.outcome), over) for over in saved.ends]
    state = State(
        seq=saved.seq, at_ms=saved.at_ms, decision_seq=saved.decision_seq, led_seq=saved.led_seq, led_ms=saved.led_ms,
        cluster=saved.cluster,
        version=saved.version, windows=saved.windows, jobs={job.id: job for job in saved.jobs},
        over=dict(zip(saved.over, [ends[at] for at in saved.ended], strict=True)),
        active=dict.fromkeys(saved.active), gated=dict.fromkeys(saved.gated), ending=dict.fromkeys(saved.ending),
        untold=dict.fromkeys(saved.untold), dependents=saved.dependents, deadlines=saved.deadlines,
        claims={claim.job_id: claim for claim in saved.claims}, nodes={node.name: node for node in saved.nodes},
        tested=dict(saved.tested), preempted_ms=saved.preempted_ms,
        to_announce={key: REGISTRY[name].model_validate(event) for key, name, event in saved.to_announce},
        voided=saved.voided, ignored=saved.ignored, layout=saved.layout,
    )  # fmt: skip
    popular = state.popular
    popular.counts, popular.mix = dict(saved.counts), saved.mix
    popular.total, popular.renew_at = saved.total, saved.renew_at
    state.usage = Usage({queue.name: queue.parent for queue in state.cluster.queues})
    state.usage.past = {queue: Past(value, at_ms) for queue, value, at_ms in saved.past}
    _nodes(state)
    _active(state)
    for job in state.jobs.values():
        if job.state == "queued" and not job.gated:
            key = (not job.boosted, -job.priority, job.seq, job.id)
            state.waiting.add(job.id, Place(job.queue, lane_of(job), key))
    for claim in state.claims.values():
        for allocation in claim.allocations:
            state.claimed.update(((allocation.node, uuid), claim.job_id) for uuid in allocation.gpus)
    return state


def _nodes(state: State) -> None:
    state.capacity = Capacity()
    for node in state.nodes.values():
        state.owner[node.name] = {}
        state.at[node.name] = {gpu.uuid: index for index, gpu in enumerate(node.gpus)}
        state.capacity.join(node.name, [gpu.model for gpu in node.gpus], node.cpu_milli, node.memory_mib)


def _active(state: State) -> None:
    for job_id in state.active:
        job = state.jobs[job_id]
        firm = is_firm(state, job)
        state.usage.count(job.queue, 1)
        kind = (job.queue, job.class_name)
        state.running[kind] = state.running.get(kind, 0) + 1
        if job.array_id:
            state.arrays[job.array_id] = state.arrays.get(job.array_id, 0) + 1
        for part in job.attempt.parts if job.attempt else ():
            if part.released_ms is None:
                held = part.allocation
                owner, at = state.owner[held.node], state.at[held.node]
                for uuid in held.gpus:
                    owner.setdefault(uuid, {})[job_id] = held.milli
                gpus = [at[uuid] for uuid in held.gpus]
                state.capacity.take(held.node, gpus, held.milli, held.cpu_milli, held.memory_mib)
                state.usage.add(job.queue, part.charge, firm=firm)
