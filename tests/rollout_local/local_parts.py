"""A model of a tiny checkpoint, the local engine over it, and the trainer's reading of what that makes."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from miles_wan.flow import transition
from miles_wan.records import RolloutOutput, RolloutRequest
from miles_wan.rollout.local import LocalEngine
from miles_wan.tiny import TinyPaths
from miles_wan.wan.family import load_family
from miles_wan.wan.model import WanModel, load_model

NEGATIVE = "a blue square"


def model_of(paths: TinyPaths, *, dtype: str = "fp32") -> WanModel:
    return load_model(load_family(paths.model), dtype=dtype)


def local_engine(paths: TinyPaths, model: WanModel) -> LocalEngine:
    return LocalEngine(load_family(paths.model), model, device=torch.device("cpu"))


def rescored(model: WanModel, request: RolloutRequest, output: RolloutOutput) -> list[float]:
    """The log-probs of the kept steps as the trainer computes them, from what the trajectory holds."""
    trajectory, conditioning, sampling = output.trajectory, output.conditioning, request.sampling
    assert trajectory is not None
    assert conditioning is not None
    guidance = model.experts.guidance(sampling.guidance_scale, sampling.guidance_scale_2)
    sigmas, negative = torch.from_numpy(trajectory.sigmas), conditioning.negative_prompt_embeds
    given = None if conditioning.condition_latent is None else torch.from_numpy(conditioning.condition_latent)[None]
    values = []
    for (state, after), step, timestep in zip(
        torch.from_numpy(trajectory.latents), trajectory.steps, torch.from_numpy(trajectory.timesteps), strict=True
    ):
        expert = model.experts.of(float(timestep))
        inputs = model.input(
            state[None],
            timestep[None],
            condition_latent=given,
            has_condition=torch.tensor([trajectory.has_condition]),
        )
        with torch.no_grad():
            velocity = model.velocity(
                expert,
                inputs,
                prompt_embeds=torch.from_numpy(conditioning.prompt_embeds)[None],
                negative_prompt_embeds=None if negative is None else torch.from_numpy(negative)[None],
                guidance_scale=guidance[expert],
            )
        scored = transition(
            sampling.kind,
            inputs.state,
            velocity,
            sigma=sigmas[step],
            sigma_next=sigmas[step + 1],
            sigma_max=sigmas[1],
            noise_level=sampling.noise_level,
            next_sample=after[None],
            mask=inputs.mask,
            cps_log_prob=sampling.cps_log_prob,
        )
        values.append(float(scored.log_prob))
    return values


def deterministic(make_request: Any, scheduler: FlowMatchEulerDiscreteScheduler, **changes: Any) -> Any:
    """A request without stochastic steps, on the very grid of the scheduler (ours differs by one unit in the last place)."""
    request = make_request(stochastic_steps=(), keep_final=True, **changes)
    scheduler.set_timesteps(request.sampling.num_inference_steps)
    sampling = type(request.sampling)(**{**vars(request.sampling), "sigmas": tuple(scheduler.sigmas.tolist())})
    record = type(request.record)(**{**vars(request.record), "negative_prompt": NEGATIVE})
    return type(request)(**{**vars(request), "sampling": sampling, "record": record})
