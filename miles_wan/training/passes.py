"""The forward passes over one rollout, by kind of loss: what is measured before any weight moves, then the micro-batches of
each optimizer step. In: this rank's items per optimizer step. Out: scored micro-batches, and the parity metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from miles_wan.config import Config
from miles_wan.errors import ParityError
from miles_wan.records import TrainItem, derived_seed
from miles_wan.training.batch import noise_batches, step_batches
from miles_wan.training.forward_process import ForwardObjective
from miles_wan.training.policy import OldPolicy, PolicyObjective, compare
from miles_wan.training.statistics import Parity, Scored

logger = logging.getLogger(__name__)

Steps = Sequence[Sequence[TrainItem]]


class Passes(Protocol):
    """The passes over one rollout."""

    def pairs(self, step: int) -> int:
        """Pairs of this rank in an optimizer step."""

    def losses(self, step: int) -> Iterator[Scored]:
        """The micro-batches of an optimizer step, in order, each to be followed by its backward."""

    def parity(self) -> dict[str, float]:
        """After the losses of the first step, before its update (a collective): metrics, or ParityError."""


class PolicyPasses:
    """Stored steps, for the losses that need a likelihood. Building it is a collective: the pairs of the later optimizer
    steps need a forward of their own before any weight moves, to be compared with the engine's. The first step's have it
    in their loss; it also gives their old log-probs where these are to be computed again."""

    def __init__(self, objective: PolicyObjective, config: Config, steps: Steps, *, device: torch.device) -> None:
        self._objective = objective
        self._config = config
        self._steps = steps
        self._device = device
        self._parity = Parity(config.rollout.num_inference_steps)
        self._recompute = config.algorithm.old_log_prob == "recompute"
        objective.prepare([item for items in steps for item in items], device)
        self._later = [self._measure(items) for items in steps[1:]]

    def pairs(self, step: int) -> int:
        return sum(len(item.trajectory.steps) for item in self._steps[step])

    def losses(self, step: int) -> Iterator[Scored]:
        size = self._config.training.micro_batch_size
        for number, batch in enumerate(step_batches(self._steps[step], size=size, device=self._device)):
            reference_mean = self._objective.reference_mean(batch)
            law = self._objective.law(batch)
            if step == 0:
                compare(batch, law, self._parity)
            if not self._recompute:
                old = self._objective.engine_policy(batch, law)
            elif step == 0:
                old = self._objective.old_policy(law)
            else:
                old = self._later[step - 1][number].to(self._device)
            scored, ratio = self._objective(batch, law, old, reference_mean)
            if step == 0:
                self._parity.add_ratio(ratio)
            yield scored

    def parity(self) -> dict[str, float]:
        metrics = self._parity.reduced(self._device)
        algorithm = self._config.algorithm
        gap, bound = metrics["train/log_prob_gap_max"], algorithm.max_log_prob_gap
        if gap > bound:
            raise ParityError(
                f"engine and trainer differ by {gap:.3e} about a log-prob before the first update, above "
                f"algorithm.max_log_prob_gap = {bound:g}: they do not compute the same model. Check the last weight sync, "
                "the precision of both sides (rollout.dtype, model.dtype) and the flow shift; `miles-wan parity` looks for "
                "the cause; no weight was changed."
            )
        if algorithm.loss != "dppo" and not self._recompute and gap > algorithm.clip_range and dist.get_rank() == 0:
            logger.warning(
                "engine and trainer differ by up to %.1e about a log-prob, more than algorithm.clip_range = %g: "
                "clipping acts on numeric noise; set algorithm.old_log_prob = recompute, or raise it or the precision",
                gap, algorithm.clip_range,
            )  # fmt: skip
        return metrics

    def _measure(self, items: Sequence[TrainItem]) -> list[OldPolicy]:
        """Compare with the engine; what the old policy says, by micro-batch, on the CPU."""
        old = []
        with torch.no_grad():
            for batch in step_batches(items, size=self._config.training.micro_batch_size, device=self._device):
                law = self._objective.law(batch)
                compare(batch, law, self._parity)
                if self._recompute:
                    old.append(self._objective.old_policy(law).to(torch.device("cpu")))
                else:
                    self._parity.add_ratio(torch.exp(law.transition.log_prob - batch.engine_log_prob))
        return old


class ForwardPasses:
    """Finished videos that are noised again, for DiffusionNFT."""

    def __init__(
        self, objective: ForwardObjective, config: Config, steps: Steps, *, rollout_id: int, device: torch.device
    ) -> None:
        self._objective = objective
        self._config = config
        self._steps = steps
        self._seed = derived_seed(config.seed, "forward", rollout_id)
        self._device = device

    def pairs(self, step: int) -> int:
        return len(self._steps[step]) * self._config.algorithm.nft.sigmas_per_sample

    def losses(self, step: int) -> Iterator[Scored]:
        batches = noise_batches(
            self._steps[step],
            levels=self._config.algorithm.nft.sigmas_per_sample,
            size=self._config.training.micro_batch_size,
            seed=self._seed,
            device=self._device,
        )
        for batch in batches:
            yield self._objective(batch)

    def parity(self) -> dict[str, float]:
        return {}
