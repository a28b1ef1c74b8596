"""The denoising loop over transformers that are already there. In: conditioning, seeds, settings. Out: one ``Step`` after the
other, for all samples together. It knows no files, no VAE and no text; sharding is the transformer's own affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_wan.flow import explicit_sigmas, shifted_sigmas, transition
from miles_wan.records import Conditioning, Float32, SamplingSettings
from miles_wan.timesteps import timestep_of
from miles_wan.wan.model import WanModel


@dataclass(frozen=True)
class Step:
    """One denoising step of B samples. ``state`` and ``next_state`` [B, C, F, h, w] hold the given first frame; ``mean``,
    ``velocity`` and ``noise`` (zeros in a deterministic step) are as they were computed, over all frames; ``std``,
    ``log_prob`` [B]."""

    index: int
    state: Tensor
    next_state: Tensor
    velocity: Tensor
    noise: Tensor
    mean: Tensor
    std: Tensor
    log_prob: Tensor


def sigma_grid(sampling: SamplingSettings) -> Tensor:
    """The grid [N + 1] of these settings. Raises ValueError for an explicit one that is none."""
    if sampling.sigmas is not None:
        return explicit_sigmas(sampling.sigmas)
    return shifted_sigmas(sampling.num_inference_steps, sampling.flow_shift)


@torch.no_grad()  # not inference_mode: the tensors of a sharded transformer are used again with gradients
def denoise(
    model: WanModel,
    conditioning: Conditioning,
    sampling: SamplingSettings,
    *,
    seeds: Sequence[int],
    stochastic_steps: Sequence[int],
    latent_shape: tuple[int, int, int, int],
    device: torch.device,
) -> Iterator[Step]:
    """All N steps of one sample for each seed. A step is one forward of its expert, two with guidance: with sharded
    transformers every rank must run all of them, with its own conditioning and seeds.

    The noise of a sample is that of a CPU generator with its seed, wherever it is used: first the initial latent, then one
    draw for each stochastic step.

    Args:
        conditioning: of the record; all samples share it.
        stochastic_steps: steps of the law ``sampling.kind``; the others are Euler steps.
        latent_shape: (C, F, h, w).
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    shape = (len(seeds), *latent_shape)
    sigmas = sigma_grid(sampling)

    def draw() -> Tensor:
        return torch.cat([torch.randn(1, *latent_shape, generator=generator) for generator in generators]).to(device)

    def for_all(array: Float32 | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(array).to(device).expand(len(seeds), *array.shape)

    prompt, negative = for_all(conditioning.prompt_embeds), for_all(conditioning.negative_prompt_embeds)
    condition = for_all(conditioning.condition_latent)
    assert prompt is not None
    has_condition = torch.full((len(seeds),), condition is not None, device=device)
    guidance = model.experts.guidance(sampling.guidance_scale, sampling.guidance_scale_2)
    state = draw()
    for index in range(len(sigmas) - 1):
        sigma, stochastic = sigmas[index], index in stochastic_steps
        timestep = timestep_of(sigma)
        expert = model.experts.of(float(timestep))
        inputs = model.input(
            state,
            timestep.to(device).expand(len(seeds)),
            condition_latent=condition,
            has_condition=has_condition,
        )
        velocity = model.velocity(
            expert,
            inputs,
            prompt_embeds=prompt,
            negative_prompt_embeds=negative,
            guidance_scale=guidance[expert],
        )
        noise = draw() if stochastic else torch.zeros(shape, device=device)
        taken = transition(
            sampling.kind if stochastic else "ode",
            inputs.state,
            velocity,
            sigma=sigma,
            sigma_next=sigmas[index + 1],
            sigma_max=sigmas[1],
            noise_level=sampling.noise_level,
            noise=noise,
            mask=inputs.mask,
            cps_log_prob=sampling.cps_log_prob,
        )
        state = torch.where(inputs.mask > 0, taken.next_sample, inputs.state)
        yield Step(
            index=index,
            state=inputs.state,
            next_state=state,
            velocity=velocity,
            noise=noise,
            mean=taken.mean,
            std=taken.std,
            log_prob=taken.log_prob,
        )
