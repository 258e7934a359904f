"""Fixtures: a real nats-server, a bus on it, and a bus that is in memory or real by turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stoker_chassis.jetstream import connect
from stoker_chassis.memory import memory_bus
from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats


@pytest_asyncio.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    """A nats-server of its own for one test."""
    async with EmbeddedNats(tmp_path / "nats") as server:
        yield server


@pytest_asyncio.fixture
async def bus(nats_server: EmbeddedNats) -> AsyncIterator[Bus]:
    """A bus on a fresh real server."""
    async with connect(nats_server.url, "test") as bus:
        yield bus


@pytest_asyncio.fixture(params=["memory", "jetstream"])
async def either_bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    """The same contract, twice: a bus in memory, then one on a fresh real server."""
    if request.param == "memory":
        yield memory_bus(tmp_path / "blobs")
        return
    async with EmbeddedNats(tmp_path / "nats") as server, connect(server.url, "test") as bus:
        yield bus
