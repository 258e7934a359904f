"""From an assignment to what is started on this node: processes, environment, files. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker_proto import Assignment


@dataclass(frozen=True)
class Rendezvous:
    """What the head node settled for the whole gang."""

    master_addr: str
    master_port: int
    resume_path: str | None = None
    resume_step: int | None = None


@dataclass(frozen=True)
class Places:
    """Where things lie on this node, as absolute paths."""

    attempt_dir: str
    code_dir: str
    checkpoint_dir: str
    parameters: str


@dataclass(frozen=True)
class Process:
    """One process to start. `script` runs in a fork of the warm worker; else `argv` is executed."""

    rank: int
    gpus: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    script: str | None
    argv: tuple[str, ...]
    args: tuple[str, ...]


def key_of(assignment: Assignment, rank: int) -> str:
    """The warm worker's key of a process: the same one after every restart."""
    return f"{assignment.job_id}/{assignment.attempt}/{assignment.fence}/{rank}"


def plan(
    assignment: Assignment, node: str, meet: Rendezvous, places: Places, inherited: Mapping[str, str]
) -> tuple[Process, ...]:
    """The node's processes: a rank a GPU for an entrypoint, one shell for a command.

    `inherited` is the part of the launcher's own environment that jobs see. The GPUs' visibility is added by whoever
    knows the devices.
    """
    here = assignment.here(node)
    spec = assignment.spec
    node_count = len(assignment.allocations)
    per_node = len(here.gpus)
    common = dict(inherited) | {
        "MASTER_ADDR": meet.master_addr,
        "MASTER_PORT": str(meet.master_port),
        "NUM_NODES": str(node_count),
        "NODE_RANK": str(here.node_rank),
        "CODE_SOURCE_PATH": places.code_dir,
        "STOKER_JOB_ID": assignment.job_id,
        "STOKER_ATTEMPT": str(assignment.attempt),
        "STOKER_NODE": node,
        "STOKER_CHECKPOINT_DIR": places.checkpoint_dir,
        "STOKER_PARAMETERS": places.parameters,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    if meet.master_addr == "127.0.0.1":
        common["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo resolves the host's name, which need not lead anywhere
    if here.milli < 1000:
        common["STOKER_GPU_FRACTION"] = f"{here.milli / 1000:g}"
    if assignment.array_id is not None and spec.array is not None:
        common |= {
            "STOKER_ARRAY_ID": assignment.array_id,
            "STOKER_ARRAY_INDEX": str(assignment.array_index),
            "STOKER_ARRAY_SIZE": str(spec.array.size),
        }
    if spec.outputs.checkpoints is not None:
        common["STOKER_CHECKPOINT_KEEP"] = str(spec.outputs.checkpoints.keep)
    if meet.resume_path is not None:
        common["STOKER_RESUME_FROM"] = meet.resume_path
    common |= spec.env_variables
    if spec.command is not None:
        env = common | _files(places, here.node_rank)
        argv = ("bash", "-c", spec.command)
        return (Process(here.node_rank, here.gpus, tuple(sorted(env.items())), None, argv, ()),)
    processes = []
    for local_rank, gpu in enumerate(here.gpus):
        rank = here.node_rank * per_node + local_rank
        env = common | {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(node_count * per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GROUP_RANK": str(here.node_rank),
        }
        env |= _files(places, rank)
        script = f"{places.code_dir}/{spec.entrypoint}"
        processes.append(Process(rank, (gpu,), tuple(sorted(env.items())), script, (), spec.args))
    return tuple(processes)


def _files(places: Places, rank: int) -> dict[str, str]:
    """Where a process tells its metrics, and that it heard of a stop."""
    base = f"{places.attempt_dir}/rank-{rank}"
    return {"STOKER_METRICS_FILE": f"{base}.metrics", "STOKER_STOP_FILE": f"{base}.stop"}
