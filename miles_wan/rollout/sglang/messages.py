"""The wire format of SGLang's rollout route. In: one sample to generate, or the bytes of an answer. Out: the request body,
or a checked ``RolloutOutput``. No network here. Whatever the answer lacks, changes or adds is an EngineError that names
what was asked and what came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from miles_wan.errors import EngineError
from miles_wan.flow import shifted_sigmas
from miles_wan.records import Conditioning, Float32, RolloutOutput, RolloutRequest, Trajectory, UInt8
from miles_wan.rollout.base import Answer, DebugTensors

_SDE_TYPES = {"flow_sde": "sde", "cps": "cps", "ode": "ode"}
_SIGMA_TOLERANCE = 1e-6


@dataclass(frozen=True)
class SampleQuery:
    """One seed of a request, and what should come back with it. ``debug`` adds the engine's own noises and means."""

    request: RolloutRequest
    sample_index: int
    return_conditioning: bool = False
    debug: bool = False

    @property
    def seed(self) -> int:
        return self.request.seeds[self.sample_index]

    @property
    def steps(self) -> tuple[int, ...]:
        """Stochastic steps, which are the ones that are kept."""
        return tuple(sorted(self.request.stochastic_steps))

    @property
    def returned_states(self) -> tuple[int, ...]:
        """Indices of the states to return: both ends of every kept step, or the last state if none is kept."""
        ends = {index for step in self.steps for index in (step, step + 1)}
        return tuple(sorted(ends)) or (self.request.sampling.num_inference_steps,)


