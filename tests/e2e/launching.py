"""Runs of the real launcher for the end-to-end tests: started, watched, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from miles_wan.tiny import TinyPaths

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "scripts" / "run_diffusion_grpo_wan22_ti2v.py"
SMALL = (
    "--num-rollouts", "3", "--eval.max-records", "4", "--eval-interval", "1", "--checkpoint.interval", "1",
    "--rollout.prompts-per-rollout", "2", "--rollout.samples-per-prompt", "4", "--training.micro-batch-size", "2",
    "--algorithm.optimizer-steps-per-rollout", "2", "--algorithm.kl-beta", "0.01",
)  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    code: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


def command(paths: TinyPaths, folder: Path, *extra: str, recipe: str = "tiny_ti2v") -> list[str]:
    """The launcher's command line for the tiny checkpoint on two CPU slots: TP 2, two FSDP ranks."""
    return [
        sys.executable, str(LAUNCHER), "--recipe", recipe, "--device", "cpu", "--num-gpus", "2",
        "--model", str(paths.model), "--reward-model", str(paths.reward), "--data-jsonl", str(paths.train_jsonl),
        "--eval-data-jsonl", str(paths.eval_jsonl), "--output-dir", str(folder), *extra,
    ]  # fmt: skip


def run(arguments: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None) -> Finished:
    """Run to the end."""
    done = subprocess.run(
        arguments, env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=800, check=False
    )
    return Finished(done.returncode, done.stdout + done.stderr, folder)


def run_and_kill(arguments: Sequence[str], folder: Path, *, point: str) -> set[int]:
    """Start, wait until the run stands at ``point``, and SIGKILL launcher and driver there.

    Returns:
        Process ids of everything the run had started.
    """
    reached = folder.parent / f"{folder.name}.reached"
    log = folder.parent / f"{folder.name}.killed.log"
    environment = {**os.environ, "MILES_WAN_STOP_AT": point, "MILES_WAN_STOP_FILE": str(reached)}
    with log.open("wb") as output:
        launcher = subprocess.Popen(arguments, env=environment, stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 600
    while not reached.exists():
        assert launcher.poll() is None, f"the run ended before {point}:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"the run did not reach {point}:\n{log.read_text()[-4000:]}"
        time.sleep(0.2)
    time.sleep(1)  # the other processes go as far as they can without the one that stands still
    marked = processes_of(folder)
    drivers = [process for process in marked if _is_driver(process)]
    assert drivers, "no driver process was found"
    launcher.send_signal(signal.SIGKILL)
    for process in drivers:
        process.send_signal(signal.SIGKILL)
    launcher.wait()
    return {process.pid for process in marked}


def processes_of(folder: Path) -> list[psutil.Process]:
    """Everything a run in ``folder`` has started, found by the run marker of its driver."""
    marker = next(
        (
            mark
            for process in psutil.process_iter()
            if _is_driver(process) and str(folder) in _line(process) and (mark := _mark(process))
        ),
        None,
    )
    return [process for process in psutil.process_iter() if marker is not None and _mark(process) == marker]


def alive(pids: set[int]) -> set[int]:
    """Those of ``pids`` that still run."""
    return {pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}


def _is_driver(process: psutil.Process) -> bool:
    return "miles_wan.cli" in _line(process) and " train " in f"{_line(process)} "


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _mark(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("MILES_WAN_RUN_ID")
    except (psutil.Error, OSError):
        return None
