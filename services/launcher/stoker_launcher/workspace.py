"""The code tree of a job on this node: fetched once per digest, unpacked safely, kept read-only."""

from __future__ import annotations

import asyncio
import gzip
import os
import shutil
import tarfile
import zlib
from pathlib import Path

from stoker_chassis.stores import BlobStore


class BadTree(Exception):
    """The archive holds something that a code tree may not hold; the message names it."""


class CodeTrees:
    """The trees on this node, each in a folder named by its digest. Attempts that want the same one share the work."""

    def __init__(self, blobs: BlobStore, cache: Path) -> None:
        self._blobs = blobs
        self._cache = cache
        self._locks: dict[str, asyncio.Lock] = {}

    def path(self, digest: str) -> Path:
        return self._cache / digest

    async def get(self, digest: str) -> Path:
        """The unpacked tree. Raises KeyError when there is no such blob, BadTree, OSError, or Unavailable."""
        tree = self.path(digest)
        if tree.exists():
            os.utime(tree)  # when it was last wanted
            return tree
        async with self._locks.setdefault(digest, asyncio.Lock()):
            if not tree.exists():
                archive = self._cache / f"{digest}.tar.gz"
                await self._blobs.get(digest, archive)
                try:
                    await asyncio.to_thread(unpack, archive, tree)
                finally:
                    archive.unlink(missing_ok=True)
        return tree


def unpack(archive: Path, tree: Path) -> None:
    """Unpack into a folder beside and move it there whole. Nothing may point outside the tree."""
    part = tree.with_name(f".{tree.name}.part")
    if part.exists():
        remove(part)  # of a launcher that died at it
    part.mkdir(parents=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(part, filter="data")
        for path in sorted(part.rglob("*"), reverse=True):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)
        part.rename(tree)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, KeyError, ValueError) as error:
        raise BadTree(str(error)) from error
    finally:
        if part.exists():
            remove(part)


def remove(folder: Path) -> None:
    """Remove a tree, which is read-only."""
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink())]:
        path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
