"""What a finished attempt left on the disk goes after a while; what may still be needed never does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from stoker_launcher.ledger import Entry, Ledger, Phase
from stoker_launcher.pruning import prune
from stoker_proto import Allocation, Assignment
from tests.builders import spec

OLD, CUT, NEW = 1_000.0, 2_000.0, 3_000.0


class Disk:
    """A node's folder with attempts in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "ledger")

    def attempt(self, job_id: str, phase: Phase = "done", at: float = OLD, code: str | None = None) -> str:
        here = Allocation(node="n1", boot_epoch="1", gpus=("g",), node_rank=0)
        made = Assignment(
            job_id=job_id, attempt=1, fence=1, want="run", spec=spec(), code=code, allocations=(here,),
            preflight="fresh",
        )  # fmt: skip
        entry = Entry(assignment=made, phase=phase)
        self.ledger.write(entry)
        os.utime(self.folder / "ledger" / f"{entry.name}.json", (at, at))
        (self.folder / "attempts" / entry.name).mkdir(parents=True)
        (self.folder / "attempts" / entry.name / "rank-0.stdout").write_text("said")
        return entry.name

    def tree(self, digest: str, at: float) -> None:
        tree = self.folder / "code" / digest
        (tree / "deep").mkdir(parents=True)
        (tree / "deep").chmod(0o500)
        os.utime(tree, (at, at))

    def prune(self, *named: str) -> tuple[set[str], set[str]]:
        """Attempts that are left, and code trees that are."""
        asyncio.run(prune(self.folder, self.ledger, set(named), CUT))
        entries = {p.stem for p in (self.folder / "ledger").iterdir()}
        assert entries == {p.name for p in (self.folder / "attempts").iterdir()}
        trees = self.folder / "code"
        return entries, {p.name for p in trees.iterdir()} if trees.exists() else set()


def test_an_attempt_that_was_done_long_ago_goes_with_its_entry(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.attempt("old")
    new = disk.attempt("new", at=NEW)
    assert disk.prune() == ({new}, set())


def test_an_attempt_whose_logs_are_not_sealed_stays_however_old_it_is(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    phases: tuple[Phase, ...] = ("accepted", "prepared", "starting", "exited", "released")
    kept = {disk.attempt(phase, phase) for phase in phases}
    assert disk.prune()[0] == kept


def test_an_attempt_that_the_desired_state_still_names_stays(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    name = disk.attempt("old")
    assert disk.prune(name)[0] == {name}
    assert disk.prune()[0] == set()


def test_a_code_tree_goes_when_no_attempt_uses_it_and_it_was_not_wanted_lately(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.attempt("runs", "starting", code="used")
    disk.attempt("old", code="unused")
    for digest, at in (("used", OLD), ("unused", OLD), ("fresh", NEW)):
        disk.tree(digest, at)
    assert disk.prune()[1] == {"used", "fresh"}
