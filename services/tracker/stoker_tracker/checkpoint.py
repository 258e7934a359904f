"""How far the tracker has come, in the log and in telemetry: written after the writes it stands for, never before.

Without the file everything is mirrored again, which fills an empty MLflow and changes nothing in a full one.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel

from stoker_chassis.eventlog import Position


class Progress(BaseModel):
    """Everything up to here is in MLflow."""

    seq: int = 0
    event_id: str = ""
    samples: int = 0

    @property
    def position(self) -> Position:
        return Position(self.seq, self.event_id)


class Checkpoint:
    """The progress, in a file that is replaced whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.progress = Progress.model_validate_json(path.read_text()) if path.exists() else Progress()

    def note(self, **fields: int | str) -> None:
        self.progress = self.progress.model_copy(update=fields)
        part = self._path.with_suffix(".part")
        with part.open("w") as file:
            file.write(self.progress.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path)
