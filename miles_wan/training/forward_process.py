"""DiffusionNFT's objective: finished videos, noised again, under the trained, the averaged and the base weights. In:
(sample, noise level) pairs. Out: the loss with its statistics. There is no likelihood here."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_wan.algorithms import nft_loss
from miles_wan.config import Config
from miles_wan.timesteps import timestep_of
from miles_wan.training.batch import ForwardBatch
from miles_wan.training.statistics import Scored
from miles_wan.training.velocity import VelocityModel


class ForwardObjective:
    """The DiffusionNFT loss of a batch; the old policy is the average of the adapter, which also generates."""

    def __init__(self, model: VelocityModel, config: Config) -> None:
        self._model = model
        self._algorithm = config.algorithm

    def __call__(self, batch: ForwardBatch) -> Scored:
        """Form the loss of ``batch``, with gradients."""
        nft = self._algorithm.nft
        # Before the forward with gradients: its backward must see the trained weights.
        with torch.no_grad():
            with self._model.averaged():
                old_velocity = self._velocity(batch)[0]
            reference = None
            if nft.reference_weight > 0:
                with self._model.base():
                    reference = self._velocity(batch)[0]
        velocity, mask = self._velocity(batch)
        scored = nft_loss(
            velocity,
            old_velocity,
            clean=batch.clean,
            noisy=batch.noisy,
            sigma=batch.sigma,
            advantages=batch.advantages,
            adv_clip=self._algorithm.advantage_clip,
            beta=nft.beta,
            reference_velocity=reference,
            reference_weight=nft.reference_weight,
            mask=mask,
            weight=batch.weight,
        )
        means = {
            "loss": scored.loss.detach(),
            "policy_loss": scored.policy_loss,
            "nft_reference_loss": scored.reference_loss,
            "nft_positive_loss": scored.positive_loss,
            "nft_negative_loss": scored.negative_loss,
            "nft_velocity_change": (velocity.detach() - old_velocity).abs().mean(),
            "advantage_abs_mean": batch.advantages.abs().mean(),
        }
        return Scored(scored.loss, batch.size, means, batch.expert)

    def _velocity(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        velocity, inputs = self._model(batch.expert, batch.noisy, timestep_of(batch.sigma), batch.condition)
        return velocity, inputs.mask
