"""What the launcher must not forget: one file an attempt, replaced whole and synced before anything is done by it.

accepted   seen in the desired state
prepared   code is there, the rendezvous is settled
starting   its ranks may run from here on; `worker` is the warm worker that was asked. Once ranks are told to end,
           `alone` holds those that had ended by themselves before
exited     all its processes are gone; the report is in `exit`
released   the GPUs are proven free
done       logs are sealed; nothing is left to do
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from stoker_proto import Assignment, AttemptExited, Frozen, StopReason

from .plan import Rendezvous

Phase = Literal["accepted", "prepared", "starting", "exited", "released", "done"]


class Entry(Frozen):
    """One attempt on this node."""

    assignment: Assignment
    phase: Phase = "accepted"
    master_port: int | None = None
    resume_path: str | None = None
    resume_step: int | None = None
    worker: str | None = None
    meet: Rendezvous | None = None
    stopping: StopReason | None = None
    grace_ms: int | None = None
    alone: tuple[int, ...] | None = None
    exit: AttemptExited | None = None

    @property
    def name(self) -> str:
        return f"{self.assignment.job_id}-{self.assignment.attempt}-{self.assignment.fence}"


class Ledger:
    """Entries by name, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, entry: Entry) -> None:
        path = self._folder / f"{entry.name}.json"
        part = path.with_suffix(".part")
        with part.open("w") as file:
            file.write(entry.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def read(self) -> list[Entry]:
        """Entries with something left to do, in the order of their decisions."""
        entries = [Entry.model_validate_json(p.read_text()) for p in self._folder.glob("*.json")]
        return sorted((e for e in entries if e.phase != "done"), key=lambda e: e.assignment.fence)

    def done(self, before: float) -> list[Entry]:
        """Entries that nothing is left to do for since before that time."""
        old = [p for p in self._folder.glob("*.json") if p.stat().st_mtime < before]
        return [e for e in (Entry.model_validate_json(p.read_text()) for p in old) if e.phase == "done"]

    def codes(self) -> set[str | None]:
        """The code trees that entries name."""
        return {Entry.model_validate_json(p.read_text()).assignment.code for p in self._folder.glob("*.json")}

    def finished(self, entry: Entry) -> bool:
        """Whether this attempt was brought to its end before."""
        path = self._folder / f"{entry.name}.json"
        return path.exists() and Entry.model_validate_json(path.read_text()).phase == "done"

    def forget(self, entry: Entry) -> None:
        (self._folder / f"{entry.name}.json").unlink(missing_ok=True)
