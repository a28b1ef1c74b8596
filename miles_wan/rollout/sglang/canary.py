"""Two small videos that prove a started engine. In: answers with the engine's own noises. Out: nothing, or an EngineError
that names the hook at fault. SGLang only logs a hook that it cannot apply and then serves without it: only what it
computes can show that.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from miles_wan.errors import EngineError
from miles_wan.records import Float32, PromptRecord, RolloutRequest, SamplingSettings
from miles_wan.rollout.base import hook_not_in_effect
from miles_wan.rollout.sglang.messages import Answer, DebugTensors, SampleQuery

_TOLERANCE = 1e-4
_WIDTH, _HEIGHT = 64, 32
_STEPS = (0, 1)  # the second shows what the generator was used for in the first


def canary_query(flow_shift: float, *, with_image: bool) -> SampleQuery:
    """Two outputs of three steps, two of them stochastic, smaller than their (square) first image."""
    record = PromptRecord(
        record_id="canary",
        prompt="a bird",
        image_path=_image_uri() if with_image else None,
        source="the check after start",
    )
    sampling = SamplingSettings(
        width=_WIDTH,
        height=_HEIGHT,
        num_frames=5,
        fps=8,
        num_inference_steps=3,
        guidance_scale=1.0,
        flow_shift=flow_shift,
    )
    request = RolloutRequest(
        record=record,
        seeds=(1, 5),
        sampling=sampling,
        stochastic_steps=_STEPS,
        policy_version=0,
        rollout_id=0,
        group_index=0,
    )
    return SampleQuery(request=request, sample_indices=(0, 1), debug=True)


def check_canary(answers: Sequence[Answer], *, with_image: bool) -> None:
    """Whether noise follows from the seed, and states and log-prob from the noise by the formulas of MATH.

    Raises:
        EngineError: they do not; it names the hook.
    """
    for answer in answers:
        if answer.debug is None:
            raise EngineError("the check after start needs the engine's debug tensors")
        _check_noise(answer.debug.noises, answer.output.seed)
        given = 1 if with_image else 0
        for step in _STEPS:
            _check_step(answer, answer.debug, step=step, given=given)
        check_start(answer, given=given)


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
