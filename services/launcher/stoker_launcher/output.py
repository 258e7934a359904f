"""Everything that an attempt's processes write on this node: shipped while they run, kept whole when they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from stoker_chassis.eventlog import Unavailable
from stoker_chassis.stores import BlobStore, BlobTooLarge
from stoker_proto import Assignment, AttemptProgressed, CheckpointSaved, LogBatch, MetricBatch, Point, SealedStream

from .checkpoint import complete
from .reports import Reports
from .tails import Send, Tail

POLL_S = 0.04
PROGRESS_S = 10.0


class Output:
    """The streams of one attempt on this node."""

    def __init__(
        self, assignment: Assignment, node: str, folder: Path, checkpoints: Path, ranks: Sequence[int], reports: Reports
    ) -> None:
        self._assignment = assignment
        self._node = node
        self._folder = folder
        self._checkpoints = checkpoints
        self._known = folder / "checkpoints.known"
        self._reports = reports
        self._head = assignment.head.node == node
        self._step: int | None = None
        self._told_at = 0.0
        self._told_step: int | None = None
        self._saved = self._noted_checkpoints() if self._head else {}
        self._files: dict[str, Path] = {}
        self._tails: list[Tail] = []
        for rank in ranks:
            for stream in ("stdout", "stderr"):
                self._add(f"rank-{rank}.{stream}", self._line_sender(rank, stream))
            self._add(f"rank-{rank}.metrics", self._point_sender(rank))

    def _add(self, name: str, send: Send) -> None:
        self._files[name] = self._folder / name
        self._tails.append(Tail(self._folder / name, self._folder / f"{name}.sent", send))

    def _line_sender(self, rank: int, stream: str) -> Send:
        async def send(first: int, lines: Sequence[str]) -> None:
            batch = LogBatch(
                job_id=self._assignment.job_id, attempt=self._assignment.attempt, node=self._node, rank=rank,
                stream=stream, first=first, lines=tuple(lines),
            )  # fmt: skip
            await self._reports.lines(batch)

        return send

    def _point_sender(self, rank: int) -> Send:
        async def send(first: int, lines: Sequence[str]) -> None:
            points = tuple(p for p in map(parse_point, lines) if p is not None)
            if not points:
                return
            batch = MetricBatch(
                job_id=self._assignment.job_id, attempt=self._assignment.attempt, rank=rank, first=first, points=points
            )
            await self._reports.points(batch, self._node)
            self._step = max([self._step or 0, *(p.step for p in points)])

        return send

    async def pump(self, enough: asyncio.Event) -> None:
        """Ship, and tell of steps and checkpoints, until told that it is enough.

        Not until cancelled: a publish whose answer comes at that moment would swallow the cancellation.
        """
        while not enough.is_set():
            moved = await self._ship_once(finished=False)
            await self._tell_progress()
            await self.tell_checkpoints()
            if not moved:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await enough.wait()

    async def _ship_once(self, *, finished: bool) -> bool:
        return any([await tail.ship(finished=finished) for tail in self._tails])

    async def _tell_progress(self) -> None:
        """At the first step, then sparsely: what stopping now would lose."""
        now = time.monotonic()
        if self._step is None or self._step == self._told_step:
            return
        if self._told_step is None or now - self._told_at >= PROGRESS_S:
            self._told_step, self._told_at = self._step, now
            a = self._assignment
            event = AttemptProgressed(job_id=a.job_id, attempt=a.attempt, step=self._step)
            await self._reports.say(event, a.job_id, a.attempt, self._node, self._step)

    async def tell_checkpoints(self) -> None:
        """Say what has been saved since the last look; the head node does it for the gang."""
        if not self._head:
            return
        for found in complete(self._checkpoints):
            try:
                written = found.written()
                if self._saved.get(found.step) == written:
                    continue
                size = found.size()
            except FileNotFoundError:
                continue  # the job has already replaced it by a newer one
            a = self._assignment
            event = CheckpointSaved(
                job_id=a.job_id, attempt=a.attempt, step=found.step, path=str(found.path), bytes=size
            )
            await self._reports.say(event, a.job_id, a.attempt, found.step)
            self._saved[found.step] = written
            self._note_checkpoints()

    def _noted_checkpoints(self) -> dict[int, int]:
        """Checkpoints that were there before the attempt, or were told of in an earlier life of this launcher."""
        if self._known.exists():
            return {int(step): written for step, written in json.loads(self._known.read_text()).items()}
        self._saved = {}
        for found in complete(self._checkpoints):
            with contextlib.suppress(FileNotFoundError):
                self._saved[found.step] = found.written()
        self._note_checkpoints()
        return self._saved

    def _note_checkpoints(self) -> None:
        part = self._known.with_suffix(".part")
        part.write_text(json.dumps(self._saved))
        part.replace(self._known)

    async def finish(self) -> None:
        """Ship what is left once all processes are gone."""
        while await self._ship_once(finished=True):
            pass
        await self._tell_progress()
        await self.tell_checkpoints()

    async def seal(self, blobs: BlobStore) -> tuple[SealedStream, ...]:
        """Put every stream whole into the blob store. A stream over the size limit is sealed as its last part."""
        sealed = []
        for name, path in self._files.items():
            if not path.exists():
                continue
            digest = await self._put(path, blobs)
            lines = await asyncio.to_thread(count_lines, path)
            sealed.append(SealedStream(stream=name, digest=digest, lines=lines, bytes=path.stat().st_size))
        return tuple(sealed)

    async def _put(self, path: Path, blobs: BlobStore) -> str:
        while True:
            try:
                return await blobs.put(path)
            except BlobTooLarge:
                path = await asyncio.to_thread(last_part, path)
            except Unavailable:
                await asyncio.sleep(1)


def parse_point(line: str) -> Point | None:
    """A metric line; what is not one is skipped, and stays in the sealed file."""
    try:
        point = Point.model_validate(json.loads(line))
    except (ValueError, RecursionError):
        return None
    if isinstance(point.value, float) and not math.isfinite(point.value):
        return point.model_copy(update={"value": str(point.value)})
    return point


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def last_part(path: Path, keep: int = 100 * 2**20) -> Path:
    """A copy of the file's end, beginning with a line that says what was cut off."""
    cut = path.with_name(f"{path.name}.end")
    skipped = path.stat().st_size - keep
    with path.open("rb") as whole, cut.open("wb") as end:
        end.write(f"[{skipped} bytes before this are only on the node: {path}]\n".encode())
        whole.seek(skipped)
        while chunk := whole.read(1 << 20):
            end.write(chunk)
    return cut
