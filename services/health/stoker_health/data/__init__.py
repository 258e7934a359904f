"""Catalogues as data files, with a source on each row, and how they are read."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any


def rows(file: str, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind of a data file of this package."""
    found: list[dict[str, Any]] = tomllib.loads(resources.files(__name__).joinpath(file).read_text())[kind]
    return found
