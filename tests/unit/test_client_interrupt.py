"""Ctrl-C ends a command that streams, even when Python drops the first KeyboardInterrupt."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest

from stoker.interrupt import AGAIN_S, interruptible


def test_an_interrupt_that_was_dropped_comes_again() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        with contextlib.suppress(KeyboardInterrupt):  # as a destructor would
            signal.raise_signal(signal.SIGINT)
        threading.Event().wait(20 * AGAIN_S)
        pytest.fail("it never came again")


def test_afterwards_everything_is_as_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_beside_the_main_thread_nothing_is_changed() -> None:
    told: list[BaseException] = []

    def work() -> None:
        try:
            with interruptible():
                pass
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not told
