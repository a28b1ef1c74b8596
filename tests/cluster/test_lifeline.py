"""The lifeline ends what a run started, wherever it hid, and nothing else."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from miles_wan.cluster import lifeline

# A child of its own session whose parent has ended, and one that ignores SIGTERM: both as a server may be.
HIDING = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
if os.fork() == 0:
    subprocess.Popen(sleep, start_new_session=True)
    os._exit(0)
os.wait()
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the child inherits
subprocess.Popen(sleep)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
time.sleep(float(sys.argv[1]))
"""


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def start(run_id: str, folder: Path, *, seconds: float = 600, deaf: bool = False) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "miles_wan.cluster.lifeline", run_id, str(folder)]
    return subprocess.Popen(
        [*command, sys.executable, "-c", HIDING, str(seconds), "deaf" if deaf else ""],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, lifeline.MARKER: run_id},
    )


@pytest.fixture
def run_id() -> Iterator[str]:
    value = f"test-{secrets.token_hex(4)}"
    yield value
    for process in lifeline.members(value):
        process.kill()


def test_closing_the_pipe_ends_daemons_and_processes_that_ignore_sigterm(run_id: str, tmp_path: Path) -> None:
    process = start(run_id, tmp_path / "run", deaf=True)
    wait_for(lambda: len(lifeline.members(run_id)) == 4)  # the lifeline, its command, the daemon, the child
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(lifeline.GRACE_SECONDS + 10) == 0
    assert lifeline.members(run_id) == []
    assert not (tmp_path / "run").exists()


def test_force_does_not_wait_for_processes_that_ignore_sigterm(run_id: str, tmp_path: Path) -> None:
    process = start(run_id, tmp_path / "run", deaf=True)
    wait_for(lambda: len(lifeline.members(run_id)) == 4)
    started = time.monotonic()
    process.communicate(lifeline.FORCE, timeout=20)
    assert time.monotonic() - started < lifeline.GRACE_SECONDS - 1
    assert lifeline.members(run_id) == []


def test_a_command_that_ends_by_itself_takes_its_children_along_and_leaves_its_folder(
    run_id: str, tmp_path: Path
) -> None:
    process = start(run_id, tmp_path / "run", seconds=1)
    assert process.wait(30) == 1
    assert lifeline.members(run_id) == []
    assert (tmp_path / "run").exists()


def test_another_run_and_unmarked_processes_are_left_alone(run_id: str, tmp_path: Path) -> None:
    other = start(f"{run_id}-2", tmp_path / "other")  # a marker that merely begins like the first one
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        wait_for(lambda: len(lifeline.members(f"{run_id}-2")) == 4)
        assert lifeline.end_members(run_id, grace=0.5) == set()
        assert bystander.poll() is None
        assert len(lifeline.members(f"{run_id}-2")) == 4
    finally:
        bystander.kill()
        bystander.wait()
        other.communicate(lifeline.FORCE, timeout=30)


def test_signals_that_reach_the_whole_machine_do_not_stop_the_lifeline_before_its_work(
    run_id: str, tmp_path: Path
) -> None:
    process = start(run_id, tmp_path / "run")
    wait_for(lambda: len(lifeline.members(run_id)) == 4)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.5)
    assert process.poll() is None
    assert len(lifeline.members(run_id)) == 4
    process.communicate(lifeline.FORCE, timeout=20)
    assert lifeline.members(run_id) == []


def test_killing_the_lifeline_terminates_its_command(run_id: str, tmp_path: Path) -> None:
    process = start(run_id, tmp_path / "run")
    wait_for(lambda: len(lifeline.members(run_id)) == 4)
    [command] = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    wait_for(lambda: not command.is_running() or command.status() == psutil.STATUS_ZOMBIE, 5)


def test_shared_memory_goes_when_its_name_says_that_it_is_the_runs(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    for name in ("torch_4711_1_0", "torch_4712_1_0", "torch_x", "weights-mw-1234", "weights-mw-5678", "sem.mp-abc"):
        (shared / name).touch()
    lifeline.remove_leftovers("mw-1234", tmp_path / "run", pids={4711}, shared_memory=shared)
    left = {entry.name for entry in shared.iterdir()}
    assert left == {"torch_4712_1_0", "torch_x", "weights-mw-5678", "sem.mp-abc"}


def test_torch_shared_memory_of_a_killed_process_is_removed(run_id: str, tmp_path: Path) -> None:
    code = (
        "import torch, time; torch.multiprocessing.set_sharing_strategy('file_system');"
        "t = torch.zeros(1000).share_memory_(); print('ready', flush=True); time.sleep(600)"
    )
    environment = {**os.environ, lifeline.MARKER: run_id, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    process.stdout.readline()
    pattern = f"torch_{process.pid}_*"
    assert list(Path("/dev/shm").glob(pattern))
    pids = lifeline.end_members(run_id)
    process.wait()
    assert process.pid in pids
    assert len(pids) == 2, "the process and torch's manager, which outlives it"
    lifeline.remove_leftovers(run_id, tmp_path / "run", pids=pids)
    assert not list(Path("/dev/shm").glob(pattern))