def request_body(query: SampleQuery) -> dict[str, Any]:
    """The JSON body of ``POST /rollout/generate``. Noise is drawn on the CPU so that it depends on the seed alone."""
    record, sampling = query.request.record, query.request.sampling
    kind = _SDE_TYPES[sampling.kind] if query.steps else "ode"
    body: dict[str, Any] = {
        "prompt": record.prompt,
        "seed": query.seed,
        "generator_device": "cpu",
        "width": sampling.width,
        "height": sampling.height,
        "num_frames": sampling.num_frames,
        "fps": sampling.fps,
        "num_inference_steps": sampling.num_inference_steps,
        "num_outputs_per_prompt": 1,
        "guidance_scale": sampling.guidance_scale,
        "rollout": True,
        "rollout_sde_type": kind,
        "rollout_noise_level": sampling.noise_level,
        "rollout_log_prob_no_const": kind == "ode",  # a deterministic rollout has no density, SGLang wants to be told
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
    return body


def parse_answer(content: bytes, query: SampleQuery) -> Answer:
    """Decode and check the answer to ``query``. Raises EngineError."""
    sample = _only_sample(content)
    sampling = query.request.sampling
    if sample.get("seed") != query.seed:
        raise EngineError(f"asked for seed {query.seed}, the engine answered for seed {sample.get('seed')}")
    frames = _frames(sample, query)
    trajectory = _required(sample, "dit_trajectory")
    sigmas = _sigmas(trajectory, num_steps=sampling.num_inference_steps, flow_shift=sampling.flow_shift)
    states = _states(trajectory, query)
    log_probs = _log_probs(sample, query)
    output = RolloutOutput(
        seed=query.seed,
        frames=frames,
        trajectory=_trajectory(query, states, log_probs=log_probs, sigmas=sigmas),
        conditioning=_conditioning(sample, query, states) if query.return_conditioning else None,
        seconds=float(sample.get("inference_time_s") or 0.0),
    )
    debug = _debug(sample, sampling.num_inference_steps) if query.debug else None
    return Answer(output=output, states=states, log_probs=log_probs, sigmas=sigmas, debug=debug)


def decode_tensor(value: Any, name: str) -> NDArray[Any]:
    """A tensor as SGLang packs it: a safetensors file with one entry in a marked map. Raises EngineError."""
    if not isinstance(value, Mapping) or not value.get("__tensor__"):
        raise EngineError(f"{name}: expected a tensor, the engine sent {type(value).__name__}")
    try:
        array = safetensors.numpy.load(value["data"])["t"]
    except Exception as error:  # safetensors raises its own types and KeyError
        raise EngineError(f"{name}: the engine sent a tensor that cannot be read ({error})") from error
    if list(array.shape) != list(value["shape"]):
        raise EngineError(f"{name}: the engine says shape {value['shape']} and sent {list(array.shape)}")
    return array


def _only_sample(content: bytes) -> Mapping[str, Any]:
    try:
        answer = msgpack.unpackb(content)
    except Exception as error:  # msgpack raises many types for bad input
        raise EngineError(f"the engine's answer is not msgpack ({error}): {content[:80]!r}") from error
    if not isinstance(answer, list) or len(answer) != 1 or not isinstance(answer[0], dict):
        found = f"a list of {len(answer)}" if isinstance(answer, list) else type(answer).__name__
        raise EngineError(f"asked for one video, the engine sent {found}")
    return answer[0]


def _required(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise EngineError(f"the engine's answer lacks {key}")
    return values[key]


def _float32(value: Any, name: str, shape: tuple[int, ...] | None = None) -> Float32:
    array = decode_tensor(value, name)
    if array.dtype != np.float32:
        raise EngineError(f"{name}: expected float32, the engine sent {array.dtype}")
    if shape is not None and array.shape != shape:
        raise EngineError(f"{name}: expected shape {shape}, the engine sent {array.shape}")
    if not np.isfinite(array).all():
        bad = int(np.count_nonzero(~np.isfinite(array)))
        raise EngineError(f"{name}: {bad} of {array.size} values are not finite")
    return array


def _frames(sample: Mapping[str, Any], query: SampleQuery) -> UInt8:
    sampling = query.request.sampling
    array = decode_tensor(_required(sample, "generated_output"), "generated_output")
    if array.dtype != np.uint8:
        raise EngineError(f"frames: expected uint8, the engine sent {array.dtype}: its uint8_frames hook is not active")
    wanted = (3, sampling.num_frames, sampling.height, sampling.width)
    if array.shape != wanted:
        raise EngineError(
            f"frames: asked for {sampling.width}x{sampling.height} and {sampling.num_frames} frames {wanted}, "
            f"the engine sent {array.shape}"
        )
    return np.ascontiguousarray(array.transpose(1, 2, 3, 0))


def _sigmas(trajectory: Mapping[str, Any], *, num_steps: int, flow_shift: float) -> Float32:
    used = _float32(_required(trajectory, "sigmas"), "sigmas", (num_steps + 1,))
    wanted = shifted_sigmas(num_steps, flow_shift).numpy()
    if np.abs(used - wanted).max() > _SIGMA_TOLERANCE:
        raise EngineError(
            f"sigma grid: {num_steps} steps with flow_shift {flow_shift:g} give {wanted.tolist()}, "
            f"the engine used {used.tolist()}; its flow shift is a start option"
        )
    return used


def _states(trajectory: Mapping[str, Any], query: SampleQuery) -> dict[int, Float32]:
    latents = _float32(_required(trajectory, "latents"), "latents")
    indices, sampling = query.returned_states, query.request.sampling
    if latents.ndim != 5 or latents.shape[0] != len(indices):
        raise EngineError(f"latents: asked for states {indices}, the engine sent {latents.shape}")
    _, _, frames, height, width = latents.shape
    fits = sampling.height % height == 0 and sampling.height // height * width == sampling.width
    if not fits or not 1 <= frames <= sampling.num_frames:
        raise EngineError(
            f"latents: {latents.shape} do not belong to {sampling.width}x{sampling.height}x{sampling.num_frames}"
        )
    return dict(zip(indices, latents, strict=True))


def _log_probs(sample: Mapping[str, Any], query: SampleQuery) -> Float32:
    num_steps = query.request.sampling.num_inference_steps
    log_probs = _float32(_required(sample, "rollout_log_probs"), "log_probs", (num_steps,))
    scored = tuple(np.flatnonzero(log_probs).tolist())
    if scored != query.steps:
        raise EngineError(f"log_probs: asked for stochastic steps {query.steps}, the engine scored {scored}")
    return log_probs


def _trajectory(
    query: SampleQuery, states: Mapping[int, Float32], *, log_probs: Float32, sigmas: Float32
) -> Trajectory | None:
    if not query.steps:
        return None
    pairs = [np.stack([states[step], states[step + 1]]) for step in query.steps]
    return Trajectory(
        latents=np.stack(pairs),
        steps=query.steps,
        sigmas=sigmas,
        log_probs=log_probs[list(query.steps)],
        has_condition=query.request.record.image_path is not None,
        policy_version=query.request.policy_version,
        seed=query.seed,
    )


def _conditioning(sample: Mapping[str, Any], query: SampleQuery, states: Mapping[int, Float32]) -> Conditioning:
    environment = _required(sample, "denoising_env")
    guided = query.request.sampling.guidance_scale > 1
    negative = environment.get("neg_cond_kwargs")
    if (negative is not None) != guided:
        raise EngineError(
            f"guidance_scale {query.request.sampling.guidance_scale:g} and a negative prompt embedding that is "
            f"{'missing' if guided else 'present'}"
        )
    first = states[query.returned_states[0]][:, :1] if query.request.record.image_path is not None else None
    return Conditioning(
        prompt_embeds=_embedding(_required(environment, "pos_cond_kwargs"), "prompt_embeds"),
        negative_prompt_embeds=_embedding(negative, "negative_prompt_embeds") if guided else None,
        condition_latent=None if first is None else np.ascontiguousarray(first),
    )


def _embedding(kwargs: Mapping[str, Any], name: str) -> Float32:
    value = _required(kwargs, "encoder_hidden_states")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    array = _float32(value, name)
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise EngineError(f"{name}: expected [tokens, width], the engine sent {array.shape}")
    return array


def _debug(sample: Mapping[str, Any], num_steps: int) -> DebugTensors:
    tensors = _required(sample, "rollout_debug_tensors")
    stds = _float32(_required(tensors, "rollout_noise_std_devs"), "noise_std_devs", (num_steps, 1))
    return DebugTensors(
        noises=_float32(_required(tensors, "rollout_variance_noises"), "variance_noises"),
        means=_float32(_required(tensors, "rollout_prev_sample_means"), "prev_sample_means"),
        model_outputs=_float32(_required(tensors, "rollout_model_outputs"), "model_outputs"),
        stds=stds[:, 0],
    )
