"""Does the loop learn, or is it luck? Seeds x {true, flipped, zero learning signal}, the same budget for each.

    python benchmarks/evidence.py --out runs/evidence

``flipped`` negates every advantage, ``zero`` has learning rate 0. For each seed the gains on the same held-out records
are compared in pairs. Finished runs in ``--out`` are kept, so an interrupted evaluation goes on where it stopped.
Writes ``evidence.json``, ``evidence.md`` and ``evidence.png``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

from miles_wan.tiny import make_tiny
from miles_wan.tracking.sinks import read_metrics
from miles_wan.tracking.summary import paired_gain

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAUNCHER = Path(__file__).resolve().parent.parent / "scripts" / "run_diffusion_grpo_wan22_ti2v.py"
SIGNALS = {"true": [], "flipped": ["--algorithm.advantage-sign", "-1"], "zero": ["--training.optimizer.lr", "0"]}
COLOURS = {"true": "tab:blue", "flipped": "tab:red", "zero": "tab:gray"}


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    out: Path = Path("runs/evidence")
    """Folder of the runs and the report."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Run seeds."""
    recipe: str = "tiny_ti2v"
    """Recipe of every run."""
    extra: tuple[str, ...] = ()
    """Further flags of the launcher, for every run."""


def main() -> int:
    """Run what is missing and write the report. Exit code 1 if a run failed."""
    arguments = tyro.cli(Arguments)
    tiny = make_tiny(arguments.out / "tiny")
    failed = []
    for seed in arguments.seeds:
        for signal, flags in SIGNALS.items():
            folder = arguments.out / f"seed{seed}-{signal}"
            if (folder / "summary.json").is_file():
                continue
            command = [
                sys.executable, str(LAUNCHER), "--recipe", arguments.recipe, "--model", str(tiny.model),
                "--reward-model", str(tiny.reward), "--data-jsonl", str(tiny.train_jsonl),
                "--eval-data-jsonl", str(tiny.eval_jsonl), "--output-dir", str(folder), "--resume", "latest",
                "--seed", str(seed), *flags, *arguments.extra,
            ]  # fmt: skip
            print(f"seed {seed}, {signal}: {folder}", flush=True)
            with (arguments.out / f"seed{seed}-{signal}.log").open("ab") as log:
                code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
            if code != 0:
                failed.append(f"seed {seed}, {signal}: exit code {code}, log {log.name}")
    report(arguments)
    print("\n".join(failed))
    return 1 if failed else 0


def report(arguments: Arguments) -> None:
    """Table, figures and picture of the finished runs."""
    runs = {
        (seed, signal): json.loads(path.read_text())
        for seed in arguments.seeds
        for signal in SIGNALS
        if (path := arguments.out / f"seed{seed}-{signal}" / "summary.json").is_file()
    }
    rows, results = [], []
    for seed in arguments.seeds:
        if not all((seed, signal) in runs for signal in SIGNALS):
            continue
        true, flipped, zero = (runs[seed, signal] for signal in SIGNALS)
        # gain(true) - gain(flipped), paired over the records: both began with the same videos.
        difference = paired_gain(_gains(flipped), _gains(true))
        results.append(
            {
                "seed": seed,
                "gain_true": [true["eval_gain_mean"], true["eval_gain_ci95"]],
                "gain_flipped": [flipped["eval_gain_mean"], flipped["eval_gain_ci95"]],
                "gain_zero": zero["eval_gain_mean"],
                "true_minus_flipped": [difference.mean, difference.ci95],
                "holds": difference.mean - difference.ci95 > 0 and all(gain == 0 for gain in _gains(zero)),
                "max_log_prob_gap": max(run["max_log_prob_gap"] for run in (true, flipped, zero)),
            }
        )
        rows.append(
            f"| {seed} | {_pm(true)} | {_pm(flipped)} | {zero['eval_gain_mean']:g} | "
            f"{difference.mean:+.4f} ± {difference.ci95:.4f} | {'yes' if results[-1]['holds'] else 'no'} |"
        )
    (arguments.out / "evidence.json").write_text(json.dumps(results, indent=2))
    head = [
        "| seed | gain, true signal | gain, flipped | gain, rate 0 | true - flipped (paired, 95 %) | lower end above 0, rate 0 exactly 0 |",
        "|---|---|---|---|---|---|",
    ]
    (arguments.out / "evidence.md").write_text("\n".join([*head, *rows]) + "\n")
    _draw(arguments)


def _gains(summary: dict[str, list[float]]) -> list[float]:
    pairs = zip(summary["eval_rewards_before"], summary["eval_rewards_after"], strict=True)
    return [after - before for before, after in pairs]


def _pm(summary: dict[str, float]) -> str:
    return f"{summary['eval_gain_mean']:+.4f} ± {summary['eval_gain_ci95']:.4f}"


def _draw(arguments: Arguments) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for seed in arguments.seeds:
        for signal in SIGNALS:
            path = arguments.out / f"seed{seed}-{signal}" / "metrics.jsonl"
            if not path.is_file():
                continue
            history = read_metrics(path)
            points = [(step, row["eval/reward_mean"]) for step, row in history.items() if "eval/reward_mean" in row]
            first = points[0][1] if points else 0.0
            axes.plot(
                [step for step, _ in points],
                [reward - first for _, reward in points],
                color=COLOURS[signal],
                marker="o",
                label=signal if seed == arguments.seeds[0] else None,
            )
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlabel("rollouts")
    axes.set_ylabel("change of the held-out reward")
    axes.legend()
    figure.savefig(arguments.out / "evidence.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
