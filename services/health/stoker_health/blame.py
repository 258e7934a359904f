"""Whose fault a failed attempt was: node evidence first, then the earliest rank that failed by itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stoker_proto import AttemptExited, Evidence, FindingRecorded, JobFailureAttributed, Problem, RankExit, problem

from .diagnosis import Diagnosis, diagnose

CASCADES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "ncclRemoteError",
    "Socket Timeout",
    "Timed out waiting",
    "Watchdog caught collective operation timeout",
    "Did the remote server shutdown or crash",
)
CUDA_OOM = ("CUDA out of memory", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
HOST_OOM = ("MemoryError", "Out of memory: Killed process", "DefaultCPUAllocator: can't allocate memory")
# What ranks raise when they, or their neighbours, are told to stop.
OF_THE_STOP = ("KeyboardInterrupt", "SignalException", "DistBackendError", "DistNetworkError", "DistStoreError")
SIGKILL, SIGTERM = 9, 15
# The Problem of an outcome that is not the user's.
INFRA = {
    "infra_gpu": "gpu_fault", "infra_node": "node_lost", "infra_comm": "comm_fault", "infra_storage": "storage_fault",
}  # fmt: skip
EVIDENCE_LINES = 6


def attribute(
    job_id: str, attempt: int, exits: Sequence[AttemptExited], findings: Sequence[FindingRecorded], *, nodes: int
) -> JobFailureAttributed:
    """The attribution from how every node's part ended and what was found on the gang's GPUs since it was placed."""
    hard = [f for f in findings if f.result.severity in ("fatal", "degraded")]
    if hard:
        return _of_node(job_id, attempt, hard, exits)
    alone = nodes == 1 and sum(len(e.ranks) for e in exits) == 1  # a process without peers has only itself to blame
    roots = [(e, r) for e in exits for r in _own_failures(e) if alone or not is_cascade(r)]
    if roots:
        return _of_rank(job_id, attempt, *roots[0])
    refused = next((e for e in exits if e.asked is None and e.outcome == "launch_rejected"), None)
    if refused:
        made = problem("launch_rejected", refused.detail or f"{refused.node} could not start it")
        return _made(job_id, attempt, "launch_rejected", "unknown", made, retry=True, confidence="supported")
    died = next((e for e in exits if e.asked is None and e.outcome == "infra_node"), None)
    if died:
        made = problem("node_lost", f"{died.node}: {died.detail}")
        return _made(job_id, attempt, "infra_node", "node", made, retry=True, confidence="supported", node=died.node)
    made = problem("comm_fault", "Every rank that failed only lost its connection to another one")
    return _made(job_id, attempt, "infra_comm", "unknown", made, retry=True, confidence="hypothesis")


def is_cascade(rank: RankExit) -> bool:
    """Whether the rank only felt another one's end."""
    if rank.signal == SIGTERM:
        return True
    text = rank.error or "\n".join(rank.stderr_tail)  # what was raised says more than what was printed on the way
    return any(mark in text for mark in CASCADES)


def _own_failures(exited: AttemptExited) -> list[RankExit]:
    """Ranks that failed before anybody was told to stop; or, if the node's part failed within its grace, in that."""
    if exited.asked is not None and exited.failed:
        return [r for r in exited.ranks if r.code and r.error_type not in OF_THE_STOP]
    return [r for r in exited.ranks if r.code != 0 and r.rank in exited.before_stop]


def _of_node(
    job_id: str, attempt: int, findings: Sequence[FindingRecorded], exits: Sequence[AttemptExited]
) -> JobFailureAttributed:
    worst = next((f for f in findings if f.result.severity == "fatal"), findings[0])
    nodes = tuple(dict.fromkeys(f.node for f in findings))
    detail = f"{worst.result.detail or worst.result.check} on {worst.node}"
    first = next((r.rank for e in exits if e.node == worst.node for r in e.ranks if r.code != 0), None)
    made = problem(
        "gpu_fault", detail, facts={"node": worst.node, "gpu": worst.result.entity},
        next_actions=("nothing: the job goes on elsewhere from its newest checkpoint",),
    )  # fmt: skip
    return JobFailureAttributed(
        job_id=job_id, attempt=attempt, outcome="infra_gpu", blame="node", confidence="established", node=worst.node,
        first_rank=first, evidence=tuple(f.finding_id for f in findings), retry=True, exclude_nodes=nodes, problem=made,
    )  # fmt: skip


