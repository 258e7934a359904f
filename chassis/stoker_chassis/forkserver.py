"""The warm worker: a process with torch imported that forks a job's processes in milliseconds.

`python -m stoker_chassis.forkserver --socket PATH --preload torch,torch.distributed`

It imports, and never starts a thread, opens a device or a connection of its own, so a fork of it is clean. One JSON
request a connection: spawn, poll, kill, forget, ping. Spawning is idempotent by key. Each child has a session of its
own, writes straight to its files, and dies with this process. How a child ended is written to its exit file, so that
nobody needs to be listening. When the lifeline (a pipe whose other end the supervisor holds) ends, everything ends.

It outlives the launcher on purpose: a launcher that comes back finds its jobs running. While it lives it holds a lock
beside its socket, so that there is never a second one, and a free lock proves its death.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TRACEBACK_LINES = 20
LINE_LIMIT = 2000
LOCK_S = 2.0


class ForkServer:
    """The children by key, and the loop that serves requests and reaps."""

    def __init__(self, path: Path, lifeline: int | None, lock: IO[str]) -> None:
        self.path = path
        self.lifeline = lifeline
        self.lock = lock
        # No two workers of one boot share it, which a process number alone would not give.
        self.identity = f"{os.getpid()}-{time.monotonic_ns()}"
        self.pids: dict[str, int] = {}
        self.gone: set[str] = set()
        self.exits: dict[str, dict[str, Any]] = {}
        self.exit_files: dict[str, str] = {}
        self.libc = ctypes.CDLL(None, use_errno=True)
        # What a job's process leaves behind becomes ours to reap; else a group of zombies would look alive.
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.woken, self.wake = os.pipe()
        for fd in (self.woken, self.wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: None)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.listener.bind(str(path))
        self.listener.listen(64)

    def serve(self) -> None:
        watched: list[Any] = [self.listener, self.woken]
        if self.lifeline is not None:
            watched.append(self.lifeline)
        while True:
            readable, _, _ = select.select(watched, [], [])
            if self.woken in readable:
                numbers = os.read(self.woken, 4096)
                self.reap()
                if signal.SIGTERM in numbers:
                    break
            if self.lifeline is not None and self.lifeline in readable:
                break
            if self.listener in readable:
                connection, _ = self.listener.accept()
                with connection:
                    self.answer(connection)
        for key in list(self.pids):
            self.kill(key, signal.SIGKILL)
        self.path.unlink(missing_ok=True)

    def answer(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        try:
            with connection.makefile("rb") as file:
                request = json.loads(file.readline())
            reply = self.handle(request, connection)
            connection.sendall(json.dumps(reply).encode() + b"\n")
        except (OSError, ValueError, KeyError) as error:
            print(f"bad request: {error!r}", file=sys.stderr, flush=True)  # noqa: T201

    def handle(self, request: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        self.reap()
        match request["do"]:
            case "ping":
                return {"identity": self.identity}
            case "spawn":
                return {"pid": self.spawn(request, connection)}
            case "poll":
                key = request["key"]
                return {"known": key in self.pids, "exit": self.exits.get(key), "group": self.group_lives(key)}
            case "kill":
                if request.get("group", True):
                    return {"sent": self.kill(request["key"], request["signal"])}
                return {"sent": self.kill_alone(request["key"], request["signal"])}
            case "forget":
                self.forget(request["key"])
                return {}
        raise KeyError(request["do"])

    def spawn(self, request: dict[str, Any], connection: socket.socket) -> int:
        key = request["key"]
        if key in self.pids:
            return self.pids[key]
        server = os.getpid()
        # Our own handler must not swallow a signal that is meant for the child and comes before it has dropped it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            self.child(request, connection, server)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self.pids[key] = pid
        if request.get("exit_file"):
            self.exit_files[key] = request["exit_file"]
        return pid

    def child(self, request: dict[str, Any], connection: socket.socket, server: int) -> NoReturn:
        """In the forked child: become the job's process. Never returns."""
        code = 1
        try:
            os.setsid()
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != server:
                os._exit(1)  # it died before the line above, which then does nothing
            signal.set_wakeup_fd(-1)
            for caught in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
                signal.signal(caught, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            signal.signal(signal.SIGINT, signal.default_int_handler)
            connection.close()
            self.listener.close()
            self.lock.close()
            for fd in (self.woken, self.wake, *(() if self.lifeline is None else (self.lifeline,))):
                os.close(fd)
            for number, name, flags in (
                (0, os.devnull, os.O_RDONLY),
                (1, request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
                (2, request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            ):
                opened = os.open(name, flags, 0o644)
                os.dup2(opened, number)
                os.close(opened)
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            as_fresh()
            if request.get("argv"):
                os.execvpe(request["argv"][0], request["argv"], os.environ)
            code = run_script(request["script"], request.get("args", []), request.get("error_file"))
        except BaseException:
            traceback.print_exc()
        finally:
            leave(code)

    def reap(self) -> None:
        by_pid = {pid: key for key, pid in self.pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            key = by_pid.get(pid)
            if key is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            ended = {"code": code if code >= 0 else None, "signal": -code if code < 0 else None}
            if key in self.exit_files:
                write_atomically(Path(self.exit_files[key]), ended)
            self.exits[key] = ended
            self.group_lives(key)

    def group_lives(self, key: str) -> bool:
        """Whether any process of the child's group is left, the child itself or one that it started."""
        return self.kill(key, 0)

    def kill(self, key: str, number: int) -> bool:
        """Signal the child's group. One that was seen empty is never signalled again: its number may be another's."""
        if key not in self.pids or key in self.gone:
            return False
        try:
            os.killpg(self.pids[key], number)
        except ProcessLookupError:
            if key in self.exits:
                self.gone.add(key)
                return False
            os.kill(self.pids[key], number)  # it has not made its group yet
        return True

    def kill_alone(self, key: str, number: int) -> bool:
        """Signal the child and nothing that it started. One that was reaped is gone, whoever has its number now."""
        if key not in self.pids or key in self.exits:
            return False
        os.kill(self.pids[key], number)
        return True

    def forget(self, key: str) -> None:
        if key in self.exits and not self.group_lives(key):
            del self.pids[key], self.exits[key]
            self.gone.discard(key)
            self.exit_files.pop(key, None)


def as_fresh() -> None:
    """In the child: make up for what a new interpreter would have read from its environment, or drawn by chance."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdigit() and int(threads) > 1:
        sys.modules["torch"].set_num_threads(int(threads))
    fraction = os.environ.get("STOKER_GPU_FRACTION", "")
    if "torch" in sys.modules and fraction:
        cuda = sys.modules["torch"].cuda
        # Kept until the job itself first uses CUDA: what has opened a device can no longer be forked.
        cuda._lazy_call(lambda: cuda.set_per_process_memory_fraction(float(fraction), 0))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all ranks of all jobs would draw the same numbers


def run_script(script: str, args: list[str], error_file: str | None) -> int:
    """Run a Python file as `__main__`, as `python FILE ARGS` would; an exception goes to stderr and the error file."""
    sys.argv = [script, *args]
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder that the worker was started in
    sys.path.insert(0, str(Path(script).resolve().parent))
    extra = os.environ.get("PYTHONPATH")
    if extra:
        sys.path[1:1] = extra.split(os.pathsep)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)  # noqa: T201
        return 1
    except BaseException as error:
        shown = user_frames(error)
        sys.stderr.write(shown)
        if error_file:
            tail = [line[:LINE_LIMIT] for line in shown.rstrip().splitlines()[-TRACEBACK_LINES:]]
            told = {"type": type(error).__name__, "message": str(error)[:2000], "traceback": tail}
            write_atomically(Path(error_file), told)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def user_frames(error: BaseException) -> str:
    """The traceback without our own frames and runpy's above the script."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = ("<frozen runpy>", __file__)
    kept = [f for f in frames if f.filename not in ours]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(kept)]
    return "".join(lines + traceback.format_exception_only(error))


def leave(code: int) -> NoReturn:
    """End the child as the interpreter would: threads joined, exit functions run, output flushed."""
    try:
        import atexit
        import threading

        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def write_atomically(path: Path, value: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def own(socket_path: Path) -> IO[str] | None:
    """The lock beside the socket, with our process number in it; None when another worker holds it."""
    socket_path.parent.mkdir(parents=True, exist_ok=True)
    lock = socket_path.with_suffix(".lock").open("a+")
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.close()
                return None
            time.sleep(0.05)
        else:
            break
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--preload", default="")
    arguments = parser.parse_args()
    lock = own(arguments.socket)
    if lock is None:
        print("another worker serves here", file=sys.stderr, flush=True)  # noqa: T201
        return
    # One thread a rank unless the job says otherwise: ranks share the cores, and the forked state must be simple.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in filter(None, arguments.preload.split(",")):
        importlib.import_module(name)
    lifeline = os.environ.get("STOKER_LIFELINE_FD")
    server = ForkServer(arguments.socket, int(lifeline) if lifeline else None, lock)
    gc.collect()
    gc.freeze()
    server.serve()


if __name__ == "__main__":
    main()
