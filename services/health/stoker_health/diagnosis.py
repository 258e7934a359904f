"""What the text of a failed job tells: where it began, of which class it is, whose fault, what helps. Pure.

Text alone decides little, so it goes by what part each line plays. What launchers do to the rest, what libraries advise
and what ranks print that only lost another one is never where a failure began, whoever prints it first or calls it the
root cause. Of what is left, hardware that names itself is believed first, then the earliest line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .signatures import SIGNATURES, FailureClass, Signature, signature
from .xids import Blame

SEQUENCE = re.compile(r"\[rank ?(\d+)\].*SeqNum ?= ?(\d+)", re.IGNORECASE)
# Ranks of one healthy group are a few collectives apart at most; more means that they do not run the same program.
DESYNC = 16
CONFIRMATIONS = [row for row in SIGNATURES if row.role == "confirmation"]
BY_NAME = {row.name: row for row in SIGNATURES}
BY_CODE = {-9: "killed", 137: "killed", -11: "segfault", 139: "segfault", -6: "segfault", 134: "segfault",
           -7: "nccl_shm", 135: "nccl_shm", 126: "wrong_input", 127: "wrong_input"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reading of one failure. `line` is the number of the line that decided, if a line did."""

    failure: FailureClass
    blame: Blame
    signature: str | None
    retry: bool
    hint: str
    line: int | None = None
    outcome: str | None = None


def diagnose(lines: Sequence[str], exit_code: int | None = None) -> Diagnosis:
    """What these lines, in the order of time over all ranks, and the exit code of the first that failed tell."""
    seen = [(number, row) for number, line in enumerate(lines) if (row := signature(line)) is not None]
    by_role = {role: [s for s in seen if s[1].role == role] for role in ("root", "symptom", "cascade")}
    confirmations = [row for row in CONFIRMATIONS if any(row.pattern.search(line) for line in lines)]
    strong = [s for s in by_role["root"] if s[1].strong]
    for number, row in strong or by_role["root"]:
        confirmed = _confirmed(row, confirmations)
        return _made(confirmed or row, number)
    if desync := _desync(lines):
        return desync
    for number, row in by_role["symptom"]:
        return _made(row, number)
    for _, row in by_role["cascade"]:
        if confirmed := _confirmed(row, confirmations):
            return _made(confirmed, None)
    if exit_code in BY_CODE:
        return _made(BY_NAME[BY_CODE[exit_code]], None)
    for number, row in by_role["cascade"]:
        return _made(row, number)
    return Diagnosis("unknown", "unknown", None, True, "Nothing that it printed says why; each rank's own log may.")


def _confirmed(row: Signature, confirmations: Sequence[Signature]) -> Signature | None:
    return next((c for c in confirmations if row.name in c.confirms), None)


def _desync(lines: Sequence[str]) -> Diagnosis | None:
    """Ranks that wait in collectives far apart run different programs."""
    waits = {int(m[1]): int(m[2]) for line in lines if (m := SEQUENCE.search(line))}
    if len(waits) < 2 or max(waits.values()) - min(waits.values()) < DESYNC:
        return None
    behind = min(waits, key=lambda rank: (waits[rank], rank))
    apart = max(waits.values()) - min(waits.values())
    hint = f"Rank {behind} is {apart} collectives behind: find where the ranks branch by data or rank."
    return Diagnosis("user_error", "user", "desync", False, hint)


def _made(row: Signature, line: int | None) -> Diagnosis:
    return Diagnosis(row.failure, row.blame, row.name, row.retry, row.hint, line, row.outcome)
