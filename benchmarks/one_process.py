"""A run in this process: the real loop, worker, local engine and rewards, without Ray, server, checkpoints or videos. For
many small runs one after the other, whose starts would take longer than they do. Its numbers are those of the launcher's
run of the same configuration on one rank.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_wan.cluster.pools import calls_of, deal_rollout, samples_of
from miles_wan.cluster.requests import RequestPlanner
from miles_wan.cluster.signal import train_signal
from miles_wan.config import Config
from miles_wan.controller import Controller, Parts, RunState
from miles_wan.data import load_records
from miles_wan.records import RewardInput, RolloutRequest, Sample, Score, TrainItem, TrainSignal
from miles_wan.rewards.composite import RewardModel
from miles_wan.rollout.local.engine import LocalEngine
from miles_wan.tracking.summary import mean_ci95, paired_gain
from miles_wan.training.worker import Rank, TrainingWorker
from miles_wan.wan.family import ModelFolder, load_family


def run_in_process(config: Config, folder: Path) -> None:
    """Train to the end; writes ``metrics.jsonl`` and the fields of ``summary.json`` that evidence needs into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as meeting:
        model = load_family(config.model.path)
        worker = TrainingWorker(
            config,
            Rank(0, 1, f"file://{meeting}/meeting", config.cluster.device),
            folder=model,
        )
        handles = _Handles(config, worker, model)
        assert config.data.eval is not None
        planner = RequestPlanner(
            config, load_records(config.data.train).records, load_records(config.data.eval).records
        )
        parts = Parts(planner, handles, handles, handles, handles, handles, handles)
        controller = Controller(config, parts, RunState())
        controller.run()
        worker.close()
    state = controller.state
    gain = paired_gain(state.eval_first, state.eval_last)
    summary = {
        "eval_gain_mean": gain.mean,
        "eval_gain_ci95": gain.ci95,
        "eval_rewards_before": state.eval_first,
        "eval_rewards_after": state.eval_last,
        "max_log_prob_gap": state.max_log_prob_gap,
        "max_ratio_minus_one_before_update": state.max_ratio_minus_one_before_update,
        "seed": config.seed,
    }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in handles.lines))
    (folder / "summary.json").write_text(json.dumps(summary, indent=2))


class _Handles:
    """All handles of the loop, as plain objects."""

    def __init__(self, config: Config, worker: TrainingWorker, folder: ModelFolder) -> None:
        self._config = config
        self._worker = worker
        device = config.cluster.device
        self._engine = LocalEngine(folder, worker.model, device=worker.device)
        self._rewards = RewardModel(config.reward, "cuda:0" if device == "cuda" else "cpu")
        self._weights = "policy"
        self._samples: list[Sample] = []
        self._validation = False
        self.lines: list[dict[str, Any]] = []

    # Rollouts
    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Sample]:
        conditioning: Any = None
        for request, indices in calls_of(requests, self._config.rollout.samples_per_call):
            keep = indices[0] == 0 and request.keeps_trajectory
            with self._worker.using(self._weights):
                outputs = self._engine.generate(request, indices, return_conditioning=keep)
            conditioning = outputs[0].conditioning if indices[0] == 0 else conditioning
            results = [*(output.frames for output in outputs), *(output.trajectory for output in outputs)]
            yield from samples_of(request, indices, results, conditioning)

    # Scorer
    def begin(self, requests: Sequence[RolloutRequest], *, validation: bool) -> None:
        self._samples, self._validation = [], validation

    def submit(self, sample: Sample) -> None:
        self._samples.append(sample)

    def collect(self) -> tuple[dict[tuple[int, int], Score], float]:
        scores: dict[tuple[int, int], Score] = {}
        size = self._config.reward.batch_size
        for start in range(0, len(self._samples), size):
            batch = self._samples[start : start + size]
            inputs = [
                RewardInput(
                    sample.record.prompt,
                    sample.frames,
                    self._config.rollout.fps,
                    sample.record.image_path,
                    sample.record.metadata,
                )
                for sample in batch
            ]
            found = self._rewards.score(inputs, validation=self._validation)
            keys = [(sample.group_index, sample.sample_index) for sample in batch]
            scores.update(zip(keys, found, strict=True))
        return scores, 0.0

    # Trainer
    def signal(self, scores: Sequence[Score], group_ids: Sequence[int]) -> TrainSignal:
        return train_signal(self._config, scores, group_ids)

    def update(self, items: Sequence[TrainItem], *, rollout_id: int) -> dict[str, float]:
        steps = deal_rollout(self._config, items, rollout_id=rollout_id, ranks=1)[0]
        return self._worker.update(steps, rollout_id=rollout_id)

    # Weights
    def push(self, policy_version: int, *, weights: str) -> dict[str, float]:
        self._weights = weights
        names = ("seconds", "bytes", "tensors", "prefixes", "unmapped")
        return {f"sync/{name}": 0.0 for name in names} | {"sync/policy_version": policy_version}

    # Track
    @contextmanager
    def phase(self, name: str, *, total: int | None = None, unit: str = "") -> Iterator[None]:
        yield

    def advance(self, count: int = 1) -> None: ...

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        self.lines.append({"step": step, **metrics})

    def lap(self) -> Mapping[str, float]:
        return {}

    def overlap(self, name: str, seconds: float) -> None: ...

    def interval(self, values: Sequence[float]) -> float:
        return mean_ci95(values).ci95

    # Keep
    def save(self, state: RunState) -> None: ...

    def videos(self, step: int, samples: Sequence[Sample]) -> None: ...
