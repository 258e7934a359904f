"""A code tree as one archive that depends on nothing but the files: same files, same digest."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import tarfile
from pathlib import Path

from stoker_proto import ProblemError, problem

MAX_BYTES = 200 * 2**20
SKIPPED = {
    ".git", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache",
    "stoker-data",
}  # fmt: skip


def files_of(root: Path, include: tuple[str, ...]) -> list[Path]:
    """The files to send, sorted by name. In a git checkout .gitignore is honoured, untracked files are sent.

    Raises ProblemError when an included path holds none of them.
    """
    files = _git_files(root)
    if not files:  # no checkout, or a folder that the checkout around it ignores
        files = [p for p in root.rglob("*") if p.is_file() and not SKIPPED & set(p.relative_to(root).parts)]
    if include:
        files = [p for name in include for p in _below(root, name, files)]
    return sorted(set(files), key=lambda p: str(p.relative_to(root)))


def _below(root: Path, name: str, files: list[Path]) -> list[Path]:
    wanted = Path(os.path.normpath(root / name))
    found = [p for p in files if p == wanted or wanted in p.parents]
    if not found:
        why = f"there is no {name} in {root}"
        if wanted.exists():
            why = f"{name} holds no file below {root} that is sent (does .gitignore name it?)"
        raise ProblemError(problem("invalid_request", f"code_source.include_paths: {why}"))
    return found


def _git_files(root: Path) -> list[Path] | None:
    argv = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "."]
    try:
        listed = subprocess.run(argv, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return [p for name in os.fsdecode(listed).split("\0") if name and (p := root / name).is_file()]


def pack(root: Path, include: tuple[str, ...], into: Path) -> str:
    """Write the tree's archive to `into`; returns its SHA-256. Raises ProblemError when it is missing or too large."""
    root = root.resolve()
    if not root.is_dir():
        raise ProblemError(problem("invalid_request", f"code_source.root_path: there is no directory {root}"))
    files = files_of(root, include)
    if not files:
        raise ProblemError(problem("invalid_request", f"code_source.root_path: {root} holds no files"))
    total = sum(p.stat().st_size for p in files)
    if total > MAX_BYTES:
        largest = max(files, key=lambda p: p.stat().st_size)
        detail = (
            f"The code tree {root} holds {total} bytes; the limit is {MAX_BYTES}. Largest: {largest.relative_to(root)}"
        )
        actions = ("list what is needed in code_source.include_paths", "or ignore large files in .gitignore")
        raise ProblemError(problem("blob_too_large", detail, next_actions=actions))
    with (
        into.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in files:
            info = tarfile.TarInfo(str(path.relative_to(root)))
            info.size = path.stat().st_size
            info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            with path.open("rb") as file:
                tar.addfile(info, file)
    with into.open("rb") as packed:
        return hashlib.file_digest(packed, "sha256").hexdigest()
