"""Proof that an attempt holds no GPU any more: what the driver tells of holders, less those that are not its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stoker_chassis.device import Devices
from stoker_proto import Assignment

from .ranks import Ranks, lives

POLL_S = 0.1


async def proof(devices: Devices, ranks: Ranks, assignment: Assignment, node: str) -> str:
    """Wait until no process of the attempt holds its GPUs, and say how we know. Others may share them."""
    here = assignment.here(node)
    marks = {"STOKER_JOB_ID": assignment.job_id, "STOKER_ATTEMPT": str(assignment.attempt)}
    while True:
        told = [devices.holders(gpu) for gpu in here.gpus]
        holders = sorted({pid for found in told for pid in found or ()})
        # The driver may name a process that we cannot see. On a GPU that is all ours it counts as ours.
        unseen = [pid for pid in holders if not lives(pid)] if here.milli == 1000 else []
        if not unseen and not ranks.ours(holders, marks):
            return f"process groups gone; {_said(holders, unknown=None in told)}"
        await asyncio.sleep(POLL_S)


def _said(holders: Sequence[int], *, unknown: bool) -> str:
    if holders:
        return f"others hold the GPUs: {', '.join(map(str, holders))}"
    return "the driver does not tell who holds them" if unknown else "no process holds the GPUs"
