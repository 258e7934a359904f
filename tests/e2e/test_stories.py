"""What users live through, on the whole system."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from stoker import Client
from stoker_chassis.device_simulated import inject
from stoker_local.supervisor import System
from stoker_proto import ProblemError

JOBS = Path(__file__).parent / "jobs"
COMMAND = {"experiment_name": "story", "compute": {"accelerator_type": "GPU_1xSIM", "num_accelerators": 1}}

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


async def ended(client: Client, job_id: str) -> dict[str, Any]:
    job = await asyncio.to_thread(client.wait, job_id, timeout=90)
    assert job["state"] not in ("queued", "active"), f"{job_id} did not end: {job}"
    return job


async def verdict_of(client: Client, node: str, wanted: str) -> dict[str, Any]:
    """The node's view once its verdict is the wanted one."""
    async with asyncio.timeout(60):
        while True:
            view = next(n for n in await asyncio.to_thread(client.nodes) if n["node"] == node)
            if view["verdict"] == wanted:
                return view
            await asyncio.sleep(0.1)


async def test_a_node_with_wrong_sums_is_named_and_the_job_starts_elsewhere_uncounted(
    system: System, client: Client
) -> None:
    for node in ("node-1", "node-2", "node-3"):  # equal nodes are taken by name, once all of them work
        await verdict_of(client, node, "ready")
    inject(system.layout.sim, "node-1", 0, "wrong_sum")
    try:
        job = await asyncio.to_thread(client.submit, JOBS / "gang" / "job.yaml")
        job = await ended(client, job["job_id"])
        assert job["state"] == "succeeded"
        first, second = job["attempts"]
        assert "node-1" in first["nodes"]
        assert first["outcome"] == "preflight_failed"
        assert "node-1" not in second["nodes"]
        view = await verdict_of(client, "node-1", "quarantined")
        assert "all-reduce wrong at rank" in view["reason"]
        lines = [line["line"] for line in client.logs(job["job_id"])]
        assert lines == ["sum 6"] * 4
    finally:
        inject(system.layout.sim, "node-1", 0, "clear")
    await asyncio.to_thread(client.retest, "node-1", "the GPU was replaced")
    await verdict_of(client, "node-1", "ready")


async def test_a_re_test_that_fails_releases_nothing(system: System, client: Client) -> None:
    inject(system.layout.sim, "node-3", 1, "xid", 79)
    await verdict_of(client, "node-3", "quarantined")
    await asyncio.to_thread(client.retest, "node-3", "hoping")
    events = [e["type"] for e in client.events() if e["subject"].startswith("stoker.event.node.node-3.")]
    async with asyncio.timeout(30):
        while events[-1] != "stoker.node.self_tested.v1":
            await asyncio.sleep(0.1)
            events = [e["type"] for e in client.events() if e["subject"].startswith("stoker.event.node.node-3.")]
    assert (await verdict_of(client, "node-3", "quarantined"))["reason"].startswith("XID 79")
    inject(system.layout.sim, "node-3", 1, "clear")
    await asyncio.to_thread(client.retest, "node-3", "repaired")
    await verdict_of(client, "node-3", "ready")


async def test_a_user_error_is_not_retried_and_says_what_happened_where(client: Client) -> None:
    job = await asyncio.to_thread(client.submit, JOBS / "broken" / "job.yaml")
    job = await ended(client, job["job_id"])
    assert job["state"] == "failed"
    assert len(job["attempts"]) == 1
    told = client.explain(job["job_id"])["problem"]
    assert (told["code"], told["origin"], told["retryable"]) == ("python_exception", "user", False)
    assert told["detail"] == "ValueError: no such dataset: docs/v3"
    assert 'load("docs/v3")' in "\n".join(e["line"] for e in told["evidence"])


async def test_a_spec_that_can_never_fit_says_which_shape_does(client: Client) -> None:
    asked = {"accelerator_type": "GPU_4xSIM", "num_accelerators": 16}
    with pytest.raises(ProblemError) as refused:
        await asyncio.to_thread(client.submit, COMMAND | {"compute": asked, "command": "true"})
    told = refused.value.problem
    assert told.code == "never_fits"
    assert told.facts["nearest"] == {"accelerator_type": "GPU_2xSIM", "num_accelerators": 6}
    assert not [j for j in client.list()["jobs"] if j["spec"]["compute"] == asked | {"priority_class": "NORMAL"}]


async def test_the_same_key_gives_the_same_job_even_when_the_gateway_died_between(
    system: System, client: Client
) -> None:
    spec = COMMAND | {"command": "true"}
    first = await asyncio.to_thread(client.submit, spec, idempotency_key="night-1")
    pid = system.children["gateway"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    again = await asyncio.to_thread(client.submit, spec, idempotency_key="night-1")
    assert again["job_id"] == first["job_id"]
    with pytest.raises(ProblemError) as refused:
        await asyncio.to_thread(client.submit, spec | {"command": "false"}, idempotency_key="night-1")
    assert refused.value.problem.code == "idempotency_key_reused"


async def test_a_command_runs_once_per_node_with_the_nodes_environment(client: Client) -> None:
    spec = COMMAND | {"command": "echo $NODE_RANK of $NUM_NODES at $MASTER_ADDR; echo oops >&2; exit 3"}
    job = await asyncio.to_thread(client.submit, spec)
    job = await ended(client, job["job_id"])
    assert job["problem"]["code"] == "exit_code"
    lines = {(line["stream"], line["line"]) for line in client.logs(job["job_id"])}
    assert lines == {("stdout", "0 of 1 at 127.0.0.1"), ("stderr", "oops")}


async def test_a_running_job_is_cancelled_with_everything_it_started(client: Client) -> None:
    spec = COMMAND | {"command": "sleep 600 & echo started; wait", "limits": {"grace_seconds": 1}}
    job = await asyncio.to_thread(client.submit, spec)

    def first_line() -> str:
        return str(next(client.logs(job["job_id"], follow=True))["line"])

    assert await asyncio.to_thread(first_line) == "started"
    cancelling = await asyncio.to_thread(client.cancel, job["job_id"], "enough")
    assert cancelling["cancelling"] or cancelling["state"] == "cancelled"
    job = await ended(client, job["job_id"])
    assert (job["state"], job["outcome"]) == ("cancelled", "cancelled")
    holds = [h for n in await asyncio.to_thread(client.nodes) for h in n["holds"]]
    assert not [h for h in holds if h.startswith(job["job_id"])]


async def test_a_job_that_waits_says_for_what(system: System, client: Client) -> None:
    long = COMMAND | {"command": "sleep 600", "compute": {"accelerator_type": "GPU_2xSIM", "num_accelerators": 6}}
    first = await asyncio.to_thread(client.submit, long)
    second = await asyncio.to_thread(client.submit, COMMAND | {"command": "true"})
    try:
        async with asyncio.timeout(30):
            while not (told := client.explain(second["job_id"])["reasons"]):
                await asyncio.sleep(0.1)
        assert told[0]["code"] == "gpus_busy"
        assert told[0]["blockers"] == [first["job_id"]]
    finally:
        await asyncio.to_thread(client.cancel, first["job_id"])
    assert (await ended(client, second["job_id"]))["state"] == "succeeded"
