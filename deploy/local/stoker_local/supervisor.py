"""Starts, watches and stops the whole local system; one supervisor a data folder, and nothing of it outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stoker_chassis.clock import new_id
from stoker_proto import ProblemError, problem

from .layout import Card, Layout
from .lock import Owned, own
from .nats import EmbeddedNats
from .process import Child

Say = Callable[[str], None]
START_S = 180.0
RACK = 4


@dataclass(frozen=True)
class Plan:
    """What to start. With `gpus_per_node` None the node has this machine's real GPUs."""

    data: Path
    nodes: int = 3
    gpus_per_node: int | None = 2
    schedulers: int = 1
    port: int = 0
    mlflow: bool = True


@dataclass
class System:
    """A running local system."""

    plan: Plan
    layout: Layout
    card: Card
    nats: EmbeddedNats
    children: dict[str, Child] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def running(plan: Plan, say: Say) -> AsyncIterator[System]:
    """The local system, started and ready; on leaving, everything is stopped.

    Raises ProblemError when another supervisor owns the data folder or a part does not come up.
    """
    layout = Layout(plan.data.resolve())
    layout.make()
    with _only_one(layout), _lifeline() as lifeline:
        async with EmbeddedNats(layout.nats) as nats:
            say(f"event log up at {nats.url}")
            token = _token(layout)
            port, mlflow_port = plan.port or _free_port(), _free_port()
            card = Card(
                url=f"http://127.0.0.1:{port}",
                token=token,
                mlflow_url=f"http://127.0.0.1:{mlflow_port}",
                nats_url=nats.url,
                data_dir=str(layout.data),
            )
            system = System(plan, layout, card, nats)
            for child in _children(plan, layout, card, port, mlflow_port, lifeline, say):
                system.children[child.name] = child
            try:
                await asyncio.gather(*(child.start() for child in system.children.values()))
                await _all_ready(system, say)
                card = card.model_copy(update={"pids": {n: c.pid for n, c in system.children.items() if c.pid}})
                card.write(layout.card)
                yield system
            finally:
                say("stopping")
                layout.card.unlink(missing_ok=True)
                # Launchers go first: they stop their jobs while the log still takes their last words.
                first = [c for n, c in system.children.items() if n.startswith("launcher")]
                rest = [c for c in system.children.values() if c not in first]
                for group in (first, rest):
                    await asyncio.gather(*(child.stop() for child in group))


@contextlib.contextmanager
def _only_one(layout: Layout) -> Iterator[None]:
    try:
        lock = own(layout.lock)
    except Owned as owner:
        detail = f"A local system (process {owner}) already runs in {layout.data}"
        actions = ("stop it, or give another folder with --data",)
        raise ProblemError(problem("invalid_request", detail, next_actions=actions)) from None
    with lock:
        yield


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """A pipe whose write end only we hold: its end tells every descendant that we are gone."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(writer)
        os.close(reader)


def _token(layout: Layout) -> str:
    path = layout.data / "token"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(24))
    return path.read_text()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _children(
    plan: Plan, layout: Layout, card: Card, port: int, mlflow_port: int, lifeline: int, say: Say
) -> list[Child]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("STOKER_", "MLFLOW_", "_MLFLOW"))} | {
        "STOKER_NATS_URL": card.nats_url,
        "STOKER_DATA_DIR": str(layout.data),
        "STOKER_MLFLOW_URL": card.mlflow_url,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    if endpoint := os.environ.get("STOKER_OTLP_ENDPOINT"):
        base["STOKER_OTLP_ENDPOINT"] = endpoint

    def child(name: str, module: str, **env: str) -> Child:
        ready = layout.ready / name
        return Child(
            name=name,
            argv=[sys.executable, "-m", module],
            env=base | {"STOKER_INSTANCE": name, "STOKER_READY_FILE": str(ready)} | env,
            log=layout.logs / f"{name}.log",
            lifeline=lifeline,
            ready=ready,
            on_restart=lambda who, code: say(f"{who} ended with code {code}; starting it again"),
        )

    children = [child("gateway", "stoker_gateway", STOKER_PORT=str(port), STOKER_TOKEN=card.token)]
    children += [child(f"scheduler-{i}", "stoker_scheduler") for i in range(1, plan.schedulers + 1)]
    if plan.mlflow:
        children += [_mlflow(layout, mlflow_port, lifeline, base, say), child("tracker", "stoker_tracker")]
    # One epoch a supervisor: whatever ran under an earlier one was ended with it.
    epoch = new_id().lower()
    for number in range(1, plan.nodes + 1):
        env = node_env(plan, layout, number) | {"STOKER_BOOT_EPOCH": epoch}
        children.append(child(f"launcher-node-{number}", "stoker_launcher", **env))
        children.append(child(f"health-node-{number}", "stoker_health", **env))
    return children


def node_env(plan: Plan, layout: Layout, number: int) -> dict[str, str]:
    """What the services of one node are told; simulated nodes stand in racks of four."""
    env = {"STOKER_NODE": f"node-{number}"}
    if plan.gpus_per_node is not None:
        env |= {"STOKER_SIM_DIR": str(layout.sim), "STOKER_SIM_GPUS": str(plan.gpus_per_node)}
        env["STOKER_LABELS"] = f"rack=rack-{(number - 1) // RACK}"
    return env


def _mlflow(layout: Layout, port: int, lifeline: int, base: dict[str, str], say: Say) -> Child:
    argv = [sys.executable, "-m", "stoker_local.tether", sys.executable, "-m", "mlflow", "server"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    argv += ["--backend-store-uri", f"sqlite:///{layout.mlflow / 'mlflow.db'}"]
    argv += ["--artifacts-destination", str(layout.mlflow / "artifacts"), "--serve-artifacts"]
    return Child(
        name="mlflow",
        argv=argv,
        env=base,
        log=layout.logs / "mlflow.log",
        lifeline=lifeline,
        on_restart=lambda who, code: say(f"{who} ended with code {code}; starting it again"),
    )


async def _all_ready(system: System, say: Say) -> None:
    """Every service serves, or a Problem that says which does not and where its log is.

    MLflow is not waited for: it takes longest, and the tracker catches up once it is there.
    """
    deadline = time.monotonic() + START_S
    waiting = {name: child for name, child in system.children.items() if child.ready}
    while waiting:
        for name, child in list(waiting.items()):
            if child.ready and child.ready.exists():
                say(f"{name} up")
                del waiting[name]
            elif child.restarts > 5:
                raise _not_up(system, name, "keeps crashing")
        if time.monotonic() > deadline:
            raise _not_up(system, next(iter(waiting)), f"is not up after {START_S:.0f} s")
        await asyncio.sleep(0.1)


def _not_up(system: System, name: str, what: str) -> ProblemError:
    log = system.children[name].log
    tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["its log is empty"]
    return ProblemError(problem("internal", f"{name} {what}: {tail[0]} (see {log})"))
