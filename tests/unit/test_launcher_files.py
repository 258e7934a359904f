"""What the launcher keeps on disk: code trees, checkpoints, the ledger, and facts of gangs in memory."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import pytest

from stoker_chassis.memory import MemoryBlobs, MemoryLog
from stoker_launcher.checkpoint import complete, newest
from stoker_launcher.facts import Facts
from stoker_launcher.ledger import Entry, Ledger
from stoker_launcher.plan import Rendezvous
from stoker_launcher.workspace import BadTree, CodeTrees, unpack
from stoker_proto import Allocation, Assignment, AttemptPrepared, Event, PreflightPassed, seal
from tests.builders import spec


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = 1
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    "bad",
    [
        member("../outside"),
        member("link", type=tarfile.SYMTYPE, linkname="/etc/passwd", size=0),
        member("link", type=tarfile.SYMTYPE, linkname="../../outside", size=0),
        member("hard", type=tarfile.LNKTYPE, linkname="../outside", size=0),
        member("pipe", type=tarfile.FIFOTYPE, size=0),
    ],
)
def test_a_tree_that_points_outside_is_refused_and_leaves_nothing(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    made = archive(tmp_path / "a.tar.gz", member("fine.py"), bad)
    with pytest.raises(BadTree):
        unpack(made, tmp_path / "cache" / "tree")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_absolute_name_lands_within_the_tree(tmp_path: Path) -> None:
    unpack(archive(tmp_path / "a.tar.gz", member("/abs/file.py")), tmp_path / "tree")
    assert (tmp_path / "tree" / "abs" / "file.py").read_text() == "x"


@pytest.mark.parametrize("cut", [0, 5, 30, 60])
def test_a_broken_archive_is_refused(tmp_path: Path, cut: int) -> None:
    whole = archive(tmp_path / "a.tar.gz", *(member(f"m{i}.py", size=1000) for i in range(20)))
    whole.write_bytes(whole.read_bytes()[:cut] + (b"garbage" if cut > 20 else b""))
    with pytest.raises(BadTree):
        unpack(whole, tmp_path / "tree")


async def test_a_tree_is_fetched_once_however_many_want_it(tmp_path: Path) -> None:
    class Counting(MemoryBlobs):
        gets = 0

        async def get(self, digest: str, into: Path) -> None:
            self.gets += 1
            await asyncio.sleep(0)
            await super().get(digest, into)

    blobs = Counting(tmp_path / "blobs")
    digest = await blobs.put(archive(tmp_path / "a.tar.gz", member("train.py")))
    trees = CodeTrees(blobs, tmp_path / "cache")
    found = await asyncio.gather(*(trees.get(digest) for _ in range(8)))
    assert set(found) == {trees.path(digest)}
    assert blobs.gets == 1
    assert (await CodeTrees(blobs, tmp_path / "cache").get(digest) / "train.py").read_text() == "x"
    assert blobs.gets == 1


async def test_what_a_launcher_that_died_had_unpacked_half_is_thrown_away(tmp_path: Path) -> None:
    blobs = MemoryBlobs(tmp_path / "blobs")
    digest = await blobs.put(archive(tmp_path / "a.tar.gz", member("train.py")))
    half = tmp_path / "cache" / f".{digest}.part"
    (half / "old").mkdir(parents=True)
    (half / "old").chmod(0o500)
    tree = await CodeTrees(blobs, tmp_path / "cache").get(digest)
    assert [p.name for p in tree.iterdir()] == ["train.py"]


def test_only_complete_checkpoints_count_and_the_highest_step_is_the_newest(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    for name, whole in (("step-9", True), ("step-0000000010", True), ("step-11", False), ("other", True)):
        (tmp_path / name).mkdir()
        if whole:
            (tmp_path / name / "COMPLETE").touch()
    (tmp_path / "step-0000000012.tmp").mkdir()
    assert [c.step for c in complete(tmp_path)] == [9, 10]
    found = newest(tmp_path)
    assert found is not None
    assert found.path.name == "step-0000000010"


def assignment(job_id: str = "j", fence: int = 1) -> Assignment:
    whole = tuple(Allocation(node=n, boot_epoch="1", gpus=("g",), node_rank=r) for r, n in enumerate("ab"))
    return Assignment(
        job_id=job_id, attempt=1, fence=fence, want="run", spec=spec(nodes=2, per_node=1), allocations=whole,
        preflight="required",
    )  # fmt: skip


def test_the_ledger_gives_back_what_is_left_to_do_in_the_order_of_decisions(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    entries = [Entry(assignment=assignment(job, fence)) for job, fence in (("late", 9), ("early", 2), ("over", 1))]
    for entry in entries:
        ledger.write(entry)
    meet = Rendezvous("127.0.0.1", 1, None, None)
    started = entries[0].model_copy(update={"phase": "starting", "worker": "1-2", "meet": meet, "alone": (1,)})
    ledger.write(started)
    ledger.write(entries[2].model_copy(update={"phase": "done"}))
    assert Ledger(tmp_path / "ledger").read() == [entries[1], started]
    assert ledger.finished(entries[2])
    assert not ledger.finished(entries[1])


async def append(log: MemoryLog, event: Event) -> None:
    id = f"{event.subject()}:{await log.end()}"
    await log.append(seal(event, id=id, source="test", time="2026-01-01T00:00:00Z", actor="test"))


def prepared(node: str, fence: int = 1, port: int | None = None, job_id: str = "j") -> AttemptPrepared:
    return AttemptPrepared(
        job_id=job_id, attempt=1, node=node, fence=fence, master_addr="10.0.0.1" if port else None, master_port=port
    )


async def test_a_gang_meets_when_every_node_is_prepared_under_its_fence_and_the_preflight_passed() -> None:
    log = MemoryLog()
    facts = Facts(log)
    for event in (prepared("a", port=7), prepared("b", fence=0)):
        await append(log, event)
    await facts.learn(assignment())
    following = asyncio.create_task(facts.follow(await log.end()))
    news = facts.news()
    await append(log, PreflightPassed(job_id="j", attempt=1, nodes=("a", "b")))
    await asyncio.wait_for(news, 5)
    assert facts.rendezvous(assignment()) is None, "b is not prepared under this fence"
    news = facts.news()
    await append(log, prepared("b"))
    await asyncio.wait_for(news, 5)
    assert facts.rendezvous(assignment()) == Rendezvous("10.0.0.1", 7)
    following.cancel()


async def test_news_between_the_look_and_the_wait_are_not_missed() -> None:
    log = MemoryLog()
    facts = Facts(log)
    await facts.learn(assignment())
    following = asyncio.create_task(facts.follow(0))
    await asyncio.sleep(0)
    news = facts.news()
    await append(log, prepared("b"))
    while "j" not in str(facts.__dict__["_prepared"]):
        await asyncio.sleep(0)
    await asyncio.wait_for(news, 1)
    following.cancel()


async def test_what_other_nodes_gangs_say_is_not_kept() -> None:
    log = MemoryLog()
    facts = Facts(log)
    await facts.learn(assignment("mine"))
    following = asyncio.create_task(facts.follow(0))
    for number in range(50):
        await append(log, prepared("a", port=1, job_id=f"other{number}"))
    news = facts.news()
    await append(log, prepared("a", port=1, job_id="mine"))
    await asyncio.wait_for(news, 5)
    assert list(facts.__dict__["_prepared"]) == [("mine", 1)]
    following.cancel()
