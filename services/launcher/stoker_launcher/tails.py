"""Ships growing files line by line: each line once and numbered, through any restart, in bounded memory.

What is about to be sent is written down first (from where to where, and the first line's number). A launcher that dies
between sending and noting re-sends exactly the same batch under the same id, which the stream stores once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

CHUNK = 64 * 1024
MAX_LINE = 16 * 1024
BREAK = re.compile(rb"\r\n|\n|\r")

Send = Callable[[int, Sequence[str]], Awaitable[None]]


class Tail:
    """One file. `first` numbers the next line to send; bytes up to `start` are sent, up to `end` are being sent."""

    def __init__(self, file: Path, notes: Path, send: Send) -> None:
        self._file = file
        self._notes = notes
        self._send = send
        self.start = self.end = self.first = 0
        if notes.exists():
            noted = json.loads(notes.read_text())
            self.start, self.end, self.first = noted["start"], noted["end"], noted["first"]

    def _note(self) -> None:
        part = self._notes.with_suffix(".part")
        part.write_text(json.dumps({"start": self.start, "end": self.end, "first": self.first}))
        part.replace(self._notes)

    async def ship(self, *, finished: bool = False) -> bool:
        """Send one batch of whole lines; with `finished` the last line needs no end. False when nothing is new."""
        if self.end == self.start:
            self.end = self._boundary(finished)
            if self.end == self.start:
                return False
            self._note()
        with self._file.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        lines = split_lines(data)
        if lines:
            await self._send(self.first, lines)
        self.start = self.end
        self.first += len(lines)
        self._note()
        return True

    def _boundary(self, finished: bool) -> int:
        """Where the next batch ends: after its last whole line, or within a line that is longer than a chunk."""
        try:
            with self._file.open("rb") as file:
                file.seek(self.start)
                data = file.read(CHUNK)
        except FileNotFoundError:
            return self.start
        if not data:
            return self.start
        full = len(data) == CHUNK
        last = max(data.rfind(b"\n"), data.rfind(b"\r"))
        # A \r at the very end may be the first half of \r\n: leave it for the next look.
        if last == len(data) - 1 and data.endswith(b"\r") and (full or not finished):
            last = max(data.rfind(b"\n", 0, last), data.rfind(b"\r", 0, last))
        if last >= 0 and (full or not finished):
            return self.start + last + 1
        if full:
            return self.start + _within_line(data)
        return self.start + len(data) if finished else self.start


def _within_line(data: bytes) -> int:
    """Where to cut a line that fills a chunk: between characters, and with some of it left before its end."""
    at = len(data) - 2
    while at > 1 and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def split_lines(data: bytes) -> list[str]:
    """Lines without their ends; a carriage return ends one too, or progress bars would show nothing until the end."""
    parts = BREAK.split(data)
    if parts and not parts[-1]:
        parts.pop()
    return [cut(part.decode("utf-8", "replace")) for part in parts]


def cut(line: str) -> str:
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} ... ({len(line) - MAX_LINE} more)"
