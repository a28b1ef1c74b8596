"""``python -m miles_wan.rollout.sglang.supervisor PARENT_PID COMMAND...`` runs a command that must not outlive its parent.
The command gets a session of its own; when it ends, this process ends with its code; when the parent dies, or this process
is told to stop, the whole session is killed. Standard library only: it is the one process that must always work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 5.0  # tidying takes 2 s; after that SGLang only frees its memory, for 10 s
_LEFTOVER_SECONDS = 2.0


def run(parent_pid: int, command: Sequence[str]) -> int:
    """Run ``command`` for as long as process ``parent_pid`` lives; returns its exit code.

    A file descriptor of the parent is watched, not the parent-death signal: that one fires when the *thread* that started
    us ends. The command itself may use the signal, since this process has one thread.
    """
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return 1
    stop_read, stop_write = os.pipe()

    def stop(_number: int, _frame: FrameType | None) -> None:
        os.write(stop_write, b"x")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_supervisor, close_fds=True)
    try:
        finished = os.pidfd_open(child.pid)
        ready, _, _ = select.select([parent, finished, stop_read], [], [])
        if stop_read in ready and parent not in ready:
            _ask_to_end(child)
    finally:
        _kill_session(child)
    code = child.wait()
    return code if code >= 0 else 128 - code  # as a shell tells the signal that ended a command


def _die_with_supervisor() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _ask_to_end(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGINT)  # SGLang tidies up after an interrupt, not after SIGTERM
    with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed with its session
        child.wait(timeout=_GRACE_SECONDS)


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    """Kill the child, give what it started a moment to tidy up and follow, then kill the rest of its session."""
    child.kill()
    deadline = time.monotonic() + _LEFTOVER_SECONDS
    try:
        while time.monotonic() < deadline:
            os.killpg(child.pid, 0)  # the child leads its session, so its group is everything it started
            child.poll()  # a dead leader that nobody collected would count as alive
            time.sleep(0.05)
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
