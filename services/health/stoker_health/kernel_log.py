"""The kernel's log: XIDs of every driver generation, GPUs off the bus, and what kernel_lines.toml knows. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from stoker_proto import CheckResult

from .catalogue import graded
from .data import rows
from .xids import BURST_S, xid

EXCERPT = 512
NEIGHBOUR_S = 1.0  # XID 154 and detail lines come within a second of the XID that they belong to
COLLATERAL_S = 60.0
OFF_THE_BUS, DOUBLE_BIT = 79, 48
REMEMBERED = 4096  # faults; a log that runs for months must not grow

_RAW = re.compile(r"^\d+,(?P<seq>\d+),(?P<us>\d+),[^;]*;(?P<text>.*)$")
_DECODED = re.compile(
    r"^(?:\w+\s*:\s*\w+\s*:\s*)?(?P<iso>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)[.,](?P<fraction>\d+)(?P<zone>\S*)\s+"
)
_BRACKET = re.compile(r"^(?:\w+\s*:\s*\w+\s*:\s*)?\[\s*(?P<inside>[^\]]*)\]\s?")
_SYSLOG = re.compile(r"^(?:\w{3}\s+\d+ \d\d:\d\d:\d\d )?\S+ (?=kernel: |systemd\[)(?:kernel: )?")
_XID = re.compile(r"\bXid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)(?: GPU-I:\d+)?\)[^:]*: (?P<code>\d+)(?P<text>.*)$")
_NAMED = re.compile(r"NVRM: GPU at (?:PCI:)?(?P<pci>[0-9a-fA-F:.]+): (?P<uuid>GPU-[0-9a-fA-F-]+)")
_OFF_ONE = re.compile(r"NVRM: GPU (?:at )?(?:PCI:)?(?P<pci>[0-9a-fA-F:.]+): GPU has fallen off the bus")
_OFF_BEGIN = re.compile(r"NVRM: The NVIDIA GPU (?P<pci>[0-9a-fA-F:.]+)")
_OFF_END = re.compile(r"fallen off the bus and is not responding to commands")


@dataclass(frozen=True, slots=True)
class Line:
    """One line without what the logger put before it; `at` in seconds of whatever clock wrote it."""

    text: str
    at: float | None = None
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Signal:
    """A line that says something: the graded answer, when, and where in the log."""

    result: CheckResult
    at: float | None
    seq: int | None


@dataclass(frozen=True, slots=True)
class Pattern:
    check: str
    pattern: re.Pattern[str]
    row: Mapping[str, str]


PATTERNS = [Pattern(r["check"], re.compile(r["pattern"]), r) for r in rows("kernel_lines.toml", "line")]


@dataclass(slots=True)
class KernelLog:
    """What must be remembered between lines. `gpus` names a GPU by its PCI address, and learns from the log itself."""

    gpus: dict[str, str] = field(default_factory=dict)
    leaving: str | None = None
    last: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    told: dict[tuple[Any, ...], float | None] = field(default_factory=dict)


def address(pci: str) -> str:
    """The one form of a PCI address: domain of four digits, bus, device; drivers add and drop parts of it."""
    parts = pci.lower().split(".")[0].split(":")
    domain = int(parts[-3], 16) if len(parts) > 2 else 0
    return f"{domain:04x}:{parts[-2].zfill(2)}:{parts[-1].zfill(2)}" if len(parts) > 1 else pci.lower()


def stripped(line: str) -> Line:
    """The line as the kernel wrote it: /dev/kmsg, dmesg plain, -T, decoded or ISO, syslog or journal."""
    if found := _RAW.match(line):
        return Line(found["text"], int(found["us"]) / 1e6, int(found["seq"]))
    at = None
    if found := _DECODED.match(line):
        zone = found["zone"] if re.fullmatch(r"[+-]\d\d:?\d\d", found["zone"]) else "+00:00"
        at = datetime.fromisoformat(found["iso"] + zone).timestamp() + float(f"0.{found['fraction']}")
        line = line[found.end() :]
    if found := _SYSLOG.match(line):
        line = line[found.end() :]
    if found := _BRACKET.match(line):
        inside = found["inside"].strip()
        stamp = _clock(inside)
        if stamp is not None or inside == "...":
            at, line = (stamp if at is None else at), line[found.end() :]
    return Line(line, at)


def _clock(inside: str) -> float | None:
    try:
        return float(inside)
    except ValueError:
        pass
    try:
        return datetime.strptime(inside, "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def read(log: KernelLog, raw: str) -> Signal | None:
    """What the line says, unless it says what was told a moment ago. The state given is changed."""
    line = stripped(raw)
    if named := _NAMED.search(line.text):
        log.gpus[address(named["pci"])] = named["uuid"]
        return None
    if found := _XID.search(line.text):
        return _of_xid(log, line, address(found["pci"]), int(found["code"]))
    if found := _OFF_ONE.search(line.text):
        return _of_xid(log, line, address(found["pci"]), OFF_THE_BUS)
    if found := _OFF_BEGIN.search(line.text):
        log.leaving = address(found["pci"])
        return None
    if _OFF_END.search(line.text):
        pci, log.leaving = log.leaving, None
        return _of_xid(log, line, pci, OFF_THE_BUS)
    for pattern in PATTERNS:
        if found := pattern.pattern.search(line.text):
            return _of_pattern(log, line, pattern, found)
    return None


def read_all(lines: Iterable[str], gpus: Mapping[str, str] | None = None) -> list[Signal]:
    log = KernelLog(dict(gpus or {}))
    return [signal for line in lines if (signal := read(log, line)) is not None]


def _of_xid(log: KernelLog, line: Line, pci: str | None, code: int) -> Signal | None:
    entity = "node" if pci is None else log.gpus.get(pci, f"pci:{pci}")
    row = xid(code)
    before = log.last.get(pci or "")
    near = before is not None and _within(before[1], line.at, NEIGHBOUR_S)
    if row.role == "detail" and near and before is not None and before[0] == DOUBLE_BIT:
        return None
    sub = line.text.split(f": {code}", 1)[-1] if row.role in ("link", "carrier") else ""
    result = CheckResult(check="xid", status="bad", entity=entity, value=float(code), excerpt=line.text[:EXCERPT])
    result = graded(result)
    if row.role == "carrier" and near and before is not None:
        more = {"blame": xid(before[0]).blame, "detail": f"{result.detail}, after XID {before[0]}"}
        result = result.model_copy(update=more)
    if row.role == "collateral":
        caused = before is not None and _within(before[1], line.at, COLLATERAL_S)
        after = f"follows XID {before[0]}" if before is not None and caused else "alone: restart the Fabric Manager"
        result = result.model_copy(update={"detail": f"{result.detail}; {after}"})
    if row.role in ("cause", "link"):
        log.last[pci or ""] = (code, line.at)
    return _once(log, Signal(result, line.at, line.seq), (code, sub), row.burst_s)


def _of_pattern(log: KernelLog, line: Line, pattern: Pattern, found: re.Match[str]) -> Signal | None:
    said = {k: v for k, v in found.groupdict().items() if v is not None}
    row = pattern.row
    entity = "node"
    if "pci" in said:
        pci = address(said["pci"])
        entity = log.gpus.get(pci, f"pci:{pci}")
    elif "entity" in row and "entity" in said:
        entity = row["entity"].format(**said)
    result = CheckResult.model_validate(
        {
            "check": row["check"], "status": "bad", "entity": entity, "severity": row["severity"],
            "action": row["action"], "blame": row["blame"], "detail": row["detail"].format(**said),
            "value": said.get("value"), "excerpt": line.text[:EXCERPT],
        }
    )  # fmt: skip
    return _once(log, Signal(result, line.at, line.seq), (result.check, result.value), BURST_S)


def _once(log: KernelLog, signal: Signal, what: tuple[Any, ...], burst_s: float) -> Signal | None:
    key = (signal.result.entity, *what)
    if key in log.told and _within(log.told[key], signal.at, burst_s):
        return None
    if len(log.told) >= REMEMBERED:
        log.told.pop(next(iter(log.told)))
    log.told[key] = signal.at
    return signal


def _within(before: float | None, now: float | None, seconds: float) -> bool:
    """Lines without a time are taken for neighbours."""
    return before is None or now is None or 0 <= now - before <= seconds
