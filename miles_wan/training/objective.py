"""Re-scores stored steps under the present weights and turns them into the Flow-GRPO loss, with its statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor

from miles_wan.algorithms import clipped_policy_loss, gaussian_kl
from miles_wan.config import Config
from miles_wan.flow import Transition, transition
from miles_wan.training.batch import PairBatch
from miles_wan.training.sharding import all_reduce_scalars
from miles_wan.wan.conditioning import build_model_input
from miles_wan.wan.forward import guided_velocity
from miles_wan.wan.load import DTYPES


@dataclass(frozen=True)
class ScoredPairs:
    """``loss`` (scalar, differentiable) and, detached: ``log_prob``, ``old_log_prob``, ``advantages``, ``ratio`` [B],
    and the scalar ``policy_loss``, ``kl``, ``clip_fraction``, ``approx_kl``."""

    loss: Tensor
    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    ratio: Tensor
    policy_loss: Tensor
    kl: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor


class Objective:
    """The loss of a batch of (sample, step) pairs.

    Args:
        transformer: the sharded transformer with its adapters.
        config: the run's configuration.
        expand_timesteps: the checkpoint's flag.
    """

    def __init__(self, transformer: WanTransformer3DModel, config: Config, *, expand_timesteps: bool) -> None:
        self._transformer = transformer
        self._config = config
        self._expand_timesteps = expand_timesteps

    def __call__(self, batch: PairBatch) -> ScoredPairs:
        """Score ``batch`` (with gradients unless they are off) and form the loss."""
        algorithm = self._config.algorithm
        scored, mask = self._transition(batch)
        policy = clipped_policy_loss(
            scored.log_prob,
            batch.old_log_prob,
            batch.advantages,
            clip_low=algorithm.clip_range,
            clip_high=algorithm.clip_range,
            adv_clip=algorithm.advantage_clip,
        )
        kl = torch.zeros((), device=policy.loss.device)
        if algorithm.kl_beta > 0:
            kl = gaussian_kl(scored.mean, self._reference_mean(batch), scored.std, mask=mask).mean()
        return ScoredPairs(
            loss=policy.loss + algorithm.kl_beta * kl,
            log_prob=scored.log_prob.detach(),
            old_log_prob=batch.old_log_prob,
            advantages=batch.advantages,
            ratio=policy.ratio,
            policy_loss=policy.loss.detach(),
            kl=kl.detach(),
            clip_fraction=policy.clip_fraction,
            approx_kl=policy.approx_kl,
        )

    def _reference_mean(self, batch: PairBatch) -> Tensor:
        """The step's mean with the adapter off: the frozen base is the reference policy."""
        self._transformer.disable_adapters()
        try:
            with torch.no_grad():
                return self._transition(batch)[0].mean
        finally:
            self._transformer.enable_adapters()

    def _transition(self, batch: PairBatch) -> tuple[Transition, Tensor]:
        rollout = self._config.rollout
        inputs = build_model_input(
            batch.latents,
            batch.sigma * 1000,
            condition_latent=batch.condition_latent,
            has_condition=batch.has_condition,
            expand_timesteps=self._expand_timesteps,
        )
        velocity = guided_velocity(
            self._transformer,
            inputs,
            prompt_embeds=batch.prompt_embeds,
            negative_prompt_embeds=batch.negative_prompt_embeds,
            guidance_scale=rollout.guidance_scale,
            dtype=DTYPES[self._config.model.dtype],
        )
        scored = transition(
            rollout.sampler,
            inputs.hidden_states,
            velocity,
            sigma=batch.sigma,
            sigma_next=batch.sigma_next,
            sigma_max=batch.sigma_max,
            noise_level=rollout.noise_level,
            next_sample=batch.next_latents,
            mask=inputs.mask,
        )
        return scored, inputs.mask


@dataclass
class PairStatistics:
    """Running sums over pairs, reduced over all ranks at the end."""

    sums: dict[str, float] = field(default_factory=dict)
    log_prob_gap_max: float = 0.0
    ratio_minus_one_max: float = 0.0
    pairs: int = 0

    def add(self, scored: ScoredPairs) -> None:
        """Count one micro-batch."""
        count = scored.log_prob.numel()
        gap = (scored.log_prob - scored.old_log_prob).abs().nan_to_num(nan=float("inf"))
        means = {
            "loss": scored.loss.detach(),
            "policy_loss": scored.policy_loss,
            "kl": scored.kl,
            "clip_fraction": scored.clip_fraction,
            "approx_kl": scored.approx_kl,
            "ratio_mean": scored.ratio.mean(),
            "advantage_abs_mean": scored.advantages.abs().mean(),
            "log_prob_gap_mean": gap.mean(),
        }
        for name, value in means.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value) * count
        self.pairs += count
        self.log_prob_gap_max = max(self.log_prob_gap_max, float(gap.max()))
        distance = (scored.ratio - 1).abs().nan_to_num(nan=float("inf"))
        self.ratio_minus_one_max = max(self.ratio_minus_one_max, float(distance.max()))

    def merge(self, other: PairStatistics) -> None:
        """Count what ``other`` has counted."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.pairs += other.pairs
        self.log_prob_gap_max = max(self.log_prob_gap_max, other.log_prob_gap_max)
        self.ratio_minus_one_max = max(self.ratio_minus_one_max, other.ratio_minus_one_max)

    def reduced(self, device: torch.device) -> dict[str, float]:
        """Means over all pairs of all ranks, as metrics (a collective)."""
        names = [name for name in sorted(self.sums) if name != "log_prob_gap_mean"]
        totals = all_reduce_scalars([*(self.sums[n] for n in names), self.pairs], op=dist.ReduceOp.SUM, device=device)
        return {f"train/{name}": total / totals[-1] for name, total in zip(names, totals[:-1], strict=True)}

    def reduced_gaps(self, device: torch.device) -> dict[str, float]:
        """The engine-trainer differences over all pairs of all ranks, as metrics (a collective)."""
        gap_sum, pairs = all_reduce_scalars(
            [self.sums["log_prob_gap_mean"], self.pairs], op=dist.ReduceOp.SUM, device=device
        )
        gap_max, ratio_max = all_reduce_scalars(
            [self.log_prob_gap_max, self.ratio_minus_one_max], op=dist.ReduceOp.MAX, device=device
        )
        return {
            "train/log_prob_gap_max": gap_max,
            "train/log_prob_gap_mean": gap_sum / pairs,
            "train/log_prob_pairs": pairs,
            "train/ratio_minus_one_max_before_update": ratio_max,
        }
