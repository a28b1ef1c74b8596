"""The launcher draws the bars of a driver in another process, and the streamed log stays readable above them."""

import io
import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from miles_wan.tracking.follow import ProgressFollower, follow_progress
from miles_wan.tracking.progress import ProgressState

STATE = ProgressState(total=45, step=12, phase="train", phase_done=3, phase_total=8, headline="reward 0.5")


def save(path: Path, state: ProgressState, *, at: float) -> None:
    path.write_text(json.dumps(vars(state)))
    os.utime(path, (at, at))


def test_the_bars_of_this_run_are_drawn_and_those_of_an_earlier_or_torn_file_are_not(tmp_path: Path) -> None:
    path, console = tmp_path / "progress.json", Console(file=io.StringIO(), force_terminal=True, width=200)
    save(path, replace(STATE, headline="of an earlier run"), at=0)
    with ProgressFollower(path, console, poll_seconds=0.01):
        time.sleep(0.1)
        path.write_text('{"torn')
        time.sleep(0.1)
        save(path, STATE, at=time.time() + 5)
        time.sleep(0.3)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "12/45" in shown
    assert "3/8" in shown
    assert "reward 0.5" in shown
    assert "earlier" not in shown


def test_without_a_terminal_nothing_is_added_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "progress.json", STATE, at=time.time() + 5)
    with follow_progress(tmp_path / "progress.json"):
        time.sleep(0.7)
        sys.stdout.write("rollout 1/2\n")
    assert capfd.readouterr() == ("rollout 1/2\n", "")


def test_on_a_terminal_the_streamed_log_and_the_bars_are_both_seen(tmp_path: Path) -> None:
    code = (
        "import sys, time; from miles_wan.tracking.follow import follow_progress\n"
        "with follow_progress(sys.argv[1]):\n"
        "    sys.stdout.write('2026-01-01 driver INFO [bold] line\\n'); sys.stdout.flush(); time.sleep(1)\n"
    )
    save(tmp_path / "progress.json", STATE, at=time.time() + 60)
    primary, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150"}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "progress.json")],
        stdout=secondary,
        stderr=secondary,
        env=environment,
    )
    os.close(secondary)
    shown = read_all(primary)
    assert child.wait() == 0
    assert "driver INFO [bold] line" in shown
    assert "12/45" in shown


def read_all(descriptor: int) -> str:
    data = b""
    while True:
        try:
            data += os.read(descriptor, 4096)
        except OSError:  # the other side is closed
            os.close(descriptor)
            return data.decode()
