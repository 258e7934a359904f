"""Commands, flags and exit codes are a promise: they change on purpose or not at all."""

from __future__ import annotations

from pathlib import Path

from tests.unit.client_surface import surface

FROZEN = Path(__file__).with_name("client_surface.txt")


def test_the_command_line_is_the_frozen_one() -> None:
    assert surface() == FROZEN.read_text(), (
        "meant? then: python -m tests.unit.client_surface > tests/unit/client_surface.txt"
    )
