"""Evidence for supervised training: one run, and the same run killed twice and resumed, side by side. In: what the runs start
with. Out: a table of both experts, whether the curves are equal, and the picture of the first run.

    miles-wan tiny --family wan2.2-t2v-a14b --out world
    python tests/toy_clips.py clips
    python benchmarks/supervised.py --model world/Wan2.2-T2V-A14B-tiny --train clips/train.jsonl --validation clips/validation.jsonl
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from scipy import stats

from miles_wan.tracking.names import is_timing
from miles_wan.tracking.sinks import read_metrics

EXPERTS = ("high", "low")


def main(
    model: Path,
    train: Path,
    validation: Path,
    out: Path = Path("runs/supervised_evidence"),
    recipe: str = "tiny",
    num_steps: int = 300,
    ranks: int = 2,
    kill_at: tuple[int, int] = (70, 170),
) -> None:
    """Train, train again with two kills, compare.

    Args:
        model: checkpoint with random weights.
        train, validation: clips.
        out: folder of the runs; it must not exist.
        recipe: of configs/sft.
        num_steps: optimizer steps.
        ranks: FSDP2 ranks.
        kill_at: optimizer steps from which on the second run is killed (SIGKILL, everything at once).
    """
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "miles_wan.cli", "sft", "--recipe", recipe, "--model", str(model)]
    command += ["--data-jsonl", str(train), "--eval-data-jsonl", str(validation), "--num-gpus", str(ranks)]
    command += ["--num-steps", str(num_steps), "--checkpoint.interval", "50", "--data.cache-dir", str(out / "cache")]
    started = time.monotonic()
    _start([*command, "--output-dir", str(out / "whole")]).wait()
    print(f"the whole run took {time.monotonic() - started:.0f} s")
    killed = [*command, "--output-dir", str(out / "killed")]
    for number, step in enumerate(kill_at):
        _kill_from(step, _start(killed + ["--resume", "latest"] * bool(number)), out / "killed" / "metrics.jsonl")
    _start([*killed, "--resume", "latest"]).wait()
    _report(out / "whole", num_steps=num_steps)
    _compare(out / "whole", out / "killed")
    shutil.copy(out / "whole" / "loss.png", out / "supervised.png")


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, start_new_session=True)


def _kill_from(step: int, process: subprocess.Popen[bytes], metrics: Path) -> None:
    while not metrics.is_file() or max(read_metrics(metrics), default=0) < step:
        if process.poll() is not None:
            raise SystemExit(f"the run ended before step {step}, with code {process.returncode}")
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    print(f"killed at step {max(read_metrics(metrics))}")


def _report(run: Path, *, num_steps: int) -> None:
    """First and last tenth of the training losses, and the validation before and after, of each expert."""
    history = read_metrics(run / "metrics.jsonl")
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    samples = {name: sum(row.get(f"sft/samples/{name}", 0) for row in history.values()) for name in EXPERTS}
    tenth = num_steps // 10
    print(
        "| expert | samples | training: first tenth | last tenth | last - first (95 %) | validation before | after | change (95 %) |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in EXPERTS:
        curve = [row[f"sft/loss/{name}"] for row in history.values() if f"sft/loss/{name}" in row]
        first, last = np.array(curve[:tenth]), np.array(curve[-tenth:])
        fall = stats.ttest_ind(last, first, equal_var=False).confidence_interval(0.95)
        change = summary["validation_change"][name]
        print(
            f"| {name} | {samples[name]:.0f} | {first.mean():.4f} | {last.mean():.4f} | [{fall.low:.4f}, {fall.high:.4f}] | "
            f"{summary['validation_before'][name]:.4f} | {summary['validation_after'][name]:.4f} | "
            f"{change['mean']:.4f} ± {change['ci95']:.4f} |"
        )


def _compare(whole: Path, killed: Path) -> None:
    """Every metric of every step but the clocks."""
    first, second = (read_metrics(run / "metrics.jsonl") for run in (whole, killed))
    different = [
        (step, name)
        for step in first.keys() | second.keys()
        for name in first.get(step, {}).keys() | second.get(step, {}).keys()
        if not is_timing(name) and first.get(step, {}).get(name) != second.get(step, {}).get(name)
    ]
    numbers = sum(not is_timing(name) for row in first.values() for name in row)
    print(
        f"killed twice and resumed: {len(different)} of {numbers} numbers differ{': ' if different else ''}{different[:5]}"
    )


if __name__ == "__main__":
    tyro.cli(main)
