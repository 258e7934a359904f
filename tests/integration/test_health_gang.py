"""Two nodes with real agents and real probes: they prove themselves, their gangs, and whose fault a failure was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stoker_chassis.device_simulated import inject
from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats
from stoker_proto import (
    Allocation,
    AttemptExited,
    AttemptPlaced,
    FindingRecorded,
    JobFailureAttributed,
    NodeQuarantined,
    NodeReady,
    NodeReleased,
    NodeUnknown,
    PreflightFailed,
    PreflightPassed,
    PreflightStarted,
    RankExit,
    RetestRequested,
    SelfTested,
)

from .health_nodes import GPUS, Nodes, health_nodes


@pytest_asyncio.fixture
async def nodes(nats_server: EmbeddedNats, bus: Bus, tmp_path: Path) -> AsyncIterator[Nodes]:
    async with health_nodes(bus, nats_server.url, tmp_path) as nodes:
        yield nodes


def placed(job: str, *names: str) -> AttemptPlaced:
    allocations = tuple(
        Allocation(node=n, boot_epoch="b1", gpus=tuple(f"SIM-{n}-{i}" for i in range(GPUS)), node_rank=rank)
        for rank, n in enumerate(names)
    )
    return AttemptPlaced(job_id=job, attempt=1, fence=1, allocations=allocations, preflight="required")


@pytest.mark.slow
async def test_a_gang_is_proven_and_a_node_that_adds_wrong_is_named_quarantined_and_released_once_mended(
    nodes: Nodes,
) -> None:
    await nodes.join("n1", "n2")
    await nodes.told(NodeReady, 2)

    await nodes.tell(placed("right", "n1", "n2"))
    [passed] = await nodes.told(PreflightPassed, job_id="right")
    assert passed.nodes == ("n1", "n2")

    inject(nodes.sim, "n2", 1, "wrong_sum")
    await nodes.tell(placed("wrong", "n1", "n2"))
    [failed] = await nodes.told(PreflightFailed, job_id="wrong")
    assert (failed.nodes, failed.detail) == (("n2",), "n2: all-reduce wrong at rank 3")
    [quarantined] = await nodes.told(NodeQuarantined)
    assert (quarantined.node, quarantined.rule) == ("n2", "finding:allreduce_sum")
    found = await nodes.told(FindingRecorded)
    assert quarantined.evidence == tuple(f.finding_id for f in found)

    await nodes.tell(RetestRequested(node="n2"))
    [still] = await nodes.told(SelfTested, cause="retest")
    assert not still.passed

    inject(nodes.sim, "n2", 1, "clear")
    await nodes.tell(RetestRequested(node="n2"))
    [released] = await nodes.told(NodeReleased)
    assert released.node == "n2"
    assert [r.passed for r in await nodes.told(SelfTested, 2, cause="retest")] == [False, True]


@pytest.mark.slow
async def test_an_agent_killed_in_a_preflight_comes_back_into_it_and_a_dead_one_is_called_silent(nodes: Nodes) -> None:
    await nodes.join("n1", "n2")
    await nodes.told(NodeReady, 2)
    nodes.kill("n2")

    await nodes.tell(placed("job", "n1", "n2"))
    await nodes.told(PreflightStarted, node="n1")
    nodes.kill("n1")
    nodes.agent("n1")
    nodes.agent("n2")
    [passed] = await nodes.told(PreflightPassed)
    assert passed.nodes == ("n1", "n2")
    starts = [s.node for s in await nodes.told(PreflightStarted, 2, round=1)]
    assert sorted(starts) == ["n1", "n2"]
    assert len(await nodes.told(SelfTested, 2)) == 2  # coming back is no reason to test again

    end = await nodes.bus.log.end()
    nodes.kill("n1")
    await nodes.told(NodeUnknown, node="n1", after=end)
    nodes.agent("n1")
    await nodes.told(NodeReady, node="n1", after=end)


@pytest.mark.slow
async def test_a_lost_gpu_is_found_within_a_second_and_takes_the_blame_for_the_gang(nodes: Nodes) -> None:
    await nodes.join("n1", "n2")
    await nodes.told(NodeReady, 2)
    await nodes.tell(placed("job", "n1", "n2").model_copy(update={"preflight": "fresh"}))
    before = (await nodes.records())[-1].at_ms

    inject(nodes.sim, "n2", 0, "xid", 79)
    closed = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:41234"
    cascade = RankExit(rank=0, code=1, error_type="RuntimeError", error=closed)
    aborted = RankExit(rank=2, code=None, signal=6)
    for node, rank, outcome in (("n1", cascade, "infra_comm"), ("n2", aborted, "infra_gpu")):
        await nodes.tell(
            AttemptExited.model_validate(
                {
                    "job_id": "job", "attempt": 1, "node": node, "fence": 1, "outcome": outcome,
                    "ranks": (rank,), "before_stop": (rank.rank,),
                }
            )
        )  # fmt: skip
    [told] = await nodes.told(JobFailureAttributed)
    assert (told.outcome, told.blame, told.node, told.exclude_nodes) == ("infra_gpu", "node", "n2", ("n2",))
    [quarantined] = await nodes.told(NodeQuarantined)
    assert quarantined.node == "n2"
    at = next(r.at_ms for r in await nodes.records() if isinstance(r.event, NodeQuarantined))
    assert at - before < 2000
