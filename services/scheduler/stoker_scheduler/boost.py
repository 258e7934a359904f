"""Jobs that have waited as long as their queue lets jobs wait go first from now on."""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice

from stoker_proto import Boost

from .board import Board, Pass

MINUTE_MS = 60_000
LOOK_BEHIND = 64  # jobs of a lane that are not due yet: the next ones are hardly due before these


def boost(board: Board, out: Pass) -> None:
    """Boost who is due, and wake the next pass when the next one is."""
    for queue, lanes in board.state.waiting.queues.items():
        known = board.tree.queues.get(queue)
        if known is None or known.max_wait_minutes is None:
            continue
        patience = int(known.max_wait_minutes * MINUTE_MS)
        for keys in lanes.values():
            early = 0
            for key in islice(keys, bisect_left(keys, (True,)), None):  # those behind the boosted ones
                job = board.state.jobs[key[3]]
                if out.full:
                    return
                if board.now_ms >= job.since_ms + patience:
                    out.actions.append(Boost(job_id=job.id, cause="waited"))
                    continue
                out.wait(job.since_ms + patience)
                early += 1
                if early == LOOK_BEHIND:
                    break
