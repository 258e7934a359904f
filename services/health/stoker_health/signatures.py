"""Signatures of failed jobs: which row of the catalogue a line fits (data/signatures.toml)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .data import rows
from .xids import Blame

Role = Literal["root", "symptom", "confirmation", "cascade", "teardown", "advice"]
FailureClass = Literal[
    "unknown", "config", "user_error", "infra_node", "infra_network", "infra_storage", "transient_capacity"
]


@dataclass(frozen=True, slots=True)
class Signature:
    """One kind of line. A `strong` one is believed wherever it stands; a confirmation beside what it `confirms`."""

    name: str
    pattern: re.Pattern[str]
    role: Role
    source: str
    failure: FailureClass = "unknown"
    blame: Blame = "unknown"
    retry: bool = True
    hint: str = ""
    strong: bool = False
    outcome: str | None = None
    confirms: frozenset[str] = frozenset()


def _table() -> tuple[Signature, ...]:
    table = []
    for row in rows("signatures.toml", "signature"):
        pattern = re.compile("|".join(f"(?:{p})" for p in row.pop("patterns")), re.IGNORECASE)
        failure, confirms = row.pop("class", "unknown"), frozenset(row.pop("confirms", ()))
        table.append(Signature(pattern=pattern, failure=failure, confirms=confirms, **row))
    return tuple(table)


SIGNATURES = _table()


def signature(line: str) -> Signature | None:
    """The first row that fits the line."""
    return next((row for row in SIGNATURES if row.pattern.search(line)), None)
