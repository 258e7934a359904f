"""What a training script may call: log metrics, save complete checkpoints, resume, stop in time. Standard library only.

Outside of Stoker (no STOKER_ variables set) logging goes nowhere, checkpoints go to ./checkpoints, and nothing resumes,
so that the same script runs by hand.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["checkpoint_dir", "log", "parameters", "resume", "save", "should_stop"]

MARKER = "COMPLETE"
NAME = re.compile(r"^step-(\d+)$")
_stop = {"listener": 0, "asked": False}


def log(step: int, **metrics: float) -> None:
    """Log metrics of one training step. NaN and infinities are kept as they are.

    Args:
        step: the training step, counted from 0.
        metrics: values by name.
    """
    path = os.environ.get("STOKER_METRICS_FILE")
    if path is None:
        return
    now = time.time_ns() // 1_000_000
    lines = [
        json.dumps({"key": key, "value": _number(value), "step": int(step), "time_ms": now}) + "\n"
        for key, value in metrics.items()
    ]
    # One write in append mode: lines of several processes cannot mix.
    with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write("".join(lines))


def _number(value: float) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def parameters() -> dict[str, Any]:
    """The job's `parameters`; empty outside of Stoker."""
    path = os.environ.get("STOKER_PARAMETERS")
    if path is None:
        return {}
    given: dict[str, Any] = json.loads(Path(path).read_text())
    return given


def checkpoint_dir() -> Path:
    """Where this job's checkpoints lie; the same folder in every attempt."""
    return Path(os.environ.get("STOKER_CHECKPOINT_DIR", "checkpoints"))


def save(step: int, write: Callable[[Path], None]) -> Path:
    """Save one checkpoint so that it is either complete or not there at all. Call it on one rank only.

    Args:
        step: how many steps are done; training resumes with this one.
        write: writes the checkpoint's files into the folder it is given.

    Returns:
        The checkpoint's folder. Older ones are removed, STOKER_CHECKPOINT_KEEP (3) are kept.
    """
    folder = checkpoint_dir()
    final, part = folder / f"step-{step:010d}", folder / f".step-{step:010d}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write(part)
    for path in (*part.rglob("*"), part):
        _sync(path)
    _remove(final)
    part.rename(final)
    _sync(folder)
    (final / MARKER).touch()
    _sync(final / MARKER)
    _sync(final)
    _forget_old(folder, final)
    return final


def resume() -> tuple[int, Path] | None:
    """The checkpoint to resume from, as (step, folder); None for a fresh start."""
    given = os.environ.get("STOKER_RESUME_FROM")
    if not given:
        return None
    match = NAME.match(Path(given).name)
    return (int(match.group(1)), Path(given)) if match else None


def should_stop() -> bool:
    """Whether the platform has asked the job to end: save a checkpoint, then exit with 0 within the grace.

    Call it in every step, on every rank, first from the main thread: from then on SIGTERM no longer ends the process at
    once. Ranks hear of it at different moments, so let one decide for all (as `examples/chargpt` does).
    """
    if _stop["listener"] != os.getpid():
        signal.signal(signal.SIGTERM, _asked)
        _stop["listener"] = os.getpid()
    if _stop["asked"]:
        _note_stop("told")
    return bool(_stop["asked"])


def _asked(*_: object) -> None:
    if _stop["listener"] != os.getpid():  # a helper process that was forked: what ends it is no stop of the job
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    _stop["asked"] = True
    _note_stop("heard")


def _note_stop(what: str) -> None:
    """For the launcher: a job that ends well without having been told of the stop has done its work."""
    path = os.environ.get("STOKER_STOP_FILE")
    if path is not None:
        Path(path).write_text(what)


def _forget_old(folder: Path, newest: Path) -> None:
    """Keep the newest complete ones; what an attempt that was killed left incomplete goes too."""
    keep = int(os.environ.get("STOKER_CHECKPOINT_KEEP", "3"))
    found = sorted(p for p in folder.iterdir() if NAME.match(p.name) and p != newest)
    complete = [p for p in found if (p / MARKER).exists()]
    kept = {newest, *complete[max(0, len(complete) - (keep - 1)) :]}
    for path in (*(p for p in found if p not in kept), *folder.glob(".step-*.part")):
        _remove(path)


def _remove(path: Path) -> None:
    """The marker goes first, so that what is being removed is never taken for complete."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
