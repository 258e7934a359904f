"""The command line against a true gateway on a real log; the test plays every other service."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker_chassis.jetstream import connect
from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats
from stoker_proto import Allocation, AttemptPlaced, JobFinished, Problem
from tests.unit.client_gateway import TOKEN, Gateway

SPEC = """\
experiment_name: cli
compute:
  accelerator_type: GPU_1xANY
  num_accelerators: 1
code_source: {root_path: code}
entrypoint: train.py
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    @contextlib.asynccontextmanager
    async def open_bus() -> AsyncIterator[Bus]:
        folder = tmp_path_factory.mktemp("nats")
        async with EmbeddedNats(folder) as server, connect(server.url, "test") as bus:
            yield bus

    with Gateway(open_bus) as running:
        yield running


@dataclass(frozen=True)
class Said:
    """How one command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Stoker = Callable[..., Said]


@pytest.fixture
def stoker(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Stoker:
    """Runs one `stoker` command line in this process."""
    monkeypatch.setenv("STOKER_URL", gateway.url)
    monkeypatch.setenv("STOKER_TOKEN", TOKEN)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["stoker", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return Said(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec file with its code beside it."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('hello')\n")
    path = tmp_path / "job.yaml"
    path.write_text(SPEC)
    return path


def placed(job_id: str, node: str = "node-1", attempt: int = 1) -> AttemptPlaced:
    allocation = Allocation(node=node, boot_epoch="b1", gpus=("g0",), node_rank=0)
    return AttemptPlaced(job_id=job_id, attempt=attempt, fence=1, allocations=(allocation,), preflight="fresh")


def finished(job_id: str, state: Any = "succeeded", told: Problem | None = None) -> JobFinished:
    outcome: Any = {"succeeded": "ok", "failed": "user_error", "cancelled": "cancelled", "expired": "timeout"}[state]
    return JobFinished(job_id=job_id, state=state, outcome=outcome, attempts=1, gpu_ms=2_000, problem=told)
