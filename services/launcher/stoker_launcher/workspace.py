"""The code tree of a job on this node: fetched once per digest, unpacked safely, kept read-only."""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
from pathlib import Path

from stoker_chassis.stores import BlobStore


class BadTree(Exception):
    """The archive holds something that a code tree may not hold; the message names it."""


async def code_tree(digest: str, blobs: BlobStore, cache: Path) -> Path:
    """The unpacked tree. Raises KeyError when there is no such blob, BadTree, or the store's Unavailable."""
    tree = cache / digest
    if tree.exists():
        return tree
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / f"{digest}.tar.gz"
    await blobs.get(digest, archive)
    try:
        await asyncio.to_thread(unpack, archive, tree)
    finally:
        archive.unlink(missing_ok=True)
    return tree


def unpack(archive: Path, tree: Path) -> None:
    """Unpack into a folder beside and move it there whole. Nothing may point outside the tree."""
    part = tree.with_name(f".{tree.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(part, filter="data")
        for path in sorted(part.rglob("*"), reverse=True):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)
        try:
            part.rename(tree)
        except OSError:
            if not tree.exists():
                raise
    except tarfile.TarError as error:
        raise BadTree(str(error)) from error
    finally:
        if part.exists():
            _remove(part)


def _remove(folder: Path) -> None:
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink())]:
        path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
