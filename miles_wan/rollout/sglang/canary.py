"""A few small videos that prove a started engine. In: answers with the engine's own noises. Out: nothing, or an EngineError
that names the hook at fault. SGLang only logs a hook that it cannot apply and then serves without it: only what it
computes can show that.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from miles_wan.errors import EngineError
from miles_wan.records import Float32, PromptRecord, RolloutRequest, SamplingSettings
from miles_wan.rollout.base import Answer, DebugTensors, hook_not_in_effect
from miles_wan.rollout.sglang.query import SampleQuery
from miles_wan.wan.conditioning import MASK_CHANNELS
from miles_wan.wan.experts import TIMESTEPS, Experts
from miles_wan.wan.facts import WanFamily

_TOLERANCE = 1e-4
_WIDTH, _HEIGHT = 64, 32
_STEPS = (0, 1)  # the second shows what the generator was used for in the first
_GUIDANCE = (2.0, 5.0)
_SHARE = 0.02


def canary_query(family: WanFamily, flow_shift: float, *, with_image: bool = True) -> SampleQuery:
    """Two outputs of three steps, two of them stochastic, smaller than their (square) first image, which they have if the
    family takes one."""
    return _query(
        family, seeds=(1, 5), steps=_STEPS, with_image=with_image, num_inference_steps=3, flow_shift=flow_shift
    )


def expert_queries(family: WanFamily, flow_shift: float, experts: Experts) -> tuple[SampleQuery, SampleQuery]:
    """Two requests that differ in the guidance of the low-noise expert alone, with steps right above and below the boundary."""
    edge = experts.ranges()[experts.names[0]][0]
    timesteps = (TIMESTEPS, edge + 0.07, edge - 0.02, edge / 2, 0.0)
    sigmas = tuple(timestep / TIMESTEPS for timestep in timesteps)
    first, second = (
        _query(
            family,
            seeds=(1,),
            steps=(),
            num_inference_steps=len(sigmas) - 1,
            flow_shift=flow_shift,
            sigmas=sigmas,
            guidance_scale=_GUIDANCE[0],
            guidance_scale_2=scale,
        )
        for scale in _GUIDANCE
    )
    return first, second


def _query(
    family: WanFamily, *, seeds: tuple[int, ...], steps: tuple[int, ...], with_image: bool = True, **settings: Any
) -> SampleQuery:
    takes_image = with_image and family.image_conditioning != "none"
    record = PromptRecord(
        record_id="canary",
        prompt="a bird",
        image_path=_image_uri() if takes_image else None,
        source="the check after start",
    )
    standard = {"guidance_scale": 1.0, "guidance_scale_2": 1.0 if len(family.experts) == 2 else None}
    sampling = SamplingSettings(width=_WIDTH, height=_HEIGHT, num_frames=5, fps=8, **(standard | settings))
    request = RolloutRequest(
        record=record,
        seeds=seeds,
        sampling=sampling,
        stochastic_steps=steps,
        policy_version=0,
        rollout_id=0,
        group_index=0,
    )
    return SampleQuery(family, request, tuple(range(len(seeds))), return_conditioning=True, debug=True)


def check_canary(answers: Sequence[Answer], family: WanFamily, *, with_image: bool = True) -> None:
    """Whether noise follows from the seed, states and log-prob from the noise by the formulas of MATH, and what an image gives
    comes back.

    Raises:
        EngineError: they do not; it names the hook.
    """
    given = 1 if with_image and family.image_conditioning == "first_frame" else 0
    for answer in answers:
        if answer.debug is None:
            raise EngineError("the check after start needs the engine's debug tensors")
        _check_noise(answer.debug.noises, answer.output.seed)
        for step in _STEPS:
            _check_step(answer, answer.debug, step=step, given=given)
        check_start(answer, given=given)
    if family.image_conditioning == "channels":
        _check_channels(answers[0])


def check_experts(answers: Sequence[Answer], experts: Experts) -> None:
    """Whether the engine gives each step to the expert that the trainer gives it to, with its own guidance.

    Args:
        answers: to ``expert_queries``. Up to the first step of the low-noise expert they are the same.

    Raises:
        EngineError: it does not.
    """
    one, other = answers
    assert one.debug is not None
    assert other.debug is not None
    timesteps = [float(sigma * TIMESTEPS) for sigma in one.sigmas[:-1]]
    wanted = [experts.of(timestep) for timestep in timesteps].index(experts.names[1])
    moved = np.abs(one.debug.model_outputs - other.debug.model_outputs).max(axis=(1, 2, 3, 4))
    if not moved.any():
        raise EngineError("the guidance of the low-noise expert changes nothing: the engine never used that expert")
    found = int(np.argmax(moved > _SHARE * moved.max()))  # a GPU need not give the same bits twice
    if found != wanted:
        raise EngineError(
            f"the engine gives the steps from timestep {timesteps[found]:.2f} on to the low-noise expert, by the boundary "
            f"{experts.boundary:g} of the checkpoint it is {timesteps[wanted]:.2f}"
        )


def _check_channels(answer: Answer) -> None:
    conditioning = answer.output.conditioning
    latent = None if conditioning is None else conditioning.condition_latent
    if latent is None:
        raise hook_not_in_effect("the engine does not return what the image gives", "condition_latent")
    mask = np.zeros_like(latent[:MASK_CHANNELS])
    mask[:, 0] = 1
    if not np.array_equal(latent[:MASK_CHANNELS], mask):
        raise EngineError("the engine's mask of the first image is not 1 in latent frame 0 and 0 elsewhere")


def _check_noise(noises: Float32, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, *noises.shape[1:])
    torch.randn(shape, generator=generator)  # the state of step 0
    for step in _STEPS:
        if not np.array_equal(noises[step], torch.randn(shape, generator=generator)[0].numpy()):
            raise hook_not_in_effect(
                f"the engine's noise of seed {seed} in step {step} is not what the seed gives: "
                "its separate_outputs or generator_noise hook is not in effect",
                "separate_outputs",
                "generator_noise",
            )


def check_start(answer: Answer, *, given: int) -> None:
    """Whether the first state is the seed's first draw, behind the ``given`` frames. Raises EngineError."""
    state, seed = answer.states[0], answer.output.seed
    start = torch.randn((1, *state.shape), generator=torch.Generator().manual_seed(seed))[0].numpy()
    if not np.array_equal(state[:, given:], start[:, given:]):
        raise EngineError(
            f"the engine's first state is not the noise that seed {seed} gives: its float32_start hook is not in effect"
        )


