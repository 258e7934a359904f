"""Nodes that break by chance: the same seed breaks the same nodes at the same times, whatever the scheduler does."""

from __future__ import annotations

import random
from collections.abc import Sequence

from stoker_proto import NodeJoined, NodeReady, NodeUnknown

from .workload import Happening, Kind, gpus_of


def breakdowns(
    kinds: Sequence[Kind], start_ms: int, end_ms: int, every_ms: int, repair_ms: int, seed: int
) -> tuple[Happening, ...]:
    """Each node goes silent after `every_ms` on average, boots anew after `repair_ms`, and then works again."""
    told: list[Happening] = []
    for kind in kinds:
        draw = random.Random(f"{seed}:{kind.name}")
        at_ms, boots = start_ms, 1
        while True:
            at_ms += max(1, round(draw.expovariate(1 / every_ms)))
            if at_ms >= end_ms:
                break
            old, boots = f"boot-{boots}", boots + 1
            new = f"boot-{boots}"
            silent = NodeUnknown(node=kind.name, boot_epoch=old, rule="simulated", reason="it broke down")
            told.append(Happening(at_ms, silent, breaks=True))
            at_ms += repair_ms
            joined = NodeJoined(
                node=kind.name, boot_epoch=new, gpus=gpus_of(kind), cpus=kind.cpus, memory_bytes=kind.memory_bytes,
                simulated=True,
            )  # fmt: skip
            ready = NodeReady(node=kind.name, boot_epoch=new, rule="simulated", reason="it was repaired")
            told += [Happening(at_ms, joined), Happening(at_ms, ready)]
    return tuple(sorted(told, key=lambda one: one.at_ms))
