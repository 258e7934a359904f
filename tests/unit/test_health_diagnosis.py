"""What the text of failed jobs tells, and above all what it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_health.diagnosis import diagnose
from stoker_health.signatures import SIGNATURES, signature
from stoker_proto import JobFailureAttributed

ROOT = Path(__file__).parents[2]


def told(*lines: str, code: int | None = None) -> tuple[str, str]:
    said = diagnose(lines, code)
    return said.failure, said.blame


def wait(rank: int, number: int) -> str:
    return f"[rank{rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE)"


def test_every_signature_has_a_source_and_only_what_can_be_a_cause_has_a_blame() -> None:
    assert len({row.name for row in SIGNATURES}) == len(SIGNATURES)
    for row in SIGNATURES:
        assert row.source
        assert row.role in ("root", "symptom", "confirmation") or row.blame == "unknown"
        assert row.blame != "node" or row.outcome or row.failure == "infra_storage", row.name
        assert row.confirms <= {r.name for r in SIGNATURES}
        assert bool(row.confirms) == (row.role == "confirmation")


def test_an_outcome_of_a_signature_is_one_that_an_attribution_may_have() -> None:
    outcomes = str(JobFailureAttributed.model_fields["outcome"].annotation)
    for row in SIGNATURES:
        assert row.outcome is None or f"'{row.outcome}'" in outcomes


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("RuntimeError: CUDA error: uncorrectable ECC error encountered",), ("infra_node", "node")),
        (("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",), ("user_error", "user")),
        (("OSError: [Errno 116] Stale file handle: '/data/x'",), ("infra_storage", "node")),
        (("OSError: [Errno 122] Disk quota exceeded",), ("infra_storage", "user")),
        (("OSError: [Errno 28] No space left on device: '/ckpt/a'",), ("infra_storage", "user")),
        (("NCCL WARN Call to posix_fallocate failed : No space left on device",), ("config", "user")),
        (("OSError: [Errno 5] Input/output error",), ("infra_storage", "unknown")),
        (("HTTPError: 503 Server Error: Service Unavailable for url",), ("transient_capacity", "unknown")),
        (("HTTPError: 401 Client Error: Unauthorized for url",), ("config", "user")),
        (("ModuleNotFoundError: No module named 'flash_attn'",), ("config", "user")),
        (("ValueError: too many values to unpack",), ("user_error", "user")),
        (("NCCL WARN NET/IB : Got completion with error 12, vendor err 129",), ("infra_network", "network")),
        (("mlx5_core 0000:1a:00.0: device's health compromised - reached miss count",), ("infra_node", "node")),
    ],
)
def test_a_line_that_names_its_cause_is_believed(lines: tuple[str, ...], expected: tuple[str, str]) -> None:
    assert told(*lines) == expected


def test_what_launchers_do_to_the_rest_never_hides_where_it_began() -> None:
    lines = (
        "WARNING Sending process 12 closing signal SIGTERM",
        "Root Cause (first observed failure): rank 3 exitcode: -15",
        "[rank3] Connection closed by peer",
        "[rank1] IndexError: list index out of range",
    )
    said = diagnose(lines)
    assert (said.failure, said.line) == ("user_error", 3)


def test_advice_that_libraries_add_to_every_error_decides_nothing() -> None:
    assert signature("CUDA kernel errors might be asynchronously reported at some other API call").role == "advice"  # type: ignore[union-attr]
    assert told("For debugging consider passing CUDA_LAUNCH_BLOCKING=1") == ("unknown", "unknown")


def test_hardware_that_names_itself_is_believed_although_another_error_came_first() -> None:
    lines = ("RuntimeError: CUDA error: out of memory", "kernel: EDAC MC0: 1 UE memory read error")
    assert told(*lines) == ("infra_node", "node")


def test_out_of_memory_is_the_nodes_fault_only_where_somebody_elses_process_holds_it() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert told(oom, "Process 4711 has 20.0 GiB memory in use") == ("user_error", "user")
    assert told(oom, "process 4711 (not in this job) has 70 GiB memory in use") == ("infra_node", "node")


def test_ranks_that_wait_far_apart_run_different_programs_and_the_one_behind_is_named() -> None:
    assert told(wait(0, 1580), wait(3, 1580)) == ("unknown", "unknown")
    said = diagnose((wait(0, 96120), wait(7, 64088)))
    assert (said.failure, said.blame) == ("user_error", "user")
    assert "Rank 7 is 32032 collectives behind" in said.hint


def test_a_nan_is_the_users_unless_it_depends_on_where_it_runs() -> None:
    assert told("loss is nan at step 12") == ("user_error", "user")
    assert told("loss is nan at step 12", "it happens only on one node") == ("unknown", "unknown")


def test_sigkill_alone_proves_nothing_and_the_kernels_word_does() -> None:
    assert told("ERROR failed (exitcode: -9) local_rank: 0") == ("unknown", "unknown")
    assert told(code=137) == ("unknown", "unknown")
    assert told("ERROR failed (exitcode: -9) local_rank: 0", "Detected 1 oom_kill event") == ("user_error", "user")


def test_what_nobody_knows_is_unknown_and_tried_again_elsewhere() -> None:
    said = diagnose(("ERROR failed (exitcode: 1) local_rank: 5",), 1)
    assert (said.failure, said.blame, said.retry, said.signature) == ("unknown", "unknown", True, None)


@given(st.lists(st.sampled_from([
    "Connection reset by peer", "ncclInternalError: Internal check failed.", wait(0, 5), "closing signal SIGTERM",
    "ChildFailedError", "Kernel errors might be asynchronously reported", "Tried to allocate more than 1EB memory",
]), max_size=8))  # fmt: skip
def test_what_only_followed_blames_nobody_in_whatever_order(lines: list[str]) -> None:
    assert told(*lines) == ("unknown", "unknown")


@given(st.lists(st.text(max_size=80), max_size=6), st.none() | st.integers(-64, 255))
def test_any_text_gets_an_answer_with_a_hint(lines: list[str], code: int | None) -> None:
    assert diagnose(lines, code).hint


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.blame", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_benchmark_counts_what_was_told_right_and_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    cases = [
        {"lines": ["GPU is lost"], "exit_code": None, "expected_class": "infra_node", "expected_blame": "node"},
        {"lines": ["GPU is lost"], "exit_code": None, "expected_class": "user_error", "expected_blame": "user"},
    ]
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(json.dumps(c) + "\n" for c in cases))
    assert json.loads(bench(str(file)).stdout.splitlines()[-1]) == {
        "class_accuracy": 0.5, "blame_accuracy": 0.5, "false_node_blames": 1, "missed_node_blames": 0, "cases": 2,
    }  # fmt: skip
    file.write_text('{"lines": []}\n')
    done = bench(str(file))
    assert (done.returncode, "line 1: a case needs" in done.stderr) == (2, True)
