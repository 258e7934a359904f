"""Runs a command that knows nothing of us in its own group, and ends the group when the supervisor is gone.

`python -m stoker_local.tether COMMAND...`: for programs with children of their own, which a death signal would miss.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys


def main() -> int:
    lifeline = int(os.environ["STOKER_LIFELINE_FD"])
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(sys.argv[1:], start_new_session=True)
    while child.poll() is None:
        readable, _, _ = select.select([lifeline, woken], [], [])
        got = os.read(woken, 64) if woken in readable else b""
        if lifeline in readable or signal.SIGTERM in got or signal.SIGINT in got:
            os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
