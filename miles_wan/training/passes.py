"""The forward passes over one rollout, by kind of loss: what is measured before any weight moves, then the micro-batches of
each optimizer step. In: this rank's items per optimizer step. Out: scored micro-batches, and the parity metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from miles_wan.config import Config
from miles_wan.errors import ParityError
from miles_wan.records import TrainItem, derived_seed
from miles_wan.timesteps import timestep_of
from miles_wan.training.batch import (
    ForwardBatch,
    PairBatch,
    by_expert,
    micro_batches,
    noise_pairs,
    stack_noised,
    stack_steps,
    step_pairs,
)
from miles_wan.training.forward_process import ForwardObjective
from miles_wan.training.policy import OldPolicy, PolicyObjective, compare
from miles_wan.training.sharding import all_reduce_scalars
from miles_wan.training.statistics import Parity, Scored
from miles_wan.wan.experts import Experts

logger = logging.getLogger(__name__)

Steps = Sequence[Sequence[TrainItem]]


class Passes(Protocol):
    """The passes over one rollout."""

    def pairs(self, step: int) -> int:
        """Pairs of this rank in an optimizer step, the same number on all ranks."""

    def counts(self, step: int) -> Mapping[str, int]:
        """Micro-batches of each expert in an optimizer step, the same on all ranks."""

    def losses(self, step: int) -> Iterator[Scored]:
        """The micro-batches of an optimizer step, in order, each to be followed by its backward."""

    def parity(self) -> dict[str, float]:
        """After the losses of the first step, before its update (a collective): metrics, or ParityError."""


class PolicyPasses:
    """Stored steps, for the losses that need a likelihood. Building it is a collective: the pairs of the later optimizer
    steps need a forward of their own before any weight moves, to be compared with the engine's. The first step's have it
    in their loss; it also gives their old log-probs where these are to be computed again."""

    def __init__(
        self, objective: PolicyObjective, config: Config, steps: Steps, *, experts: Experts, device: torch.device
    ) -> None:
        self._objective = objective
        self._config = config
        self._device = device
        self._pairs = [by_expert(step_pairs(items), experts) for items in steps]
        self._counts = agreed_counts(self._pairs, size=config.training.micro_batch_size, device=device)
        self._parity = Parity(config.rollout.num_inference_steps)
        self._recompute = config.algorithm.old_log_prob == "recompute"
        objective.prepare([item for items in steps for item in items], device)
        self._later = [self._measure(step) for step in range(1, len(steps))]

    def pairs(self, step: int) -> int:
        return sum(map(len, self._pairs[step].values()))

    def counts(self, step: int) -> Mapping[str, int]:
        return self._counts[step]

    def losses(self, step: int) -> Iterator[Scored]:
        for number, batch in enumerate(self._batches(step)):
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
            if step == 0 and batch.size:
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

    def _batches(self, step: int) -> Iterator[PairBatch]:
        return micro_batches(
            self._pairs[step],
            stack_steps,
            counts=self._counts[step],
            size=self._config.training.micro_batch_size,
            device=self._device,
        )

    def _measure(self, step: int) -> list[OldPolicy]:
        """Compare with the engine; what the old policy says, by micro-batch, on the CPU."""
        old = []
        with torch.no_grad():
            for batch in self._batches(step):
                law = self._objective.law(batch)
                compare(batch, law, self._parity)
                if self._recompute:
                    old.append(self._objective.old_policy(law).to(torch.device("cpu")))
                elif batch.size:
                    self._parity.add_ratio(torch.exp(law.transition.log_prob - batch.engine_log_prob))
        return old


class ForwardPasses:
    """Finished videos that are noised again, for DiffusionNFT."""

    def __init__(
        self,
        objective: ForwardObjective,
        config: Config,
        steps: Steps,
        *,
        rollout_id: int,
        experts: Experts,
        trained: Sequence[str],
        device: torch.device,
    ) -> None:
        self._objective = objective
        self._size = config.training.micro_batch_size
        self._device = device
        sigmas = steps[0][0].trajectory.sigmas[:-1]
        levels, seed = config.algorithm.nft.sigmas_per_sample, derived_seed(config.seed, "forward", rollout_id)
        among = [index for index, sigma in enumerate(sigmas) if experts.of(timestep_of(sigma)) in trained]
        self._pairs = [by_expert(noise_pairs(items, levels=levels, seed=seed, among=among), experts) for items in steps]
        self._counts = agreed_counts(self._pairs, size=self._size, device=device)

    def pairs(self, step: int) -> int:
        return sum(map(len, self._pairs[step].values()))

    def counts(self, step: int) -> Mapping[str, int]:
        return self._counts[step]

    def losses(self, step: int) -> Iterator[Scored]:
        batches: Iterator[ForwardBatch] = micro_batches(
            self._pairs[step], stack_noised, counts=self._counts[step], size=self._size, device=self._device
        )
        for batch in batches:
            yield self._objective(batch)

    def parity(self) -> dict[str, float]:
        return {}


def agreed_counts(
    steps: Sequence[Mapping[str, Sequence[Any]]], *, size: int, device: torch.device
) -> list[dict[str, int]]:
    """Micro-batches of each expert in each optimizer step: as many as the rank needs that needs most (a collective). An
    expert that no rank has pairs for is left out: it gets no gradient, hence no update and no decay."""
    needed = [(step, name, -(-len(pairs) // size)) for step, own in enumerate(steps) for name, pairs in own.items()]
    largest = all_reduce_scalars([count for _, _, count in needed], op=dist.ReduceOp.MAX, device=device)
    counts: list[dict[str, int]] = [{} for _ in steps]
    for (step, name, _), count in zip(needed, largest, strict=True):
        if count:
            counts[step][name] = int(count)
    return counts
