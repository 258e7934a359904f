"""Whose fault a failed attempt was: the node when it shows a fault, else the first rank that failed by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker_health.blame import attribute, is_cascade
from stoker_health.judge_gang import ATTRIBUTION_MS
from stoker_proto import AttemptExited, Event, JobFailureAttributed, RankExit

from .health_node import Leader, exit_of, found, gang, scanned

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41234"


def raised(rank: int, last: str, kind: str = "ValueError") -> RankExit:
    error = f'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    main()\n{last}'
    return RankExit(rank=rank, code=1, error_type=kind, error=error, stderr_tail=tuple(error.splitlines()))


def cascade(rank: int) -> RankExit:
    return raised(rank, GLOO, "RuntimeError")


def killed(rank: int, signal: int, *stderr: str) -> RankExit:
    return RankExit(rank=rank, code=None, signal=signal, stderr_tail=stderr)


def running(*nodes: str, gpus: int = 2) -> Leader:
    leader = Leader().ready(*nodes)
    leader.tell(gang(*nodes, gpus=gpus, preflight="fresh"))
    return leader


def attributed(events: list[Event]) -> JobFailureAttributed:
    [one] = [e for e in events if isinstance(e, JobFailureAttributed)]
    return one


def blamed(*exits: AttemptExited) -> JobFailureAttributed:
    """The attribution of a gang on these nodes that shows no fault of a device."""
    nodes = [e.node for e in exits]
    return attributed(running(*nodes).tell(*exits, *map(scanned, nodes)))


def test_a_user_exception_is_the_users_with_the_traceback_as_evidence_although_other_ranks_fail_after_it() -> None:
    told = blamed(
        exit_of("n2", cascade(2), cascade(3), outcome="infra_comm"),
        exit_of("n1", cascade(0), raised(1, "ValueError: bad shape"), outcome="user_error"),
    )
    assert (told.outcome, told.blame, told.retry, told.first_rank) == ("user_error", "user", False, 1)
    assert (told.problem.code, told.problem.origin) == ("python_exception", "user")
    assert told.problem.detail == "ValueError: bad shape"
    assert [e.line for e in told.problem.evidence][-1] == "ValueError: bad shape"
    assert {e.stream for e in told.problem.evidence} == {"n1/rank-1"}
    assert told.exclude_nodes == ()


def test_a_lost_gpu_is_the_nodes_fault_although_its_peer_only_saw_a_closed_connection() -> None:
    leader = running("n1", "n2")
    said = leader.tell(
        found("n2", entity="n2-gpu-0", id="xid79", check="xid"),
        exit_of("n1", cascade(0), cascade(1), outcome="infra_comm", asked=None),
        exit_of("n2", killed(2, 6), cascade(3), outcome="infra_gpu"),
        scanned("n1"),
        scanned("n2"),
    )
    told = attributed(said)
    assert (told.outcome, told.blame, told.node, told.retry) == ("infra_gpu", "node", "n2", True)
    assert (told.exclude_nodes, told.evidence, told.confidence) == (("n2",), ("xid79",), "established")
    assert told.problem.code == "gpu_fault"


def test_a_fault_of_the_node_outweighs_an_exception_that_it_may_have_caused() -> None:
    leader = running("n1")
    said = leader.tell(
        exit_of("n1", raised(0, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered")),
        found("n1", "degraded", check="ecc_uncorrectable", entity="n1-gpu-1"),
        scanned("n1"),
    )
    assert attributed(said).blame == "node"


def test_faults_of_a_gpu_that_the_attempt_does_not_use_do_not_excuse_it() -> None:
    leader = running("n1", gpus=1)
    said = leader.tell(
        found("n1", "degraded", check="ecc_uncorrectable", entity="n1-gpu-1"),
        exit_of("n1", raised(0, "ValueError: bad shape")),
        scanned("n1"),
    )
    assert attributed(said).blame == "user"


def test_faults_from_before_the_attempt_and_faults_of_other_nodes_do_not_excuse_it() -> None:
    leader = Leader().ready("n1", "n2")
    leader.tell(found("n1", "degraded"))
    leader.tell(gang("n1", preflight="fresh"), found("n2", "fatal", id="f2"))
    said = leader.tell(exit_of("n1", raised(0, "ValueError: x")), scanned("n1"))
    assert attributed(said).blame == "user"


def test_application_xids_leave_the_blame_with_the_user() -> None:
    leader = running("n1")
    said = leader.tell(
        found("n1", "info", check="xid", entity="n1-gpu-0"),
        exit_of("n1", raised(0, "RuntimeError: CUDA error: an illegal memory access was encountered")),
        scanned("n1"),
    )
    assert (attributed(said).blame, attributed(said).retry) == ("user", False)


def test_only_closed_connections_are_a_communication_fault_and_are_retried() -> None:
    told = blamed(exit_of("n1", cascade(0), outcome="infra_comm"), exit_of("n2", cascade(2), outcome="infra_comm"))
    assert (told.outcome, told.blame, told.retry, told.confidence) == ("infra_comm", "unknown", True, "hypothesis")
    assert told.exclude_nodes == ()


def test_what_was_printed_on_the_way_does_not_make_an_exception_a_cascade() -> None:
    noisy = raised(0, "KeyError: 'labels'").model_copy(update={"stderr_tail": ("retrying: Connection reset by peer",)})
    assert not is_cascade(noisy)
    assert blamed(exit_of("n1", noisy)).blame == "user"


def test_a_job_of_one_process_has_nobody_else_to_blame_for_a_closed_connection() -> None:
    leader = running("n1", gpus=1)
    said = leader.tell(exit_of("n1", raised(0, "ConnectionResetError: Connection reset by peer")), scanned("n1"))
    assert (attributed(said).blame, attributed(said).retry) == ("user", False)


def test_sigkill_alone_is_a_signal_and_not_called_out_of_memory() -> None:
    told = blamed(exit_of("n1", killed(0, 9), cascade(1)))
    assert (told.outcome, told.problem.code, told.retry) == ("user_error", "killed_by_signal", False)
    assert "9" in told.problem.detail


def test_sigkill_with_evidence_is_out_of_memory() -> None:
    told = blamed(exit_of("n1", killed(0, 9, "Out of memory: Killed process 4711 (python)"), cascade(1)))
    assert (told.outcome, told.problem.code, told.retry) == ("oom", "host_oom", False)


def test_out_of_gpu_memory_is_told_from_other_exceptions() -> None:
    last = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    told = blamed(exit_of("n1", raised(0, last, "OutOfMemoryError"), outcome="oom"))
    assert (told.outcome, told.problem.code) == ("oom", "cuda_oom")


def test_a_command_that_is_not_there_and_one_that_exits_are_told_apart() -> None:
    missing = RankExit(rank=0, code=127, stderr_tail=("bash: trian: command not found",))
    assert blamed(exit_of("n1", missing)).problem.code == "command_not_found"
    assert blamed(exit_of("n1", RankExit(rank=0, code=3))).problem.code == "exit_code"


def test_ranks_that_the_platform_ended_are_not_the_cause() -> None:
    own = raised(1, "ValueError: x")
    told = blamed(exit_of("n1", own, killed(0, 15), before_stop=(1,)))
    assert told.first_rank == 1


def test_a_launcher_that_could_not_start_or_lost_its_ranks_is_retried() -> None:
    rejected = exit_of("n1", outcome="launch_rejected", detail="the code tree is not a tar file")
    assert (blamed(rejected).outcome, blamed(rejected).retry) == ("launch_rejected", True)
    died = exit_of("n1", outcome="infra_node", detail="the warm worker died")
    assert (blamed(died).outcome, blamed(died).node, blamed(died).exclude_nodes) == ("infra_node", "n1", ("n1",))


def test_the_blame_waits_until_every_node_has_looked_at_its_devices() -> None:
    leader = running("n1", "n2")
    assert leader.tell(exit_of("n1", raised(0, "ValueError: x")), scanned("n1")) == []
    assert leader.tell(exit_of("n2", asked="peer_failed", outcome="infra_comm")) == []
    assert attributed(leader.tell(scanned("n2"))).blame == "user"


def test_a_node_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    leader = running("n1", "n2")
    assert leader.tell(exit_of("n1", raised(0, "ValueError: x")), scanned("n1")) == []
    leader.log.at_ms += ATTRIBUTION_MS
    assert attributed(leader.rule()).blame == "user"


def test_an_attempt_is_blamed_once() -> None:
    leader = running("n1")
    leader.tell(exit_of("n1", raised(0, "ValueError: x")), scanned("n1"))
    assert leader.tell(found("n1", "degraded", entity="n1-gpu-0"), scanned("n1"))[1:] == []


def test_an_attempt_that_was_stopped_or_succeeded_is_not_blamed() -> None:
    for outcome, asked in (("cancelled", "cancelled"), ("ok", None)):
        leader = running("n1")
        assert leader.tell(exit_of("n1", outcome=outcome, asked=asked), scanned("n1")) == []


def test_what_broke_within_the_grace_of_a_preemption_is_the_jobs_own() -> None:
    last = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    peer = raised(1, "torch.distributed.DistBackendError: NCCL error", "DistBackendError")
    ended = exit_of("n1", peer, raised(0, last, "OutOfMemoryError"), outcome="oom", asked="preempted", before_stop=())
    told = blamed(ended, exit_of("n2", killed(2, 15), outcome="preempted", asked="preempted", before_stop=()))
    assert (told.outcome, told.blame, told.retry, told.first_rank) == ("oom", "user", False, 0)
    assert told.problem.code == "cuda_oom"


def test_a_preemption_alone_is_nobodys_fault_and_neither_is_work_that_was_done_within_its_grace() -> None:
    for outcome in ("preempted", "ok"):
        leader = running("n1")
        ended = exit_of("n1", RankExit(rank=0, code=0), outcome=outcome, asked="preempted", before_stop=())
        assert leader.tell(ended, scanned("n1")) == []


def test_a_fault_of_a_gpu_that_two_attempts_share_concerns_both() -> None:
    leader = Leader().ready("n1")
    half = gang("n1", gpus=1, preflight="fresh")
    half = half.model_copy(update={"allocations": (half.allocations[0].model_copy(update={"milli": 500}),)})
    leader.tell(half, half.model_copy(update={"job_id": "k"}))
    leader.tell(found("n1", entity="n1-gpu-0", id="xid79", check="xid"))
    said: list[Event] = []
    for job in ("j", "k"):
        ended = exit_of("n1", killed(0, 6), outcome="infra_gpu").model_copy(update={"job_id": job})
        said += leader.tell(ended, scanned("n1").model_copy(update={"job_id": job}))
    told = [e for e in said if isinstance(e, JobFailureAttributed)]
    assert [(e.job_id, e.outcome, e.node) for e in told] == [("j", "infra_gpu", "n1"), ("k", "infra_gpu", "n1")]


ranks = st.builds(
    RankExit,
    rank=st.integers(0, 7),
    code=st.sampled_from((None, 0, 1, 127)),
    signal=st.sampled_from((None, 6, 9, 15)),
    error_type=st.sampled_from((None, "ValueError")),
    error=st.sampled_from((None, GLOO, "ValueError: x")),
    stderr_tail=st.sampled_from(((), (GLOO,), ("Killed",))),
)


@given(st.lists(st.lists(ranks, max_size=4), min_size=1, max_size=3))
def test_without_evidence_on_a_node_no_node_is_ever_blamed(gangs: list[list[RankExit]]) -> None:
    exits = [exit_of(f"n{i}", *ranks) for i, ranks in enumerate(gangs)]
    told = attribute("j", 1, exits, (), nodes=len(exits))
    assert (told.blame != "node", told.node, told.exclude_nodes) == (True, None, ())
    assert told.retry == (told.outcome not in ("user_error", "oom"))


def test_what_a_rank_printed_about_the_hardware_takes_the_blame_from_the_user_and_keeps_the_job_off_that_node() -> None:
    ecc = raised(2, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    told = blamed(exit_of("n1", cascade(0), outcome="infra_comm"), exit_of("n2", ecc))
    assert (told.outcome, told.blame, told.confidence, told.retry) == ("infra_gpu", "node", "supported", True)
    assert (told.node, told.exclude_nodes, told.first_rank) == ("n2", ("n2",), 2)
    assert told.problem.code == "gpu_fault"


def test_a_full_disk_is_the_users_and_a_dead_mount_is_not() -> None:
    full = blamed(exit_of("n1", raised(0, "OSError: [Errno 28] No space left on device", "OSError")))
    assert (full.blame, full.retry) == ("user", False)
    assert "checkpoints" in full.problem.next_actions[0]
    stale = blamed(exit_of("n1", raised(0, "OSError: [Errno 116] Stale file handle", "OSError")))
    assert (stale.outcome, stale.blame, stale.retry, stale.exclude_nodes) == ("infra_storage", "node", True, ("n1",))
