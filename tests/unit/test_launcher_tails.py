"""Growing files are shipped line by line: each once, numbered, whenever the reader dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_launcher.output import parse_point
from stoker_launcher.tails import CHUNK, MAX_LINE, Tail, split_lines


class Died(Exception):
    """The launcher was killed here."""


class Ship:
    """A tail on a file, and the stream it ships to: a batch that comes twice under its number is kept once."""

    def __init__(self, folder: Path) -> None:
        self.file, self.notes = folder / "file", folder / "file.sent"
        self.stream: dict[int, list[str]] = {}
        self.dies = ""
        self.open()

    def open(self) -> None:
        self.tail = Tail(self.file, self.notes, self.send)

    async def send(self, first: int, lines: Sequence[str]) -> None:
        if self.dies == "before":
            raise Died
        kept = self.stream.setdefault(first, list(lines))
        assert kept == list(lines), "a batch sent again is the same batch"
        if self.dies == "after":
            raise Died

    def write(self, data: bytes) -> None:
        with self.file.open("ab") as file:
            file.write(data)

    async def step(self, dies: str = "", *, finished: bool = False) -> bool:
        self.dies = dies
        try:
            return await self.tail.ship(finished=finished)
        except Died:
            self.open()
            return True

    async def finish(self) -> list[str]:
        while await self.step(finished=True):
            pass
        lines: list[str] = []
        for first in sorted(self.stream):
            assert first == len(lines), "a gap or a repeat"
            lines += self.stream[first]
        return lines


WRITES = st.lists(st.text(st.sampled_from("ab\né"), max_size=12).map(str.encode), max_size=12)
DEATHS = st.lists(st.sampled_from(["", "before", "after"]), min_size=12, max_size=12)


@settings(max_examples=60, deadline=None)
@given(WRITES, DEATHS)
def test_every_line_is_shipped_once_through_any_deaths(
    tmp_path_factory: pytest.TempPathFactory, writes: list[bytes], deaths: list[str]
) -> None:
    ship = Ship(tmp_path_factory.mktemp("tail"))

    async def play() -> list[str]:
        for data, dies in zip(writes, deaths, strict=False):
            ship.write(data)
            await ship.step(dies)
        return await ship.finish()

    whole = b"".join(writes).decode()
    expected = whole.split("\n")
    if not expected[-1]:
        expected.pop()
    assert asyncio.run(play()) == expected


async def test_a_line_is_shipped_when_it_ends_and_not_before(tmp_path: Path) -> None:
    ship = Ship(tmp_path)
    assert not await ship.step()
    ship.write(b"half")
    assert not await ship.step()
    ship.write(b" whole\nnext")
    assert await ship.step()
    assert ship.stream == {0: ["half whole"]}
    assert await ship.finish() == ["half whole", "next"]


async def test_a_progress_bar_shows_each_state(tmp_path: Path) -> None:
    ship = Ship(tmp_path)
    ship.write(b"10%\r20%\r")
    await ship.step()
    assert ship.stream == {0: ["10%"]}
    ship.write(b"\ndone\r\n")
    assert await ship.finish() == ["10%", "20%", "done"]


@pytest.mark.parametrize("before", [CHUNK - 2, CHUNK - 1, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_a_chunk_that_ends_within_a_line_makes_no_empty_line(tmp_path: Path, before: int, end: bytes) -> None:
    ship = Ship(tmp_path)
    ship.write("é".encode() * (before // 2) + b"x" * (before % 2) + end + b"next" + end)
    lines = await ship.finish()
    assert lines[-1] == "next"
    assert all(line and "\ufffd" not in line for line in lines)


async def test_a_large_backlog_goes_in_bounded_batches(tmp_path: Path) -> None:
    ship = Ship(tmp_path)
    ship.write(b"0123456789\n" * 50_000)
    assert len(await ship.finish()) == 50_000
    assert max(sum(len(line) + 1 for line in lines) for lines in ship.stream.values()) <= CHUNK


def test_a_line_that_is_too_long_is_cut_and_says_so() -> None:
    (line,) = split_lines(b"y" * (MAX_LINE + 5))
    assert line.endswith("... (5 more)")


def test_bytes_that_are_no_text_do_not_stop_the_stream() -> None:
    assert split_lines(b"\xff\xfe\nok\n") == ["��", "ok"]


@pytest.mark.parametrize("line", ["", "[]", "{", '{"key": "loss"}', "[" * 100_000, '{"key":"a","value":1,"step":"x"}'])
def test_what_is_no_metric_is_skipped(line: str) -> None:
    assert parse_point(line) is None


@pytest.mark.parametrize(("written", "kept"), [("NaN", "nan"), ("-Infinity", "-inf"), ("0.5", 0.5), ('"nan"', "nan")])
def test_a_metric_that_is_no_number_travels_as_a_string(written: str, kept: float | str) -> None:
    point = parse_point(f'{{"key": "loss", "value": {written}, "step": 3, "time_ms": 1}}')
    assert point is not None
    assert point.value == kept
