"""Many small jobs on few GPUs: elements of an array that each need a part of one, on the whole system."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from stoker import Client
from stoker_chassis.jetstream import connect
from stoker_local.supervisor import System
from stoker_proto import AttemptPlaced, AttemptReleased, NodeJoined

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
SPEC = {
    "experiment_name": "sharing",
    "compute": {"accelerator_type": "GPU_1xSIM", "num_accelerators": 1, "gpu_fraction": 0.5},
    "command": "echo $STOKER_ARRAY_ID $STOKER_ARRAY_INDEX of $STOKER_ARRAY_SIZE with $STOKER_GPU_FRACTION; sleep 1",
    "array": {"size": 4},
}


async def test_elements_of_an_array_share_gpus_and_know_their_place(system: System, client: Client) -> None:
    made = await asyncio.to_thread(client.submit, SPEC)
    jobs: list[str] = made["jobs"]
    for index, job_id in enumerate(jobs):
        done = await asyncio.to_thread(client.wait, job_id, timeout=60)
        assert done["state"] == "succeeded"
        lines = [line["line"] for line in client.logs(job_id)]
        assert lines == [f"{made['array_id']} {index} of 4 with 0.5"]

    async with connect(system.card.nats_url, "test") as bus:
        records = [r async for r in bus.log.read()]
    on: dict[str, set[str]] = defaultdict(set)
    together = 0
    for event in (r.event for r in records):
        if isinstance(event, AttemptPlaced) and event.job_id in jobs:
            (part,) = event.allocations
            on[part.gpus[0]].add(event.job_id)
            assert len(on[part.gpus[0]]) <= 2, "a half and a half is a whole"
        if isinstance(event, AttemptReleased) and event.job_id in jobs:
            assert event.proof.startswith("process groups gone")
            for gpu in on.values():
                gpu.discard(event.job_id)
        together = max(together, *map(len, on.values()), 0)
    assert together == 2, "two at once on one GPU"
    racks = {r.event.node: r.event.labels.get("rack") for r in records if isinstance(r.event, NodeJoined)}
    assert racks == {f"node-{n}": "rack-0" for n in (1, 2, 3)}
