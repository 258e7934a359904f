"""What the launcher itself can say of how an attempt ended on its node. Health, which sees more, has the last word."""

from __future__ import annotations

from stoker_proto import Outcome, RankExit, StopReason

SIGKILL, SIGABRT, SIGBUS = 9, 6, 7
OOM_TEXT = ("CUDA out of memory", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
CASCADE_TEXT = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError", "Broken pipe")
STOPPED: dict[StopReason, Outcome] = {
    "cancelled": "cancelled",
    "peer_failed": "infra_comm",
    "node_quarantined": "infra_gpu",
    "preflight_failed": "preflight_failed",
    "timeout": "timeout",
    "lost": "lost",
    "preempted": "preempted",
}


def classify(ranks: tuple[RankExit, ...], asked: StopReason | None) -> Outcome:
    """The outcome of the node's part, from its ranks in the order in which they ended."""
    if asked is not None:
        return STOPPED[asked]
    failed = [r for r in ranks if r.code != 0]
    if not failed:
        return "ok"
    roots = [r for r in failed if not is_cascade(r)]
    return _of_rank(roots[0]) if roots else "infra_comm"


def is_cascade(rank: RankExit) -> bool:
    """Whether the rank only felt another one's end."""
    text = f"{rank.error or ''}\n{chr(10).join(rank.stderr_tail)}"
    return any(mark in text for mark in CASCADE_TEXT)


def _of_rank(rank: RankExit) -> Outcome:
    text = f"{rank.error or ''}\n{chr(10).join(rank.stderr_tail)}"
    if any(mark in text for mark in OOM_TEXT):
        return "oom"
    if rank.signal == SIGABRT:
        return "infra_gpu"
    return "user_error"