def _check_step(answer: Answer, debug: DebugTensors, *, step: int, given: int) -> None:
    noise, std = debug.noises[step], float(debug.stds[step])
    sampled = noise[:, given:].astype(np.float64)
    expected = -float(np.mean(sampled**2)) / 2 - math.log(std) - math.log(math.sqrt(2 * math.pi))
    served = float(answer.log_probs[step])
    if abs(expected - served) > _TOLERANCE:
        raise hook_not_in_effect(
            f"the engine's log-prob is {served:.6f}, over the sampled frames it is {expected:.6f}: "
            "its sampled_log_prob hook is not in effect",
            "sampled_log_prob",
        )
    state = debug.means[step] + noise * std
    gap = float(np.abs(answer.states[step + 1] - state)[:, given:].max())
    if gap > _TOLERANCE * max(1.0, float(np.abs(state).max())):
        raise hook_not_in_effect(
            f"the engine's next state differs from mean + std * noise by {gap:.1e}: its float32_transition hook is not in effect",
            "float32_transition",
        )
    if given and not np.array_equal(answer.states[step][:, 0], answer.states[step + 1][:, 0]):
        raise EngineError("the engine changed latent frame 0, which the image gives")


def _image_uri() -> str:
    ramp = np.linspace(0, 255, 48, dtype=np.uint8)
    pixels = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None, :], ramp[None, ::-1]), axis=-1)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
