"""The training loop over handles it is given: no torch, no HTTP, no Ray.

          push(version)                generate           submit, collect
    sync ---------------> rollout ----------------> score ----------------> train
     ^                                                                        |
     +------------------------------------------------------------------------+
    evaluate: before training, every eval interval and at the end; save: every checkpoint interval and at the end

Every method below is a word of this picture.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any, Protocol

from miles_wan.config import Config
from miles_wan.records import RolloutRequest, Sample, Score, TrainItem, TrainSignal

logger = logging.getLogger(__name__)


class Requests(Protocol):
    """Chooses records, seeds and stochastic steps: functions of the run seed and the rollout id alone."""

    def training(self, rollout_id: int, *, policy_version: int) -> list[RolloutRequest]: ...
    def validation(self, *, policy_version: int) -> list[RolloutRequest]: ...
    def epoch(self, rollout_id: int) -> int: ...


class Rollouts(Protocol):
    """The engines."""

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Sample]: ...


class Scorer(Protocol):
    """The reward workers. ``collect`` waits for all that was submitted; keys are (group_index, sample_index)."""

    def begin(self, requests: Sequence[RolloutRequest], *, validation: bool) -> None: ...
    def submit(self, sample: Sample) -> None: ...
    def collect(self) -> tuple[dict[tuple[int, int], Score], float]: ...


class Trainer(Protocol):
    """The FSDP2 workers."""

    def signal(self, scores: Sequence[Score], group_ids: Sequence[int]) -> TrainSignal: ...
    def update(self, items: Sequence[TrainItem], *, rollout_id: int) -> dict[str, float]: ...


class Weights(Protocol):
    """Moves the adapters into the engines and proves it."""

    def push(self, policy_version: int, *, weights: str) -> dict[str, float]: ...


class Track(Protocol):
    """Clock, metrics and display."""

    def phase(self, name: str, *, total: int | None = None, unit: str = "") -> AbstractContextManager[None]: ...
    def advance(self, count: int = 1) -> None: ...
    def log(self, step: int, metrics: Mapping[str, object]) -> None: ...
    def lap(self) -> Mapping[str, float]: ...
    def overlap(self, name: str, seconds: float) -> None: ...
    def interval(self, values: Sequence[float]) -> float: ...


class Keep(Protocol):
    """What outlives the run: checkpoints and validation videos."""

    def save(self, state: RunState) -> None: ...
    def videos(self, step: int, samples: Sequence[Sample]) -> None: ...


@dataclass
class RunState:
    """What the loop itself must remember; a checkpoint keeps it as JSON. ``eval_first`` and ``eval_last`` hold one
    training reward per validation record, in the order of the file."""

    finished: int = 0
    policy_version: int = 0
    eval_first: list[float] = field(default_factory=list)
    eval_last: list[float] = field(default_factory=list)
    eval_last_step: int = -1
    videos_scored: int = 0
    dropped_samples: int = 0
    max_log_prob_gap: float = 0.0
    log_prob_pairs_compared: int = 0
    max_ratio_minus_one_before_update: float = 0.0
    syncs: int = 0
    sync_seconds: float = 0.0
    lora_tensors: int = 0
    layer_prefixes: int = 0
    unmapped: int = 0


@dataclass(frozen=True)
class Parts:
    """The handles of one run."""

    requests: Requests
    rollouts: Rollouts
    scorer: Scorer
    trainer: Trainer
    weights: Weights
    track: Track
    keep: Keep


class Controller:
    """Runs the loop.

    Args:
        parts: handles of the rooms.
        state: a fresh state, or that of the checkpoint to continue.
    """

    def __init__(self, config: Config, parts: Parts, state: RunState) -> None:
        self._config = config
        self._parts = parts
        self.state = state
        self._held: tuple[int, str] | None = None
        # DiffusionNFT's old policy, which generates, is the average of the trained one.
        self._rollout_weights = "ema" if config.algorithm.loss == "nft" else "policy"

    def run(self) -> None:
        """Train to ``num_rollouts``; leaves the last evaluation and a checkpoint behind."""
        self._hold(self._rollout_weights)
        if self._config.eval.interval and not self.state.eval_first:
            self._log(self._evaluate())
        while self.state.finished < self._config.num_rollouts:
            metrics = self._train_one()
            if self._due(self._config.eval.interval):
                metrics |= self._evaluate()
            self._log(metrics)
            if self._due(self._config.checkpoint.interval):
                with self._parts.track.phase("checkpoint"):
                    self._parts.keep.save(self.state)
        if self.state.policy_version == 0:
            logger.warning("no rollout left anything to train on: the weights are those of the start")

    def _log(self, metrics: Mapping[str, float]) -> None:
        times = self._parts.track.lap()
        with self._parts.track.phase("log"):
            self._parts.track.log(self.state.finished, {**metrics, **times})

    def _due(self, interval: int) -> bool:
        finished = self.state.finished
        return interval > 0 and (finished % interval == 0 or finished == self._config.num_rollouts)

    def _train_one(self) -> dict[str, float]:
        """One turn of the picture: rollout, score, train, sync."""
        rollout_id = self.state.finished
        self._hold(self._rollout_weights)
        requests = self._parts.requests.training(rollout_id, policy_version=self.state.policy_version)
        samples, scores = self._generate("rollout", requests, validation=False)
        with self._parts.track.phase("train"):
            metrics = self._rollout_metrics(requests, scores, epoch=self._parts.requests.epoch(rollout_id))
            items, counts = self._items(samples, scores)
            metrics |= counts
            if items:
                metrics |= self._parts.trainer.update(items, rollout_id=rollout_id)
                self._remember(metrics)
                self.state.policy_version += 1
            else:
                logger.warning("rollout %d: every sample was left out, nothing was trained", rollout_id)
        metrics |= self._hold(self._rollout_weights)
        self.state.finished += 1
        return metrics

    def _generate(
        self, phase: str, requests: Sequence[RolloutRequest], *, validation: bool
    ) -> tuple[list[Sample], dict[tuple[int, int], Score]]:
        """Videos of all requests, each handed to scoring as soon as it is finished, and their scores."""
        parts, total = self._parts, sum(len(request.seeds) for request in requests)
        samples: list[Sample] = []
        parts.scorer.begin(requests, validation=validation)
        with parts.track.phase(phase, total=total, unit="videos"):
            for sample in parts.rollouts.generate(requests):
                parts.scorer.submit(sample)
                # Frames are large: only those that will be written stay; the reward workers hold theirs until scored.
                kept = validation and sample.group_index < self._config.eval.save_videos
                samples.append(sample if kept else replace(sample, frames=None))
                parts.track.advance()
        with parts.track.phase("score"):
            scores, busy_seconds = parts.scorer.collect()
        parts.track.overlap("score", busy_seconds)
        self.state.videos_scored += len(scores)
        self.state.dropped_samples += total - len(scores)
        return sorted(samples, key=lambda sample: (sample.group_index, sample.sample_index)), scores

    def _items(
        self, samples: Sequence[Sample], scores: Mapping[tuple[int, int], Score]
    ) -> tuple[list[TrainItem], Mapping[str, float]]:
        ordered = [scores[sample.group_index, sample.sample_index] for sample in samples]
        signal = self._parts.trainer.signal(ordered, [sample.group_index for sample in samples])
        sign = self._config.algorithm.advantage_sign
        items = [
            TrainItem(
                sample.trajectory, sample.conditioning, sign * advantage, sample.record.record_id, sample.sample_index
            )
            for sample, advantage, kept in zip(samples, signal.advantages, signal.kept, strict=True)
            if kept
        ]
        return items, signal.metrics

    def _hold(self, weights: str) -> dict[str, float]:
        """The engines hold the present weights (``policy``, or their average ``ema``): push what they lack."""
        wanted = (self.state.policy_version, weights)
        if self._held == wanted:
            return {}
        with self._parts.track.phase("sync"):
            metrics = self._parts.weights.push(self.state.policy_version, weights=weights)
        self._held = wanted
        self.state.syncs += 1
        self.state.sync_seconds += metrics["sync/seconds"]
        self.state.lora_tensors = int(metrics["sync/tensors"])
        self.state.layer_prefixes = int(metrics["sync/prefixes"])
        self.state.unmapped = int(metrics["sync/unmapped"])
        return metrics

    def _evaluate(self) -> dict[str, float]:
        """Validation videos with fixed seeds and no noise under the weights that were pushed last."""
        self._hold(self._config.eval.weights)
        requests = self._parts.requests.validation(policy_version=self.state.policy_version)
        samples, scores = self._generate("eval", requests, validation=True)
        with self._parts.track.phase("media"):
            self._parts.keep.videos(self.state.finished, samples[: self._config.eval.save_videos])
        ordered = [scores[sample.group_index, sample.sample_index] for sample in samples]
        self.state.eval_last = [score.total for score in ordered]
        self.state.eval_last_step = self.state.finished
        if not self.state.eval_first:
            self.state.eval_first = self.state.eval_last
        return {
            **_part_means("eval", ordered),
            "eval/reward_ci95": self._parts.track.interval(self.state.eval_last),
            "eval/videos": len(ordered),
        }

    def _rollout_metrics(
        self, requests: Sequence[RolloutRequest], scores: Mapping[tuple[int, int], Score], *, epoch: int
    ) -> dict[str, float]:
        groups: dict[int, list[float]] = {}
        for (group_index, _), score in sorted(scores.items()):
            groups.setdefault(group_index, []).append(score.total)
        return {
            **_part_means("rollout", [score for _, score in sorted(scores.items())]),
            "rollout/reward_std": pstdev(score.total for _, score in sorted(scores.items())),
            "rollout/reward_group_std": fmean(pstdev(rewards) for rewards in groups.values()),
            "rollout/videos": len(scores),
            "rollout/groups": len(groups),
            "rollout/dropped_samples": sum(len(request.seeds) for request in requests) - len(scores),
            "rollout/epoch": epoch,
            "rollout/policy_version": self.state.policy_version,
            **_window_start(requests),
        }

    def _remember(self, metrics: Mapping[str, float]) -> None:
        state = self.state
        if "train/log_prob_pairs" not in metrics:  # a loss without likelihood
            return
        state.max_log_prob_gap = max(state.max_log_prob_gap, metrics["train/log_prob_gap_max"])
        state.log_prob_pairs_compared += int(metrics["train/log_prob_pairs"])
        state.max_ratio_minus_one_before_update = max(
            state.max_ratio_minus_one_before_update, metrics["train/ratio_minus_one_max_before_update"]
        )


def _window_start(requests: Sequence[RolloutRequest]) -> dict[str, float]:
    firsts = [request.stochastic_steps[0] for request in requests if request.stochastic_steps]
    return {"rollout/window_start": fmean(firsts)} if firsts else {}


def _part_means(group: str, scores: Sequence[Score]) -> dict[str, Any]:
    names: Iterable[str] = scores[0].parts
    return {
        f"{group}/reward_mean": fmean(score.total for score in scores),
        **{f"{group}/reward/{name}": fmean(score.parts[name] for score in scores) for name in names},
    }
