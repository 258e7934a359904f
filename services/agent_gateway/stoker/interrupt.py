"""Ctrl-C that gets through: Python drops a KeyboardInterrupt that comes inside a destructor or a callback."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN_S = 0.5


@contextmanager
def interruptible() -> Iterator[None]:
    """While this lasts, an interrupt that was dropped comes again, until it ends what goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
        return
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(AGAIN_S):
            os.kill(os.getpid(), signal.SIGINT)

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=repeat, daemon=True).start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGINT, before)
