"""What must hold after every event; each line says which promise it checks. Tests assert it, production samples it."""

from __future__ import annotations

from collections.abc import Iterator

from .apply import charge_of
from .fragments import WHOLE
from .queueing import is_firm, lane_of
from .state import State
from .usage import ALL


def violations(state: State) -> list[str]:
    """Every broken promise, in words; none is what should come back."""
    return [*_gpus(state), *_jobs(state), *_usage(state), *_waiting(state), *_claims(state)]


def _gpus(state: State) -> Iterator[str]:
    """INV1, INV3, INV5: a GPU is held whole or in parts that fit, by active attempts of this boot alone."""
    expected: dict[str, dict[str, dict[str, int]]] = {name: {} for name in state.nodes}
    for job_id in state.active:
        attempt = state.jobs[job_id].attempt
        if attempt is None:
            yield f"INV3 {job_id} is active without an attempt"
            continue
        if len(attempt.parts) != state.jobs[job_id].demand.nodes:
            yield f"INV3 {job_id} has {len(attempt.parts)} parts of {state.jobs[job_id].demand.nodes}"
        for part in attempt.parts:
            if part.released_ms is None:
                for uuid in part.allocation.gpus:
                    expected[part.allocation.node].setdefault(uuid, {})[job_id] = part.allocation.milli
    for name, gpus in expected.items():
        if gpus != state.owner[name]:
            yield f"INV1 the ledger of {name} is {state.owner[name]}, its attempts hold {gpus}"
        free, cpu, memory = state.capacity.left(name)
        for index, gpu in enumerate(state.nodes[name].gpus):
            held = state.held(name, gpu.uuid)
            if held > WHOLE:
                yield f"INV1 {gpu.uuid} is held {held} thousandths"
            if free[index] != WHOLE - held:
                yield f"INV1 {gpu.uuid} has {free[index]} free and {held} held"
        if cpu < 0 or memory < 0:
            yield f"INV1 {name} has {cpu} milli-cores and {memory} MiB left"


def _jobs(state: State) -> Iterator[str]:
    """INV2, INV5, INV14: one attempt at most, and only of active jobs; every stop has somebody who must confirm it."""
    for job_id, job in state.jobs.items():
        if job_id in state.over:
            yield f"INV5 {job_id} is over and alive"
        if (job.attempt is not None) != (job.state == "active") or (job_id in state.active) != (job.state == "active"):
            yield f"INV2 {job_id} is {job.state} with attempt {job.attempt and job.attempt.number}"
        if job.attempt is not None and job.attempt.number != job.attempts:
            yield f"INV2 {job_id} is at attempt {job.attempt.number} of {job.attempts}"
        if job.gpu_ms < 0 or job.preemptions < 0 or any(count < 0 for _, count in job.retried):
            yield f"INV4 {job_id} counts below zero"


def _usage(state: State) -> Iterator[str]:
    """INV4: what a queue is charged is the sum of its allocations, at every level, and never below zero."""
    held: dict[tuple[str, str], int] = {}
    firm: dict[tuple[str, str], int] = {}
    active: dict[str, int] = {}
    for job_id in state.active:
        job = state.jobs[job_id]
        for name in state.usage.path(job.queue):
            active[name] = active.get(name, 0) + 1
            for part in job.attempt.parts if job.attempt else ():
                if part.released_ms is None:
                    if part.charge != charge_of(state, part.allocation):
                        yield f"INV4 {job_id} is charged {part.charge}"
                    for model, milli in (*part.charge, (ALL, part.milli)):
                        held[name, model] = held.get((name, model), 0) + milli
                        if is_firm(state, job):
                            firm[name, model] = firm.get((name, model), 0) + milli
    for ledger, expected in ((state.usage.held, held), (state.usage.firm, firm)):
        for name, models in ledger.items():
            for model, milli in models.items():
                if milli != expected.pop((name, model), 0):
                    yield f"INV4 queue {name} is charged {milli} thousandths of {model or 'all GPUs'}"
        if expected:
            yield f"INV4 not charged: {expected}"
    for name, count in state.usage.active.items():
        if count != active.get(name, 0):
            yield f"INV4 queue {name} counts {count} active jobs of {active.get(name, 0)}"


def _waiting(state: State) -> Iterator[str]:
    """INV10, INV13: a queued job is in one lane, or gated, or about to end; nothing else is there."""
    for job_id, job in state.jobs.items():
        places = [job_id in state.waiting, job_id in state.gated, job_id in state.ending]
        if sum(places) != (job.state == "queued"):
            yield f"INV13 {job_id} is {job.state} and stands in {places}"
        if job.state == "queued" and job.gated == places[0]:
            yield f"INV10 {job_id} is gated and can start"
        if places[0]:
            place = state.waiting.place(job_id)
            if place.lane != lane_of(job) or place.key != (not job.boosted, -job.priority, job.seq, job_id):
                yield f"INV13 {job_id} stands in the wrong lane"
    strays = [j for j in (*state.waiting, *state.gated, *state.ending, *state.untold) if j not in state.jobs]
    if strays:
        yield f"INV13 {strays} wait and are not there"


def _claims(state: State) -> Iterator[str]:
    """INV7: what is claimed is claimed for one waiting job."""
    claimed = {}
    for job_id, claim in state.claims.items():
        job = state.jobs.get(job_id)
        rejoins = claim.until_ms is not None and job is not None and job.state == "active" and not job.cancel
        if not rejoins and (job is None or job.state != "queued" or job.gated):
            yield f"INV7 {job_id} has a claim and does not wait"
        for allocation in claim.allocations:
            for uuid in allocation.gpus:
                if (allocation.node, uuid) in claimed:
                    yield f"INV7 {uuid} is claimed twice"
                claimed[(allocation.node, uuid)] = job_id
    if claimed != state.claimed:
        yield "INV7 the index of claims is wrong"
