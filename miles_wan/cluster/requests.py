"""Chooses what is rolled out: records, seeds and stochastic steps, as functions of the run seed and the rollout id.

In: the configuration and the records. Out: ``RolloutRequest``s. It has no state, so a resumed run draws the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from miles_wan.config import Config
from miles_wan.data import RecordOrder
from miles_wan.flow import select_steps
from miles_wan.records import PromptRecord, RolloutRequest, SamplingSettings, derived_seed


class RequestPlanner:
    """The requests of a run.

    Args:
        train, validation: records of the two files.
    """

    def __init__(self, config: Config, train: Sequence[PromptRecord], validation: Sequence[PromptRecord]) -> None:
        self._config = config
        self._train = train
        self._validation = validation[: config.eval.max_records]
        self._order = RecordOrder(len(train), config.seed, config.data.shuffle)
        self._twin = _twins(train)

    def training(self, rollout_id: int, *, policy_version: int) -> list[RolloutRequest]:
        """One group per drawn record. Every seed is a function of (run seed, rollout, record, occurrence, sample)."""
        rollout, seed = self._config.rollout, self._config.seed
        requests = []
        for group_index, (index, occurrence) in enumerate(self._order.batch(rollout_id, rollout.prompts_per_rollout)):
            record = self._train[index]
            identity: tuple[int | str, ...] = (rollout_id, record.record_id, occurrence)
            if self._twin[index]:
                identity += ("twin", self._twin[index])
            window = torch.Generator().manual_seed(derived_seed(seed, "window", *identity))
            requests.append(
                RolloutRequest(
                    record=record,
                    seeds=tuple(
                        derived_seed(seed, "noise", *identity, index) for index in range(rollout.samples_per_prompt)
                    ),
                    sampling=self._sampling(kind=rollout.sampler, steps=rollout.num_inference_steps),
                    stochastic_steps=self._steps(rollout_id, window),
                    policy_version=policy_version,
                    rollout_id=rollout_id,
                    group_index=group_index,
                    keep_final=self._config.algorithm.loss == "nft",
                )
            )
        return requests

    def validation(self, *, policy_version: int) -> list[RolloutRequest]:
        """One video per validation record, on the rollout's sigma grid, without noise, always from the same seed."""
        steps = self._config.eval.num_inference_steps or self._config.rollout.num_inference_steps
        return [
            RolloutRequest(
                record=record,
                seeds=(derived_seed(self._config.eval.seed, "eval", record.record_id),),
                sampling=self._sampling(kind="ode", steps=steps),
                stochastic_steps=(),
                policy_version=policy_version,
                rollout_id=0,
                group_index=group_index,
            )
            for group_index, record in enumerate(self._validation)
        ]

    def epoch(self, rollout_id: int) -> int:
        """The pass over the records that the rollout begins in, from 0."""
        return rollout_id * self._config.rollout.prompts_per_rollout // len(self._train)

    def _steps(self, rollout_id: int, generator: torch.Generator) -> tuple[int, ...]:
        rollout = self._config.rollout
        if rollout.sampler == "ode":
            return ()
        return select_steps(
            rollout.step_selection,
            rollout.num_inference_steps,
            generator=generator,
            size=rollout.window_size,
            window_range=rollout.window_range,
            iteration=rollout_id,
            interval=rollout.window_interval,
            stride=rollout.window_stride,
            wrap=rollout.window_wrap,
            steps=rollout.steps,
        )

    def _sampling(self, *, kind: str, steps: int) -> SamplingSettings:
        rollout = self._config.rollout
        return SamplingSettings(
            width=rollout.width,
            height=rollout.height,
            num_frames=rollout.num_frames,
            fps=rollout.fps,
            num_inference_steps=steps,
            guidance_scale=rollout.guidance_scale,
            flow_shift=rollout.flow_shift,
            kind=kind,
            noise_level=rollout.noise_level,
            sigmas=rollout.sigmas,
            cps_log_prob=rollout.cps_log_prob,
            guidance_scale_2=rollout.guidance_scale_2,
        )


def _twins(records: Sequence[PromptRecord]) -> list[int]:
    """How many earlier records have the same id: they differ in metadata alone, and each needs noise of its own."""
    seen: Counter[str] = Counter()
    counts = []
    for record in records:
        counts.append(seen[record.record_id])
        seen[record.record_id] += 1
    return counts
