"""Keeps the node's disk bounded: what finished attempts left goes after a while, once its logs are in the blob store.

An attempt is `done` in the ledger only after its LogsSealed stands in the log, so what is not sealed is never touched.
An entry that the desired state still names stays: it is what keeps that attempt from being started again.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Set
from pathlib import Path

from .ledger import Ledger
from .workspace import remove


async def prune(node_dir: Path, ledger: Ledger, named: Set[str], before: float) -> None:
    """Remove folders and entries of attempts that were done before that time, and code trees that nobody uses."""
    for entry in await asyncio.to_thread(ledger.done, before):
        if entry.name not in named:
            await asyncio.to_thread(shutil.rmtree, node_dir / "attempts" / entry.name, ignore_errors=True)
            ledger.forget(entry)
    await _prune_code(node_dir / "code", ledger, before)


async def _prune_code(trees: Path, ledger: Ledger, before: float) -> None:
    def old() -> list[Path]:
        return [t for t in trees.glob("[!.]*") if t.is_dir() and t.stat().st_mtime < before]

    used = await asyncio.to_thread(ledger.codes) if old() else set()
    for tree in old():  # looked at again: an attempt that has begun meanwhile has touched its tree
        if tree.name not in used:
            tree.rename(tree.with_name(f".{tree.name}.old"))
    for gone in trees.glob(".*.old"):
        await asyncio.to_thread(remove, gone)
