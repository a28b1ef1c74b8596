"""Starts one command and ends everything it ever started. In: a marker, a folder, a command and a pipe on stdin.
Out: when the pipe closes (its holder ended or was killed) or says so, no process that bears the marker, no folder, no
shared memory of theirs. It knows nothing of Ray and stays light: it lives as long as the run.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

MARKER = "MILES_WAN_RUN_ID"
STOP, FORCE = b"s", b"f"
GRACE_SECONDS = 8.0
KILL_SECONDS = 30.0
JANITOR_SECONDS = 2.0
# They outlive their clients by design and then remove the shared memory that those left, so they go last.
JANITORS = ("torch_shm_manager", "multiprocessing.resource_tracker")
_PR_SET_PDEATHSIG = 1

Finder = Callable[[], list[psutil.Process]]


def members(run_id: str) -> list[psutil.Process]:
    """All live processes of a run: those that inherited its marker in their environment, and their descendants.

    Parenthood alone would miss daemons, and process groups those that made their own; the environment stays.
    """
    processes = {process.pid: process for process in psutil.process_iter(["ppid"])}
    found = {pid for pid in processes if _has_marker(pid, run_id)}
    while grown := {pid for pid, process in processes.items() if process.info["ppid"] in found} - found:
        found |= grown
    return [processes[pid] for pid in found if pid != os.getpid() and _alive(processes[pid])]


def end_members(run_id: str, *, grace: float = GRACE_SECONDS, hurry: Callable[[], bool] = lambda: False) -> set[int]:
    """End all processes of a run: ask (SIGTERM), wait, kill; janitors last.

    Args:
        run_id: value of the marker.
        grace: seconds between asking and killing.
        hurry: cuts the grace short when it turns true.

    Returns:
        The ids of all processes that were found. Those that withstand SIGKILL for ``KILL_SECONDS`` are logged.
    """
    seen: set[int] = set()

    def everyone() -> list[psutil.Process]:
        found = members(run_id)
        seen.update(process.pid for process in found)
        return found

    def workers() -> list[psutil.Process]:
        return [process for process in everyone() if not _is_janitor(process)]

    for process in workers():
        _signal(process, signal.SIGTERM)
    _wait_until_gone(workers, grace, hurry=hurry)
    _kill(workers)
    _wait_until_gone(everyone, JANITOR_SECONDS, hurry=lambda: False)
    _kill(everyone)
    return seen


def remove_leftovers(run_id: str, folder: Path, *, pids: set[int], shared_memory: Path = Path("/dev/shm")) -> None:
    """Remove the run's folder and the shared-memory files that are its own by name: torch's carry the process id of
    their maker (``torch_<pid>_...``), any other may carry the run id."""
    shutil.rmtree(folder, ignore_errors=True)
    for entry in shared_memory.glob("*"):
        maker = entry.name.split("_")[1] if entry.name.startswith("torch_") else ""
        if run_id in entry.name or (maker.isdigit() and int(maker) in pids):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _wait_until_gone(find: Finder, seconds: float, *, hurry: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while find() and not hurry() and time.monotonic() < deadline:
        time.sleep(0.1)


def _kill(find: Finder) -> None:
    """Again and again, since what is being killed may still have started something."""
    deadline = time.monotonic() + KILL_SECONDS
    while left := find():
        if time.monotonic() > deadline:
            logger.error("processes that cannot be killed: %s", [process.pid for process in left])
            return
        for process in left:
            _signal(process, signal.SIGKILL)
        time.sleep(0.1)


def _has_marker(pid: int, run_id: str) -> bool:
    try:
        return f"{MARKER}={run_id}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it ended meanwhile, or is another user's


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _is_janitor(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(name in command for name in JANITORS)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        logger.debug("process %d ended by itself", process.pid)


def _end_with_parent() -> None:
    """In the child: the kernel terminates it should the lifeline itself be killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class _Pipe:
    """The launcher's end of the agreement: silence means go on; a byte or the end of the pipe means stop."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._forced = False

    def read(self) -> None:
        self._forced = os.read(self.fd, 1) == FORCE or self._forced

    def forced(self) -> bool:
        if select.select([self.fd], [], [], 0)[0]:
            self.read()
        return self._forced


def supervise(run_id: str, folder: Path, command: list[str]) -> int:
    """Run ``command`` until the pipe on stdin says stop, closes, or the command ends; then end the whole run.

    Returns:
        0 when it was told to stop, 1 when the command ended by itself (the folder is then left: it holds the reason).
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    pipe = _Pipe(sys.stdin.fileno())
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
    ready, _, _ = select.select([pipe.fd, os.pidfd_open(child.pid)], [], [])
    told = pipe.fd in ready
    logger.info("%s; ending run %s", "told to stop" if told else "the command ended by itself", run_id)
    if told:
        pipe.read()
    pids = end_members(run_id, hurry=pipe.forced)
    child.poll()
    if told:
        remove_leftovers(run_id, folder, pids={*pids, child.pid})
    logger.info("ended %d processes of run %s", len(pids), run_id)
    return 0 if told else 1


def main() -> int:
    """``python -m miles_wan.cluster.lifeline RUN_ID FOLDER COMMAND...``"""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s lifeline: %(message)s", stream=sys.stderr)
    run_id, folder, *command = sys.argv[1:]
    return supervise(run_id, Path(folder), command)


if __name__ == "__main__":
    sys.exit(main())
