"""Running statistics over the pairs of a rollout, reduced over all ranks at the end: means of the update, and how far
engine and trainer are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from miles_wan.training.sharding import all_reduce_scalars
from miles_wan.wan.experts import Experts


@dataclass(frozen=True)
class Scored:
    """A micro-batch of one ``expert`` under the present weights: ``loss`` (scalar, differentiable), ``size`` pairs (0 for a
    filler), and the ``means`` of the batch by metric name (scalars, detached)."""

    loss: Tensor
    size: int
    means: Mapping[str, Tensor]
    expert: str


@dataclass
class Means:
    """Means over pairs, and with two experts those of each.

    Args:
        experts: of the model; every rank scores micro-batches of the same ones.
    """

    experts: Experts
    sums: dict[tuple[str, str], float] = field(default_factory=dict)
    pairs: dict[str, int] = field(default_factory=dict)

    def add(self, scored: Scored) -> None:
        """Count one micro-batch."""
        for name, value in scored.means.items():
            key = scored.expert, name
            self.sums[key] = self.sums.get(key, 0.0) + (float(value) * scored.size if scored.size else 0.0)
        self.pairs[scored.expert] = self.pairs.get(scored.expert, 0) + scored.size

    def reduced(self, device: torch.device) -> dict[str, float]:
        """Means over all pairs of all ranks, as metrics (a collective)."""
        keys, experts = sorted(self.sums), sorted(self.pairs)
        totals = all_reduce_scalars(
            [*(self.sums[key] for key in keys), *(self.pairs[name] for name in experts)],
            op=dist.ReduceOp.SUM,
            device=device,
        )
        sums = dict(zip(keys, totals, strict=False))
        pairs = dict(zip(experts, totals[len(keys) :], strict=True))
        names = sorted({name for _, name in keys})
        everything = sum(pairs.values())
        metrics = {f"train/{name}": sum(sums[expert, name] for expert in experts) / everything for name in names}
        if len(self.experts.names) == 1:
            return metrics
        for expert in experts:
            label = self.experts.label(expert)
            metrics |= {f"train/{name}/{label}": sums[expert, name] / pairs[expert] for name in names}
            metrics[f"train/pairs/{label}"] = pairs[expert]
        return metrics


@dataclass
class StepGaps:
    """Engine-trainer differences of the pairs of one step: of the log-prob, and of the mean (per element)."""

    pairs: int = 0
    log_prob_sum: float = 0.0
    log_prob_max: float = 0.0
    mean_sum: float = 0.0
    mean_max: float = 0.0


class Parity:
    """How far the trainer is from the engine about the stored steps, before any weight moves.

    Args:
        num_steps: denoising steps of a rollout.
    """

    def __init__(self, num_steps: int) -> None:
        self._steps = [StepGaps() for _ in range(num_steps)]
        self._ratio_max = 0.0

    def add(self, steps: Sequence[int], log_prob_gaps: Tensor, mean_gaps: Tensor, mean_gap_max: Tensor) -> None:
        """Count one micro-batch: |difference| of the log-probs [B], and mean and largest |difference| of the means [B]."""
        rows = zip(steps, _finite(log_prob_gaps), _finite(mean_gaps), _finite(mean_gap_max), strict=True)
        for step, log_prob, mean, largest in rows:
            gaps = self._steps[step]
            gaps.pairs += 1
            gaps.log_prob_sum += log_prob
            gaps.log_prob_max = max(gaps.log_prob_max, log_prob)
            gaps.mean_sum += mean
            gaps.mean_max = max(gaps.mean_max, largest)

    def add_ratio(self, ratio: Tensor) -> None:
        """Count ratios [B] that the loss saw before any weight moved."""
        self._ratio_max = max([self._ratio_max, *_finite((ratio - 1).abs())])

    def reduced(self, device: torch.device) -> dict[str, float]:
        """Over all pairs of all ranks, as metrics (a collective)."""
        sums = all_reduce_scalars(
            [value for gaps in self._steps for value in (gaps.pairs, gaps.log_prob_sum, gaps.mean_sum)],
            op=dist.ReduceOp.SUM,
            device=device,
        )
        largest = all_reduce_scalars(
            [self._ratio_max, *(value for gaps in self._steps for value in (gaps.log_prob_max, gaps.mean_max))],
            op=dist.ReduceOp.MAX,
            device=device,
        )
        metrics: dict[str, float] = {}
        for step in range(len(self._steps)):
            pairs, log_prob_sum, mean_sum = sums[3 * step : 3 * step + 3]
            if pairs:
                log_prob_max, mean_max = largest[1 + 2 * step : 3 + 2 * step]
                metrics[f"parity/log_prob_gap_mean/{step}"] = log_prob_sum / pairs
                metrics[f"parity/log_prob_gap_max/{step}"] = log_prob_max
                metrics[f"parity/mean_gap_mean/{step}"] = mean_sum / pairs
                metrics[f"parity/mean_gap_max/{step}"] = mean_max
        pairs = sum(sums[0::3])
        return metrics | {
            "train/log_prob_gap_max": max(largest[1::2]),
            "train/log_prob_gap_mean": sum(sums[1::3]) / pairs,
            "train/log_prob_pairs": pairs,
            "train/ratio_minus_one_max_before_update": largest[0],
        }


def _finite(values: Tensor) -> list[float]:
    return [float(value) for value in values.detach().nan_to_num(nan=float("inf")).tolist()]
