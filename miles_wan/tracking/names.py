"""Every metric of the project in one table: name, meaning, unit and how it is aggregated over a rollout.

In: nothing. Out: the table, a check that refuses names outside it, and the page docs/metrics.md made from it. A name
with ``<...>`` is a pattern: each bracket stands for one word that a run chooses (the name of a reward, of a phase).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from miles_wan.tracking.writing import TrackingError


@dataclass(frozen=True)
class Metric:
    """One row. ``timing`` marks what differs between two runs of the same seed: clocks, and nothing else."""

    description: str
    unit: str
    timing: bool = False


GROUPS: dict[str, str] = {
    "rollout": "What was generated and how it scored, each rollout.",
    "train": "The update: means are over the optimizer steps of the rollout and all ranks.",
    "parity": "How far engine and trainer are apart about the stored steps, by step index, before any weight of the rollout "
    "moves. No forward is spent on it: the engine's mean is the stored next state minus std times the seed's noise.",
    "sync": "Weights from the trainers into the engines, after each update.",
    "eval": "Validation: fixed seeds, no noise, before training, every `eval.interval` rollouts and at the end.",
    "sft": "Supervised training: one line per optimizer step.",
    "validation": "Supervised training: fixed clips, timesteps and noise, before training, every `eval.interval` steps and at "
    "the end. Intervals are over clips.",
    "time": "The driver's clock. Phases exclude each other; what overlaps them is reported apart.",
    "tracking": "The log itself.",
}

METRICS: dict[str, Metric] = {
    "rollout/reward_mean": Metric("Training reward: the weighted sum of the reward parts", "mean over videos"),
    "rollout/reward_std": Metric("Spread of the training reward", "std over videos (ddof 0)"),
    "rollout/reward_group_std": Metric("Spread inside a group: what advantages are made of", "mean of the groups' std"),
    "rollout/reward/<part>": Metric("One reward by name, unweighted", "mean over videos"),
    "rollout/videos": Metric("Videos that were scored", "count"),
    "rollout/groups": Metric("Groups (records) that were scored", "count"),
    "rollout/equal_groups": Metric("Groups whose rewards are all equal: their advantage is 0", "count"),
    "rollout/narrow_groups": Metric("Groups left out: they spread by less than algorithm.min_group_std", "count"),
    "rollout/left_out_samples": Metric(
        "Samples that are not trained on (algorithm.min_group_std, algorithm.best_of_n)", "count"
    ),
    "rollout/dropped_samples": Metric("Videos given up after retries", "count"),
    "rollout/epoch": Metric("Pass over the training records, from 0", "index"),
    "rollout/policy_version": Metric("Version of the weights that generated the videos", "index"),
    "rollout/window_start": Metric("First stochastic step of the window", "step index, mean over groups"),
    "train/loss": Metric("Policy loss plus weighted KL", "mean over (sample, step) pairs"),
    "train/policy_loss": Metric("Loss of the policy, without KL or reference terms", "mean over pairs"),
    "train/kl": Metric(
        "KL to the reference (algorithm.kl_reference); 0 when algorithm.kl_beta is 0: it is not computed then",
        "nat per element, mean",
    ),
    "train/clip_fraction": Metric(
        "Pairs whose ratio lies outside the clip range; for dppo those held back by the trust region", "share 0..1"
    ),
    "train/nft_reference_loss": Metric(
        "nft: mean square distance from the base's velocity; 0 when nft.reference_weight is 0", "mean over pairs"
    ),
    "train/nft_positive_loss": Metric("nft: error of the velocity v+", "mean over pairs"),
    "train/nft_negative_loss": Metric("nft: error of the velocity v-", "mean over pairs"),
    "train/nft_velocity_change": Metric(
        "nft: distance of the trained velocity from that of the average, per element", "mean over pairs"
    ),
    "train/approx_kl": Metric("Half the mean square of the log-prob change during the update", "mean over pairs"),
    "train/ratio_mean": Metric("Likelihood ratio new / old during the update", "mean over pairs"),
    "train/ratio_minus_one_max_before_update": Metric(
        "Largest |ratio - 1| with unchanged weights: float noise, or the run is wrong", "max over pairs"
    ),
    "train/log_prob_gap_max": Metric(
        "Parity: engine's log-prob against the trainer's, before the update", "max over pairs"
    ),
    "train/log_prob_gap_mean": Metric(
        "Parity: engine's log-prob against the trainer's, before the update", "mean over pairs"
    ),
    "train/log_prob_pairs": Metric("(sample, kept step) pairs compared for parity", "count"),
    "train/advantage_abs_mean": Metric("Size of the advantages", "mean over videos"),
    "train/grad_norm": Metric("Gradient norm before clipping", "max over optimizer steps"),
    "train/pairs/<expert>": Metric("A14B: pairs of one expert, of all ranks", "count"),
    "train/<metric>/<expert>": Metric(
        "A14B: the metric of this name over the pairs, or the gradients, of one expert (high, low)", "as that metric"
    ),
    "train/lr": Metric("Learning rate of the last optimizer step", "1"),
    "train/optimizer_steps": Metric("Optimizer steps of this rollout", "count"),
    "parity/log_prob_gap_mean/<step>": Metric("Difference of the log-prob", "mean over pairs"),
    "parity/log_prob_gap_max/<step>": Metric("Difference of the log-prob", "max over pairs"),
    "parity/mean_gap_mean/<step>": Metric(
        "Difference of the step's mean, sampled elements", "mean over elements, pairs"
    ),
    "parity/mean_gap_max/<step>": Metric("Difference of the step's mean, sampled elements", "max over elements, pairs"),
    "sync/seconds": Metric("Gather, send, apply and verify", "s", timing=True),
    "sync/bytes": Metric("Adapter bytes sent to each engine", "byte"),
    "sync/tensors": Metric("Tensors sent and applied; local engine: compared over the ranks", "count"),
    "sync/prefixes": Metric("Layers that received an adapter", "count"),
    "sync/unmapped": Metric("Tensors without a place in the engine: always 0, or the run stops", "count"),
    "sync/policy_version": Metric("Version of the weights after the sync", "index"),
    "eval/reward_mean": Metric("Validation reward: the weighted sum of the reward parts", "mean over records"),
    "eval/reward_ci95": Metric("Half-width of its 95 % interval (Student t over records)", "reward"),
    "eval/reward/<part>": Metric("One reward by name, unweighted, validation-only ones included", "mean over records"),
    "eval/videos": Metric("Validation videos scored", "count"),
    "sft/loss": Metric("Flow-matching loss, not weighted", "mean over the samples of the step"),
    "sft/loss/<expert>": Metric("The same of the samples of one expert", "mean over its samples"),
    "sft/samples/<expert>": Metric("Samples routed to an expert: 0 means that it was not stepped", "count"),
    "sft/image_samples": Metric("Samples whose first frame was given", "count"),
    "sft/textless_samples": Metric("Samples without their caption", "count"),
    "sft/grad_norm": Metric("Gradient norm before clipping, of everything", "1"),
    "sft/grad_norm/<expert>": Metric("Gradient norm before clipping, of one expert that had samples", "1"),
    "sft/lr": Metric("Learning rate of the step", "1"),
    "sft/epoch": Metric("Pass over the clips that the step begins in, from 0", "index"),
    "sft/step_seconds": Metric("Wall time of the step", "s", timing=True),
    "sft/samples_per_second": Metric("Throughput of all ranks", "1/s", timing=True),
    "sft/tokens_per_second": Metric("Latent tokens, throughput of all ranks", "1/s", timing=True),
    "sft/tflops_per_device": Metric(
        "Model operations of forward and backward, from the lengths of the samples; recomputation does not count",
        "10^12/s",
        timing=True,
    ),
    "sft/utilisation": Metric("The same over the peak of the device", "share 0..1", timing=True),
    "validation/loss": Metric("Flow-matching loss over all fixed timesteps", "mean over clips"),
    "validation/loss_ci95": Metric("Half-width of its 95 % interval", "Student t over clips"),
    "validation/loss/<part>": Metric("The same at one timestep (t125), or over those of one expert", "mean over clips"),
    "validation/loss_ci95/<part>": Metric("Half-width of its 95 % interval", "Student t over clips"),
    "validation/seconds": Metric("Wall time of the validation, sample videos included", "s", timing=True),
    "time/rollout_total": Metric("Wall time from the last rollout's line to this one", "s", timing=True),
    "time/overlap/<work>": Metric("Work that ran beside the phases in this rollout", "s", timing=True),
    "time/<phase>": Metric("Time of one exclusive phase in this rollout", "s", timing=True),
    "tracking/non_finite": Metric("Values of this line that were not finite: written as null", "count"),
}


@cache
def metric_of(name: str) -> Metric:
    """The row that ``name`` belongs to. Raises ``TrackingError`` when there is none."""
    if name in METRICS and "<" not in name:
        return METRICS[name]
    for pattern, metric in METRICS.items():
        if "<" in pattern and re.fullmatch(_as_regex(pattern), name):
            return metric
    raise TrackingError(f"Unknown metric {name!r}: add it to METRICS in {__name__}, with its meaning and unit.")


def _as_regex(pattern: str) -> str:
    return r"[^/\s]+".join(re.escape(part) for part in re.split("<[^>]*>", pattern))


def is_timing(name: str) -> bool:
    """Whether ``name`` reads a clock, so that two runs of the same seed may differ in it."""
    return metric_of(name).timing


def metrics_table_markdown() -> str:
    """The page docs/metrics.md: one table per group."""
    unlisted = {name.partition("/")[0] for name in METRICS} - set(GROUPS)
    if unlisted:
        raise TrackingError(f"Metric groups without a heading in GROUPS: {sorted(unlisted)}")
    return "\n\n".join([_PAGE_HEAD, *(_section(group) for group in GROUPS)]) + "\n"


_PAGE_HEAD = """# Metrics

Generated from `miles_wan/tracking/names.py`; a name outside this table cannot be logged.

`metrics.jsonl` holds one JSON object a line: `step` (rollouts finished; 0 is before training), `time` (UTC) and the metrics
below under their full names. TensorBoard shows the same numbers. A value that is not finite is `null`, is named in the log
and counted. After `--resume` the lines behind the resumed checkpoint are dropped, so that every step stands there once."""


def _section(group: str) -> str:
    rows = ((name, metric) for name, metric in METRICS.items() if name.startswith(f"{group}/"))
    return f"## {group}\n\n{GROUPS[group]}\n\n" + _table(
        (f"`{name}`", metric.description.replace("|", "\\|"), metric.unit) for name, metric in rows
    )


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    head = ("metric", "meaning", "unit, aggregation")
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))
