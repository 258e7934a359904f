"""From an assignment to processes: the whole answer, for an entrypoint and for a command."""

from __future__ import annotations

from typing import Any

from stoker_launcher.plan import Places, Rendezvous, key_of, plan
from stoker_proto import Allocation, Assignment
from tests.builders import spec

MEET = Rendezvous("10.0.0.1", 20123, "/data/checkpoints/j/step-0000000010", 10)
PLACES = Places("/node/attempts/j-2-7", "/node/code/abc", "/data/checkpoints/j", "/node/attempts/j-2-7/parameters.json")
SHARED = {
    "PATH": "/bin", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20123", "NUM_NODES": "2", "NODE_RANK": "1",
    "CODE_SOURCE_PATH": "/node/code/abc", "STOKER_JOB_ID": "j", "STOKER_ATTEMPT": "2", "STOKER_NODE": "b",
    "STOKER_CHECKPOINT_DIR": "/data/checkpoints/j", "STOKER_PARAMETERS": "/node/attempts/j-2-7/parameters.json",
    "STOKER_RESUME_FROM": "/data/checkpoints/j/step-0000000010", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def assignment(**spec_fields: Any) -> Assignment:
    return Assignment(
        job_id="j", attempt=2, fence=7, want="run", spec=spec(nodes=2, per_node=2, **spec_fields), code="abc",
        allocations=(
            Allocation(node="a", boot_epoch="1", gpus=("a0", "a1"), node_rank=0),
            Allocation(node="b", boot_epoch="1", gpus=("b0", "b1"), node_rank=1),
        ),
        preflight="fresh",
    )  # fmt: skip


def test_an_entrypoint_is_one_rank_a_gpu() -> None:
    first, second = plan(assignment(args=("--x", "1")), "b", MEET, PLACES, {"PATH": "/bin"})
    assert (first.rank, first.gpus, second.rank, second.gpus) == (2, ("b0",), 3, ("b1",))
    assert (first.script, first.args, first.argv) == ("/node/code/abc/train.py", ("--x", "1"), ())
    assert dict(second.env) == SHARED | {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "STOKER_METRICS_FILE": "/node/attempts/j-2-7/rank-3.metrics",
        "STOKER_STOP_FILE": "/node/attempts/j-2-7/rank-3.stop",
    }  # fmt: skip


def test_a_command_is_one_shell_a_node_that_sees_all_its_gpus() -> None:
    (only,) = plan(assignment(entrypoint=None, command="make train"), "b", MEET, PLACES, {"PATH": "/bin"})
    assert (only.rank, only.gpus, only.script) == (1, ("b0", "b1"), None)
    assert only.argv == ("bash", "-c", "make train")
    assert dict(only.env) == SHARED | {
        "STOKER_METRICS_FILE": "/node/attempts/j-2-7/rank-1.metrics",
        "STOKER_STOP_FILE": "/node/attempts/j-2-7/rank-1.stop",
    }


def test_what_the_user_sets_wins() -> None:
    chosen = {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"}
    first, _ = plan(assignment(env_variables=chosen), "b", MEET, PLACES, {})
    assert chosen.items() <= dict(first.env).items()


def test_without_a_checkpoint_nothing_is_resumed() -> None:
    first, _ = plan(assignment(), "b", Rendezvous("127.0.0.1", 1), PLACES, {})
    env = dict(first.env)
    assert "STOKER_RESUME_FROM" not in env
    assert "STOKER_CHECKPOINT_KEEP" not in env
    assert env["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_number_of_checkpoints_to_keep_is_told() -> None:
    first, _ = plan(assignment(outputs={"checkpoints": {"keep": 5}}), "b", MEET, PLACES, {})
    assert dict(first.env)["STOKER_CHECKPOINT_KEEP"] == "5"


def test_a_part_of_a_gpu_is_told_as_its_share() -> None:
    whole = assignment()
    parts = tuple(a.model_copy(update={"milli": 125}) for a in whole.allocations)
    first, _ = plan(whole.model_copy(update={"allocations": parts}), "b", MEET, PLACES, {})
    assert dict(first.env)["STOKER_GPU_FRACTION"] == "0.125"
    assert "STOKER_GPU_FRACTION" not in dict(plan(whole, "b", MEET, PLACES, {})[0].env)


def test_an_element_of_an_array_knows_its_place_in_it() -> None:
    made = assignment(array={"size": 12}).model_copy(update={"array_id": "sweep", "array_index": 0})
    first, _ = plan(made, "b", MEET, PLACES, {})
    told = {"STOKER_ARRAY_ID": "sweep", "STOKER_ARRAY_INDEX": "0", "STOKER_ARRAY_SIZE": "12"}
    assert told.items() <= dict(first.env).items()


def test_a_process_has_the_same_key_after_every_restart_and_another_one_in_another_attempt() -> None:
    made = assignment()
    assert key_of(made, 3) == "j/2/7/3"
    assert key_of(made.model_copy(update={"attempt": 3}), 3) != key_of(made, 3)
