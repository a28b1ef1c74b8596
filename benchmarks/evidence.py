"""Does it learn, or is it luck? Recipes x seeds x {true, flipped, zero learning signal}, the same budget for each.

    python benchmarks/evidence.py --out runs/evidence
    python benchmarks/evidence.py --out runs/algorithms --recipes tiny_ti2v tiny_ti2v,guard --signals true flipped

``flipped`` negates every advantage, ``zero`` has learning rate 0. For each seed the gains on the same held-out records
are compared in pairs. Finished runs in ``--out`` are kept, so an interrupted evaluation goes on where it stopped.
Writes ``evidence.json``, ``evidence.md`` and ``evidence.png``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import matplotlib
import tyro

from miles_wan.tiny import TinyPaths, make_tiny
from miles_wan.tracking.sinks import read_metrics
from miles_wan.tracking.summary import paired_gain

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAUNCHER = Path(__file__).resolve().parent.parent / "scripts" / "run_diffusion_grpo_wan22_ti2v.py"
Signal = Literal["true", "flipped", "zero"]
SIGNALS: dict[Signal, list[str]] = {
    "true": [],
    "flipped": ["--algorithm.advantage-sign", "-1"],
    "zero": ["--training.optimizer.lr", "0"],
}
COLOURS = {"true": "tab:blue", "flipped": "tab:red", "zero": "tab:gray"}


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    out: Path = Path("runs/evidence")
    """Folder of the runs and the report."""
    family: str = "wan2.2-ti2v-5b"
    """The released model that the tiny checkpoint is one of."""
    trained: bool = False
    """Start from the toy world, whose parts have learnt the shapes, instead of random weights."""
    recipes: tuple[str, ...] = ("tiny_ti2v",)
    """Recipes, each as the launcher takes it."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Run seeds."""
    signals: tuple[Signal, ...] = ("true", "flipped", "zero")
    """Learning signals."""
    workers: int = 1
    """Runs at the same time."""
    in_process: bool = False
    """Many runs in one process each, without Ray, checkpoints and videos: for rollout.engine local on one rank."""
    extra: str = ""
    """Further flags of the launcher, for every run, as on a command line: --extra="--rollout.engine local"."""


@dataclass(frozen=True)
class Run:
    """One run of the launcher."""

    recipe: str
    seed: int
    signal: Signal

    def folder(self, out: Path) -> Path:
        return out / self.recipe.replace(",", "-") / f"seed{self.seed}-{self.signal}"


def main() -> int:
    """Run what is missing and write the report. Exit code 1 if a run failed."""
    arguments = tyro.cli(Arguments)
    tiny = make_tiny(arguments.out / "tiny", family=arguments.family, trained=arguments.trained)

    missing = [run for run in all_runs(arguments) if not (run.folder(arguments.out) / "summary.json").is_file()]
    if arguments.in_process:
        with multiprocessing.get_context("spawn").Pool(arguments.workers, _keep_to_cores, [arguments.workers]) as pool:
            failed = [fault for fault in pool.imap(partial(in_process, arguments, tiny), missing, 1) if fault]
    else:
        cores: SimpleQueue[int] = SimpleQueue()
        for number in range(arguments.workers):
            cores.put(number)
        with ThreadPoolExecutor(arguments.workers) as threads:
            failed = [fault for fault in threads.map(partial(launched, arguments, tiny, cores), missing) if fault]
    report(arguments)
    print("\n".join(failed))
    return 1 if failed else 0


def flags_of(arguments: Arguments, tiny: TinyPaths, run: Run) -> list[str]:
    """The launcher's flags of a run."""
    clip = ["--reward.functions.1.model", str(tiny.clip)] if "gdpo" in run.recipe else []
    return [
        "--recipe", run.recipe, "--model", str(tiny.model), "--reward-model", str(tiny.reward), *clip,
        "--data-jsonl", str(tiny.train_jsonl), "--eval-data-jsonl", str(tiny.eval_jsonl),
        "--output-dir", str(run.folder(arguments.out)), "--seed", str(run.seed),
        *SIGNALS[run.signal], *shlex.split(arguments.extra),
    ]  # fmt: skip


