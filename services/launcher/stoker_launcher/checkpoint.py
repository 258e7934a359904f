"""Checkpoints on disk: `step-<number>/` with the marker COMPLETE, written last. Only complete ones exist for us."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"^step-(\d+)$")
MARKER = "COMPLETE"


@dataclass(frozen=True, order=True)
class Checkpoint:
    step: int
    path: Path

    def written(self) -> int:
        """When it was completed, which tells it from an earlier one of the same step. Raises FileNotFoundError."""
        return (self.path / MARKER).stat().st_mtime_ns

    def size(self) -> int:
        return sum(f.stat().st_size for f in self.path.rglob("*") if f.is_file())


def complete(folder: Path) -> list[Checkpoint]:
    """Every complete checkpoint in the folder, oldest step first."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = NAME.match(path.name)
        if match and (path / MARKER).is_file():
            found.append(Checkpoint(int(match.group(1)), path))
    return sorted(found)


def newest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint."""
    found = complete(folder)
    return found[-1] if found else None
