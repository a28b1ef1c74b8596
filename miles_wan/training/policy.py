"""The losses that need a likelihood (Flow-GRPO, GRPO-Guard, Flow-DPPO): re-scores stored steps under the present weights.
In: (sample, step) pairs and what the old policy says of them. Out: the loss, and the differences from the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from miles_wan.algorithms import (
    PolicyLoss,
    clipped_policy_loss,
    dppo_loss,
    gaussian_kl,
    guard_loss,
    noise_level_weights,
)
from miles_wan.config import Config
from miles_wan.flow import Transition, masked_mean, step_std, transition
from miles_wan.records import TrainItem
from miles_wan.training.batch import PairBatch
from miles_wan.training.sharding import all_reduce_scalars
from miles_wan.training.statistics import Parity, Scored
from miles_wan.training.velocity import VelocityModel


@dataclass(frozen=True)
class OldPolicy:
    """The step's law under the weights that sampled it: ``log_prob`` [B] and, where a loss reads it, ``mean``
    [B, C, F, h, w]."""

    log_prob: Tensor
    mean: Tensor | None

    def to(self, device: torch.device) -> OldPolicy:
        return OldPolicy(self.log_prob.to(device), None if self.mean is None else self.mean.to(device))


@dataclass(frozen=True)
class Law:
    """Pairs under the present weights: their ``transition`` and the ``mask`` of sampled elements."""

    transition: Transition
    mask: Tensor


class PolicyObjective:
    """Scores a batch of (sample, step) pairs and forms the loss that ``algorithm.loss`` names."""

    def __init__(self, model: VelocityModel, config: Config) -> None:
        self._model = model
        self._config = config
        self._mean_std: float | None = None
        self.needs_old_mean = config.algorithm.loss in ("guard", "dppo")

    def prepare(self, items: Sequence[TrainItem], device: torch.device) -> None:
        """Find the mean std of all pairs of the rollout, by which steps are weighted (a collective)."""
        if self._config.algorithm.step_weight == "none":
            return
        total, pairs = 0.0, 0
        for trajectory in (item.trajectory for item in items if item.weight > 0):
            sigmas, steps = torch.from_numpy(trajectory.sigmas), list(trajectory.steps)
            after = [step + 1 for step in steps]
            total += float(self._std(sigmas[steps], sigmas[after], sigmas[1].expand(len(steps))).sum())
            pairs += len(steps)
        sums = all_reduce_scalars([total, pairs], op=dist.ReduceOp.SUM, device=device)
        self._mean_std = sums[0] / sums[1]

    def _std(self, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor) -> Tensor:
        rollout = self._config.rollout
        return step_std(
            rollout.sampler,
            sigma=sigma,
            sigma_next=sigma_next,
            sigma_max=sigma_max,
            noise_level=rollout.noise_level,
        )

    def law(self, batch: PairBatch) -> Law:
        """The law of the stored steps (with gradients unless they are off)."""
        rollout = self._config.rollout
        velocity, inputs = self._model(batch.expert, batch.latents, batch.timestep, batch.condition)
        scored = transition(
            rollout.sampler,
            inputs.state,
            velocity,
            sigma=batch.sigma,
            sigma_next=batch.sigma_next,
            sigma_max=batch.sigma_max,
            noise_level=rollout.noise_level,
            next_sample=batch.next_latents,
            mask=inputs.mask,
            cps_log_prob=rollout.cps_log_prob,
        )
        return Law(scored, inputs.mask)

    def old_policy(self, law: Law) -> OldPolicy:
        """What to remember of a law that was computed before the first update."""
        mean = law.transition.mean.detach() if self.needs_old_mean else None
        return OldPolicy(law.transition.log_prob.detach(), mean)

    def engine_policy(self, batch: PairBatch, law: Law) -> OldPolicy:
        """The old policy as the engine tells it: its log-prob, and the mean that its noise was added to."""
        return OldPolicy(batch.engine_log_prob, engine_mean(batch, law) if self.needs_old_mean else None)

    def __call__(
        self, batch: PairBatch, law: Law, old: OldPolicy, reference_mean: Tensor | None
    ) -> tuple[Scored, Tensor]:
        """The loss with its statistics, and the ratio [B] it saw; ``reference_mean`` is needed with a KL term."""
        algorithm = self._config.algorithm
        policy = self._policy_loss(batch, law, old)
        kl = torch.zeros((), device=policy.loss.device)
        if reference_mean is not None:
            scored, mask = law.transition, law.mask
            per_pair = gaussian_kl(scored.mean, reference_mean, scored.std, mask=mask)
            kl = (batch.weight * per_pair).mean()
        loss = policy.loss + algorithm.kl_beta * kl
        means = {
            "loss": loss.detach(),
            "policy_loss": policy.loss.detach(),
            "kl": kl.detach(),
            "clip_fraction": policy.clip_fraction,
            "approx_kl": policy.approx_kl,
            "ratio_mean": policy.ratio.mean(),
            "advantage_abs_mean": batch.advantages.abs().mean(),
        }
        return Scored(loss, batch.size, means, batch.expert), policy.ratio

    def _policy_loss(self, batch: PairBatch, law: Law, old: OldPolicy) -> PolicyLoss:
        algorithm, scored = self._config.algorithm, law.transition
        low, high = algorithm.clip_range, algorithm.clip_range_high or algorithm.clip_range
        log_probs = (scored.log_prob, old.log_prob, batch.advantages)
        weight = batch.weight
        if algorithm.step_weight == "noise_level":
            weight = weight * noise_level_weights(scored.std, mean=self._mean_std)
        if algorithm.loss == "grpo":
            return clipped_policy_loss(
                *log_probs, clip_low=low, clip_high=high, adv_clip=algorithm.advantage_clip, weight=weight
            )
        if old.mean is None:
            raise ValueError(f"the {algorithm.loss} loss needs the old policy's mean")
        if algorithm.loss == "dppo":
            return dppo_loss(
                *log_probs,
                mean=scored.mean,
                old_mean=old.mean,
                std=scored.std,
                kl_threshold=algorithm.kl_threshold,
                mask=law.mask,
                weight=weight,
            )
        return guard_loss(
            *log_probs,
            mean=scored.mean,
            old_mean=old.mean,
            std=scored.std,
            d=batch.sigma_next - batch.sigma,
            clip_low=low,
            clip_high=high,
            adv_clip=algorithm.advantage_clip,
            mask=law.mask,
            weight=weight,
        )

    def reference_mean(self, batch: PairBatch) -> Tensor | None:
        """The step's mean under the reference policy, None without a KL term. Before the forward with gradients: its
        backward must see the trained weights."""
        if self._config.algorithm.kl_beta == 0:
            return None
        averaged = self._config.algorithm.kl_reference == "ema"
        with torch.no_grad(), self._model.averaged() if averaged else self._model.base():
            return self.law(batch).transition.mean


def engine_mean(batch: PairBatch, law: Law) -> Tensor:
    """The mean [B, C, F, h, w] that the engine added its noise to: next state minus std times the seed's noise."""
    std = law.transition.std.detach().reshape(-1, *[1] * (batch.noise.dim() - 1))
    return batch.next_latents - std * batch.noise


def compare(batch: PairBatch, law: Law, parity: Parity) -> None:
    """Count how far the trainer is from the engine about ``batch``."""
    if batch.size == 0:
        return
    difference = (law.transition.mean.detach() - engine_mean(batch, law)).abs()
    difference = torch.where(law.mask > 0, difference, torch.zeros_like(difference))
    parity.add(
        batch.steps,
        (law.transition.log_prob.detach() - batch.engine_log_prob).abs(),
        masked_mean(difference, law.mask),
        difference.flatten(1).amax(1),
    )
