"""One small video that proves a started engine. In: an answer with the engine's own noises. Out: nothing, or an EngineError
that names the hook at fault. SGLang only logs a hook that it cannot apply and then serves without it: only what it
computes can show that.
"""

from __future__ import annotations

import base64
import io
import math

import numpy as np
from PIL import Image

from miles_wan.errors import EngineError
from miles_wan.records import PromptRecord, RolloutRequest, SamplingSettings
from miles_wan.rollout.sglang.messages import Answer, SampleQuery

_TOLERANCE = 1e-4
_WIDTH, _HEIGHT = 64, 32


def canary_query(flow_shift: float, *, with_image: bool) -> SampleQuery:
    """Two steps, the first stochastic, of a video smaller than its (square) first image."""
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
        num_inference_steps=2,
        guidance_scale=1.0,
        flow_shift=flow_shift,
    )
    request = RolloutRequest(
        record=record,
        seeds=(1,),
        sampling=sampling,
        stochastic_steps=(0,),
        policy_version=0,
        rollout_id=0,
        group_index=0,
    )
    return SampleQuery(request=request, sample_index=0, debug=True)


def check_canary(answer: Answer, *, with_image: bool) -> None:
    """Whether states and log-prob follow from the engine's noise by the formulas of MATH. Raises EngineError."""
    if answer.debug is None:
        raise EngineError("the check after start needs the engine's debug tensors")
    given = 1 if with_image else 0
    noise, std = answer.debug.noises[0], float(answer.debug.stds[0])
    sampled = noise[:, given:].astype(np.float64)
    expected = -float(np.mean(sampled**2)) / 2 - math.log(std) - math.log(math.sqrt(2 * math.pi))
    served = float(answer.log_probs[0])
    if abs(expected - served) > _TOLERANCE:
        raise EngineError(
            f"the engine's log-prob is {served:.6f}, over the sampled frames it is {expected:.6f}: "
            "its sampled_log_prob hook is not in effect"
        )
    state = answer.debug.means[0] + answer.debug.noises[0] * answer.debug.stds[0]
    gap = float(np.abs(answer.states[1] - state)[:, given:].max())
    if gap > _TOLERANCE * max(1.0, float(np.abs(state).max())):
        raise EngineError(
            f"the engine's next state differs from mean + std * noise by {gap:.1e}: its float32_transition hook is not in effect"
        )
    if given and not np.array_equal(answer.states[0][:, 0], answer.states[1][:, 0]):
        raise EngineError("the engine changed latent frame 0, which the image gives")


def _image_uri() -> str:
    ramp = np.linspace(0, 255, 48, dtype=np.uint8)
    pixels = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None, :], ramp[None, ::-1]), axis=-1)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