def launched(arguments: Arguments, tiny: TinyPaths, cores: SimpleQueue[int], run: Run) -> str | None:
    """A run of the launcher; what went wrong, if anything."""
    folder = run.folder(arguments.out)
    number = cores.get()
    command = [*_pinned(number, arguments.workers), sys.executable, str(LAUNCHER), "--resume", "latest"]
    print(f"{run.recipe}, seed {run.seed}, {run.signal}: {folder}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("ab") as log:
        command += flags_of(arguments, tiny, run)
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    cores.put(number)
    return f"{run.recipe}, seed {run.seed}, {run.signal}: exit code {code}, log {log.name}" if code else None


def in_process(arguments: Arguments, tiny: TinyPaths, run: Run) -> str | None:
    """A run in this process; what went wrong, if anything."""
    from one_process import run_in_process

    from miles_wan.cluster.launch import check, read_flags
    from miles_wan.errors import MilesWanError

    print(f"{run.recipe}, seed {run.seed}, {run.signal}: {run.folder(arguments.out)}", flush=True)
    try:
        config = read_flags(flags_of(arguments, tiny, run))
        check(config)
        run_in_process(config, run.folder(arguments.out))
    except MilesWanError as error:
        return f"{run.recipe}, seed {run.seed}, {run.signal}: {error}"
    return None


def _keep_to_cores(workers: int) -> None:
    """In a worker: one share of the cores, and as many threads."""
    import torch

    number = multiprocessing.current_process()._identity[0] - 1
    cores = sorted(os.sched_getaffinity(0))[number % workers :: workers]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def _pinned(number: int, workers: int) -> list[str]:
    """Runs beside each other keep to cores of their own; threads that wait for each other would cost more than they do."""
    cores = sorted(os.sched_getaffinity(0))[number::workers]
    return [] if workers == 1 or not cores else ["taskset", "-c", ",".join(map(str, cores))]


def all_runs(arguments: Arguments) -> Iterator[Run]:
    for recipe in arguments.recipes:
        for seed in arguments.seeds:
            for signal in arguments.signals:
                yield Run(recipe, seed, signal)


def report(arguments: Arguments) -> None:
    """Table, figures and picture of the finished runs."""
    done = {
        run: json.loads(path.read_text())
        for run in all_runs(arguments)
        if (path := run.folder(arguments.out) / "summary.json").is_file()
    }
    results = []
    for recipe in arguments.recipes:
        for seed in arguments.seeds:
            runs = {signal: done.get(Run(recipe, seed, signal)) for signal in arguments.signals}
            if all(runs.values()):
                results.append(_result(recipe, seed, runs))
    (arguments.out / "evidence.json").write_text(json.dumps(results, indent=2))
    (arguments.out / "evidence.md").write_text(_table(results, with_zero="zero" in arguments.signals))
    _draw(arguments)


def _result(recipe: str, seed: int, runs: dict[Signal, Any]) -> dict[str, Any]:
    true, flipped, zero = runs["true"], runs["flipped"], runs.get("zero")
    # gain(true) - gain(flipped), paired over the records: both began with the same videos.
    difference = paired_gain(_gains(flipped), _gains(true))
    held = difference.mean - difference.ci95 > 0
    result = {
        "recipe": recipe,
        "seed": seed,
        "gain_true": [true["eval_gain_mean"], true["eval_gain_ci95"]],
        "gain_flipped": [flipped["eval_gain_mean"], flipped["eval_gain_ci95"]],
        "true_minus_flipped": [difference.mean, difference.ci95],
        "holds": held,
        "max_log_prob_gap": max(run["max_log_prob_gap"] or 0.0 for run in runs.values()),
    }
    if zero is not None:
        result |= {"gain_zero": zero["eval_gain_mean"], "holds": held and all(gain == 0 for gain in _gains(zero))}
    return result


def _table(results: list[dict[str, Any]], *, with_zero: bool) -> str:
    claim = "lower end above 0" + (", rate 0 exactly 0" if with_zero else "")
    head = ["recipe", "seed", "gain, true signal", "gain, flipped", "true - flipped (paired, 95 %)", claim]
    rows = [
        [
            result["recipe"],
            str(result["seed"]),
            *(f"{mean:+.4f} ± {ci95:.4f}" for mean, ci95 in (result["gain_true"], result["gain_flipped"])),
            "{:+.4f} ± {:.4f}".format(*result["true_minus_flipped"]),
            "yes" if result["holds"] else "no",
        ]
        for result in results
    ]
    if with_zero:
        head.insert(4, "gain, rate 0")
        for row, result in zip(rows, results, strict=True):
            row.insert(4, f"{result['gain_zero']:g}")
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _gains(summary: dict[str, list[float]]) -> list[float]:
    pairs = zip(summary["eval_rewards_before"], summary["eval_rewards_after"], strict=True)
    return [after - before for before, after in pairs]


def _draw(arguments: Arguments) -> None:
    columns = min(4, len(arguments.recipes))
    rows = -(-len(arguments.recipes) // columns)
    size = (7, 4) if len(arguments.recipes) == 1 else (3.2 * columns, 2.4 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=True)
    for place in list(grid.flat)[len(arguments.recipes) :]:
        place.set_visible(False)
    for axes, recipe in zip(grid.flat, arguments.recipes, strict=False):
        for run in all_runs(arguments):
            path = run.folder(arguments.out) / "metrics.jsonl"
            if run.recipe != recipe or not path.is_file():
                continue
            history = read_metrics(path)
            points = [(step, row["eval/reward_mean"]) for step, row in history.items() if "eval/reward_mean" in row]
            first = points[0][1] if points else 0.0
            axes.plot(
                [step for step, _ in points],
                [reward - first for _, reward in points],
                color=COLOURS[run.signal],
                marker="o",
                label=run.signal if run.seed == arguments.seeds[0] else None,
            )
        axes.axhline(0, color="black", linewidth=0.5)
        if len(arguments.recipes) > 1:
            axes.set_title(recipe, fontsize="small")
    figure.supxlabel("rollouts")
    figure.supylabel("change of the held-out reward")
    grid.flat[0].legend()
    figure.savefig(arguments.out / "evidence.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
