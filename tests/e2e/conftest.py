"""One local system for all end-to-end tests: three simulated nodes, two schedulers, a real MLflow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from stoker import Client
from stoker_local.supervisor import Plan, System, running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    async with running(Plan(data=tmp_path_factory.mktemp("system"), schedulers=2), print) as up:
        yield up


@pytest.fixture
def client(system: System) -> Iterator[Client]:
    with Client(system.card.url, system.card.token) as client:
        yield client
