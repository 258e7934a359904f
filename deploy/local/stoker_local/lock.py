"""A lock file that one process at a time owns, and that says who: gone with its owner, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO


class Owned(Exception):
    """Another process owns the lock; the argument is its pid, or `unknown`."""


def own(path: Path) -> IO[str]:
    """Take the lock and keep it until the file is closed. Raises Owned."""
    lock = path.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise Owned(owner) from None
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
