"""What the launcher itself can say of how an attempt ended on its node. Health, which sees more, has the last word."""

from __future__ import annotations

import re
from collections.abc import Set

from stoker_proto import Outcome, RankExit, StopReason

SIGABRT = 6
OOM_TEXT = (
    "CUDA out of memory", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "MemoryError",
    "DefaultCPUAllocator: can't allocate memory",
)  # fmt: skip
CASCADE_TEXT = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError", "Broken pipe")
STOPPED: dict[StopReason, Outcome] = {
    "cancelled": "cancelled",
    "peer_failed": "infra_comm",
    "node_quarantined": "infra_gpu",
    "preflight_failed": "preflight_failed",
    "timeout": "timeout",
    "lost": "lost",
    "preempted": "preempted",
    "window_closed": "preempted",
    "deadline": "timeout",
}
# Stops of ranks that are whole: what is done or broken then is so for a reason of its own. After any other stop a
# neighbour or a GPU is missing, and whatever is raised may come from that.
WHOLE: tuple[StopReason, ...] = ("cancelled", "timeout", "preempted", "window_closed", "deadline")
GOES_ON: tuple[StopReason, ...] = ("preempted", "window_closed", "deadline")
# What ranks say that were stopped, or whose neighbours were: TERM as an exception, and the collective that broke.
OF_THE_STOP = (
    *CASCADE_TEXT, "KeyboardInterrupt", "SignalException", "killed by signal: Terminated", "Connection refused",
    "DistBackendError", "DistNetworkError", "DistStoreError", "Socket Timeout", "Timed out waiting",
    "ConnectionResetError", "EOFError",
)  # fmt: skip
RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception)\b")


def classify(ranks: tuple[RankExit, ...], asked: StopReason | None) -> Outcome:
    """The outcome of the node's part, from its ranks in the order in which they ended."""
    if asked is not None:
        return STOPPED[asked]
    failed = [r for r in ranks if r.code != 0]
    if not failed:
        return "ok"
    roots = [r for r in failed if not is_cascade(r)]
    return _of_rank(roots[0]) if roots else "infra_comm"


def within_grace(ranks: tuple[RankExit, ...], asked: StopReason, unaware: Set[int]) -> Outcome:
    """The outcome of ranks that were asked to stop.

    `unaware` are those that had ended before, or never looked whether they should. If all ranks are such and well, the
    work is done. One that failed for a reason of its own would fail again, so it does not count as stopped.
    """
    if asked in WHOLE and all(r.code == 0 and r.rank in unaware for r in ranks):
        return "ok"
    own = [r for r in ranks if _failed_by_itself(r)] if asked in GOES_ON else []
    if own:
        return "oom" if any(is_oom(r) for r in own) else "user_error"
    return STOPPED[asked]


def _failed_by_itself(rank: RankExit) -> bool:
    """Whether it raised something of its own. A signal or a bare code proves nothing: the stop itself brings them."""
    if not rank.code or rank.code > 128:
        return False
    last = next((line for line in reversed(rank.stderr_tail) if line.strip()), "")
    said = rank.error if rank.error is not None else (last if RAISED.match(last) else "")
    if any(mark in said for mark in OF_THE_STOP):
        return False
    return bool(said) or is_oom(rank)


def is_oom(rank: RankExit) -> bool:
    return any(mark in _text(rank) for mark in OOM_TEXT)


def is_cascade(rank: RankExit) -> bool:
    """Whether the rank only felt another one's end."""
    return any(mark in _text(rank) for mark in CASCADE_TEXT)


def _text(rank: RankExit) -> str:
    return "\n".join((rank.error or "", *rank.stderr_tail))


def _of_rank(rank: RankExit) -> Outcome:
    if is_oom(rank):
        return "oom"
    return "infra_gpu" if rank.signal == SIGABRT else "user_error"