def _of_rank(job_id: str, attempt: int, exited: AttemptExited, rank: RankExit) -> JobFailureAttributed:
    text = "\n".join((rank.error or "", *rank.stderr_tail))
    lines = (rank.error or "\n".join(rank.stderr_tail)).splitlines()[-EVIDENCE_LINES:]
    stream = f"{exited.node}/rank-{rank.rank}"
    more = {"evidence": tuple(Evidence(stream=stream, line=line) for line in lines), "facts": {"rank": rank.rank}}
    last = lines[-1] if lines else ""
    told = (rank.error or "\n".join(rank.stderr_tail)).splitlines()
    said = diagnose(told, -rank.signal if rank.signal else rank.code)
    if said.outcome in INFRA:
        return _of_text(job_id, attempt, exited, rank, said, told)
    if any(mark in text for mark in CUDA_OOM):
        made, outcome = problem("cuda_oom", last, next_actions=("use a smaller batch or model",), **more), "oom"
    elif any(mark in text for mark in HOST_OOM):
        made, outcome = problem("host_oom", last, next_actions=("use less host memory",), **more), "oom"
    elif rank.error_type is not None:
        mend = said.hint if said.signature and said.blame == "user" else "mend the code and submit again"
        made, outcome = problem("python_exception", last, next_actions=(mend,), **more), "user_error"
    elif rank.signal is not None:
        made, outcome = problem("killed_by_signal", f"rank {rank.rank} got signal {rank.signal}", **more), "user_error"
    elif rank.code == 127:
        made, outcome = problem("command_not_found", last or "exit code 127", **more), "user_error"
    else:
        detail = f"rank {rank.rank} ended with code {rank.code}"
        fix = (said.hint,) if said.signature and said.blame == "user" else ()
        made, outcome = problem("exit_code", detail, next_actions=fix, **more), "user_error"
    return _made(job_id, attempt, outcome, "user", made, retry=False, confidence="supported", first_rank=rank.rank)


def _of_text(
    job_id: str, attempt: int, exited: AttemptExited, rank: RankExit, said: Diagnosis, told: Sequence[str]
) -> JobFailureAttributed:
    """What the rank printed names a fault that is not the user's. No finding proves it, so it is never established."""
    assert said.outcome is not None
    number = len(told) - 1 if said.line is None else said.line
    line = told[number] if told else ""
    made = problem(
        INFRA[said.outcome], line or said.hint, next_actions=(said.hint,),
        evidence=(Evidence(stream=f"{exited.node}/rank-{rank.rank}", line=line),),
        facts={"rank": rank.rank, "signature": said.signature},
    )  # fmt: skip
    node = exited.node if said.blame == "node" else None
    told_by = _made(
        job_id, attempt, said.outcome, said.blame, made, retry=said.retry, confidence="supported", node=node,
        first_rank=rank.rank,
    )  # fmt: skip
    # Elsewhere is worth trying also where the node is only the place at which it was seen.
    return told_by.model_copy(update={"exclude_nodes": (exited.node,)}) if said.outcome == "infra_storage" else told_by


def _made(
    job_id: str, attempt: int, outcome: str, blame: str, made: Problem, *, retry: bool, confidence: str,
    node: str | None = None, first_rank: int | None = None,
) -> JobFailureAttributed:  # fmt: skip
    return JobFailureAttributed.model_validate(
        {
            "job_id": job_id, "attempt": attempt, "outcome": outcome, "blame": blame, "confidence": confidence,
            "node": node, "first_rank": first_rank, "retry": retry, "problem": made,
            "exclude_nodes": (node,) if node else (),
        }
    )  # fmt: skip
