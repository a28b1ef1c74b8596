"""What is asked of SGLang's rollout route. In: samples of one request to generate. Out: the body of the HTTP request, or an
InputError for what SGLang does not have. No network here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles_wan.errors import InputError
from miles_wan.records import RolloutRequest
from miles_wan.rollout.sglang.hooks import SIGMAS_KEY
from miles_wan.wan.experts import guidance_by_expert
from miles_wan.wan.facts import WanFamily

_SDE_TYPES = {"flow_sde": "sde", "cps": "cps", "ode": "ode"}


@dataclass(frozen=True)
class SampleQuery:
    """Seeds of a request to a model of ``family``, and what should come back with each. ``debug`` adds the engine's own noises
    and means.

    Raises:
        InputError: SGLang has no such sampler, or the family is not asked like this.
    """

    family: WanFamily
    request: RolloutRequest
    sample_indices: tuple[int, ...]
    return_conditioning: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        faults = []
        if self.request.stochastic_steps and sampling.kind not in _SDE_TYPES:
            faults.append(
                f"rollout.sampler: {sampling.kind} is none of SGLang's ({', '.join(_SDE_TYPES)}); it needs "
                "rollout.engine: local"
            )
        try:
            guidance_by_expert(self.family.experts, sampling.guidance_scale, sampling.guidance_scale_2)
        except ValueError as error:
            faults.append(f"rollout.guidance_scale: {error}")
        if faults:
            raise InputError(faults)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.request.seeds[index] for index in self.sample_indices)

    @property
    def steps(self) -> tuple[int, ...]:
        """Stochastic steps, which are the ones that are kept."""
        return tuple(sorted(self.request.stochastic_steps))

    @property
    def returned_states(self) -> tuple[int, ...]:
        """Indices of the states to return: both ends of every kept step, and the last one if it is asked for or no
        step is kept."""
        indices = {index for step in self.steps for index in (step, step + 1)}
        if self.request.keep_final or not self.steps:
            indices.add(self.request.sampling.num_inference_steps)
        return tuple(sorted(indices))


def request_body(query: SampleQuery) -> dict[str, Any]:
    """The JSON body of ``POST /rollout/generate``. Noise is drawn on the CPU so that it depends on the seed alone."""
    record, sampling = query.request.record, query.request.sampling
    kind = _SDE_TYPES[sampling.kind] if query.steps else "ode"
    # "No const" is -(y - mean)^2 alone; SGLang wants it for a deterministic rollout too, which has no density.
    without_density = kind == "ode" or (kind == "cps" and sampling.cps_log_prob == "squared_error")
    body: dict[str, Any] = {
        "prompt": record.prompt,
        "seed": query.seeds[0],
        "generator_device": "cpu",
        "width": sampling.width,
        "height": sampling.height,
        "num_frames": sampling.num_frames,
        "fps": sampling.fps,
        "num_inference_steps": sampling.num_inference_steps,
        "num_outputs_per_prompt": len(query.seeds),
        "guidance_scale": sampling.guidance_scale,
        "rollout": True,
        "rollout_sde_type": kind,
        "rollout_noise_level": sampling.noise_level,
        "rollout_log_prob_no_const": without_density,
        "rollout_sde_step_indices": list(query.steps),
        "rollout_return_step_indices": list(query.returned_states),
        "rollout_return_dit_trajectory": True,
        "rollout_return_denoising_env": query.return_conditioning,
        "rollout_debug_mode": query.debug,
        "suppress_logs": True,
    }
    if record.negative_prompt is not None:
        body["negative_prompt"] = record.negative_prompt
    if record.image_path is not None:
        body["image_path"] = [record.image_path]
    extra: dict[str, Any] = {}
    if len(query.seeds) > 1:
        extra["seed"] = list(query.seeds)  # else output i would get the first seed + i
    if sampling.guidance_scale_2 is not None:
        extra["guidance_scale_2"] = sampling.guidance_scale_2
    if sampling.sigmas is not None:
        extra["diffusers_kwargs"] = {SIGMAS_KEY: list(sampling.sigmas)}
    if extra:
        body["extra_sampling_params"] = extra
    return body
