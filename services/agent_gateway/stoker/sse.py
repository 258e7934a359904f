"""Server-sent events from the lines of a response."""

from __future__ import annotations

from collections.abc import Iterator


def parse_sse(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """(id, event, data) of each message; comments are heartbeats and skipped."""
    id, name, data = "", "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield id, name, "\n".join(data)
            id, name, data = "", "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            id = value
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)
