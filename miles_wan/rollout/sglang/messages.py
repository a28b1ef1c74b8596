"""What SGLang's rollout route answers. In: the bytes of an answer, and what was asked. Out: checked ``RolloutOutput``s. No
network here. Whatever the answer lacks, changes or adds is an EngineError that names what was asked and what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from miles_wan.errors import EngineError
from miles_wan.flow import explicit_sigmas, shifted_sigmas
from miles_wan.records import Conditioning, Float32, RolloutOutput, SamplingSettings, Trajectory, UInt8
from miles_wan.rollout.base import Answer, DebugTensors, EngineMismatchError
from miles_wan.rollout.sglang.hooks import CONDITION_KEY
from miles_wan.rollout.sglang.query import SampleQuery
from miles_wan.wan.experts import TIMESTEPS

_SIGMA_TOLERANCE = 1e-6


def parse_answer(content: bytes, query: SampleQuery) -> list[Answer]:
    """Decode and check the answer to ``query``, one for each of its samples in order. Raises EngineError."""
    answers = []
    for number, (seed, sample) in enumerate(zip(query.seeds, _samples(content, query), strict=True)):
        try:
            answers.append(
                _answer(sample, query, seed=seed, with_conditioning=query.return_conditioning and number == 0)
            )
        except EngineMismatchError as error:
            raise EngineMismatchError(f"seed {seed}: {error}", error.found, error.wanted) from error
        except EngineError as error:
            raise EngineError(f"seed {seed}: {error}") from error
    return answers


def _answer(sample: Mapping[str, Any], query: SampleQuery, *, seed: int, with_conditioning: bool) -> Answer:
    sampling = query.request.sampling
    frames = _frames(sample, query)
    trajectory = _required(sample, "dit_trajectory")
    sigmas = _sigmas(trajectory, sampling)
    timesteps = _timesteps(trajectory, query, sigmas)
    states = _states(trajectory, query)
    log_probs = _log_probs(sample, query)
    output = RolloutOutput(
        seed=seed,
        frames=frames,
        trajectory=_trajectory(query, states, log_probs=log_probs, sigmas=sigmas, timesteps=timesteps, seed=seed),
        conditioning=_conditioning(sample, query, states) if with_conditioning else None,
        seconds=float(sample.get("inference_time_s") or 0.0) / len(query.seeds),
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


def _samples(content: bytes, query: SampleQuery) -> list[Mapping[str, Any]]:
    try:
        answer = msgpack.unpackb(content)
    except Exception as error:  # msgpack raises many types for bad input
        raise EngineError(f"the engine's answer is not msgpack ({error}): {content[:80]!r}") from error
    seeds = query.seeds
    if not isinstance(answer, list) or len(answer) != len(seeds) or not all(isinstance(one, dict) for one in answer):
        found = f"a list of {len(answer)}" if isinstance(answer, list) else type(answer).__name__
        raise EngineError(f"asked for {len(seeds)} videos, seeds {seeds}; the engine sent {found}")
    for sample in answer:  # with several outputs each says the first seed
        if sample.get("seed") != seeds[0]:
            raise EngineError(f"asked for seed {seeds[0]}, the engine answered for seed {sample.get('seed')}")
    return answer


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


def _sigmas(trajectory: Mapping[str, Any], sampling: SamplingSettings) -> Float32:
    num_steps = sampling.num_inference_steps
    used = _float32(_required(trajectory, "sigmas"), "sigmas", (num_steps + 1,))
    if sampling.sigmas is not None:
        if not np.array_equal(used, explicit_sigmas(sampling.sigmas).numpy()):
            raise _other_grid(
                f"asked for {list(sampling.sigmas)}, the engine used {used.tolist()}", used, sampling.sigmas
            )
        return used
    wanted = shifted_sigmas(num_steps, sampling.flow_shift).numpy()
    if np.abs(used - wanted).max() > _SIGMA_TOLERANCE:
        raise _other_grid(
            f"{num_steps} steps with flow_shift {sampling.flow_shift:g} give {wanted.tolist()}, the engine used "
            f"{used.tolist()}; its flow shift is a start option",
            used,
            wanted.tolist(),
        )
    return used


def _timesteps(trajectory: Mapping[str, Any], query: SampleQuery, sigmas: Float32) -> dict[int, np.float32]:
    """Of the returned states: what the transformer was called with, and what chose it."""
    indices = query.returned_states
    used = _float32(_required(trajectory, "timesteps"), "timesteps", (len(indices),))
    wanted = sigmas[list(indices)] * TIMESTEPS
    if np.abs(used - wanted).max() > _SIGMA_TOLERANCE * TIMESTEPS:
        raise EngineError(f"timesteps: the sigmas give {wanted.tolist()}, the engine used {used.tolist()}")
    return dict(zip(indices, used, strict=True))


def _other_grid(text: str, used: Float32, wanted: Sequence[float]) -> EngineMismatchError:
    return EngineMismatchError(f"sigma grid: {text}", {"sigmas": used.tolist()}, {"sigmas": list(wanted)})


def _states(trajectory: Mapping[str, Any], query: SampleQuery) -> dict[int, Float32]:
    latents = _float32(_required(trajectory, "latents"), "latents")
    indices, sampling = query.returned_states, query.request.sampling
    if latents.ndim != 5 or latents.shape[0] != len(indices):
        raise EngineError(f"latents: asked for states {indices}, the engine sent {latents.shape}")
    if latents.shape[1:] != _latent_shape(query):
        raise EngineError(
            f"latents: {latents.shape} do not belong to {sampling.width}x{sampling.height}x{sampling.num_frames}"
        )
    return dict(zip(indices, latents, strict=True))


def _latent_shape(query: SampleQuery) -> tuple[int, int, int, int]:
    sampling = query.request.sampling
    return query.family.latent_shape(sampling.num_frames, sampling.height, sampling.width)


def _log_probs(sample: Mapping[str, Any], query: SampleQuery) -> Float32:
    num_steps = query.request.sampling.num_inference_steps
    log_probs = _float32(_required(sample, "rollout_log_probs"), "log_probs", (num_steps,))
    scored = tuple(np.flatnonzero(log_probs).tolist())
    if scored != query.steps:
        raise EngineError(f"log_probs: asked for stochastic steps {query.steps}, the engine scored {scored}")
    return log_probs


def _trajectory(
    query: SampleQuery,
    states: Mapping[int, Float32],
    *,
    log_probs: Float32,
    sigmas: Float32,
    timesteps: Mapping[int, np.float32],
    seed: int,
) -> Trajectory | None:
    request = query.request
    if not request.keeps_trajectory:
        return None
    shape = next(iter(states.values())).shape
    latents = np.empty((len(query.steps), 2, *shape), np.float32)
    for position, step in enumerate(query.steps):
        latents[position] = states[step], states[step + 1]
    return Trajectory(
        latents=latents,
        steps=query.steps,
        sigmas=sigmas,
        timesteps=np.array([timesteps[step] for step in query.steps], np.float32),
        log_probs=log_probs[list(query.steps)],
        has_condition=request.record.image_path is not None,
        policy_version=request.policy_version,
        seed=seed,
        final_latent=states[request.sampling.num_inference_steps] if request.keep_final else None,
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
    return Conditioning(
        prompt_embeds=_embedding(_required(environment, "pos_cond_kwargs"), "prompt_embeds"),
        negative_prompt_embeds=_embedding(negative, "negative_prompt_embeds") if guided else None,
        condition_latent=_condition_latent(environment, query, states),
    )


def _condition_latent(
    environment: Mapping[str, Any], query: SampleQuery, states: Mapping[int, Float32]
) -> Float32 | None:
    """What the first image gave: in TI2V the first frame of every state, in I2V the further channels of the input."""
    if query.request.record.image_path is None:
        return None
    if query.family.image_conditioning == "first_frame":
        return np.ascontiguousarray(states[query.returned_states[0]][:, :1])
    image_kwargs = environment.get("image_kwargs") or {}
    if image_kwargs.get(CONDITION_KEY) is None:
        raise EngineError(f"the engine's answer lacks {CONDITION_KEY}: its condition_latent hook is not active")
    shape = (query.family.condition_channels, *_latent_shape(query)[1:])
    latent = _without_batch(_float32(image_kwargs[CONDITION_KEY], CONDITION_KEY), ndim=4)
    if latent.shape != shape:
        raise EngineError(f"{CONDITION_KEY}: expected shape {shape}, the engine sent {latent.shape}")
    return latent


def _embedding(kwargs: Mapping[str, Any], name: str) -> Float32:
    value = _required(kwargs, "encoder_hidden_states")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    array = _without_batch(_float32(value, name), ndim=2)
    if array.ndim != 2:
        raise EngineError(f"{name}: expected [tokens, width], the engine sent {array.shape}")
    return array


def _without_batch(array: Float32, *, ndim: int) -> Float32:
    """With several outputs a leading 1 may stay."""
    return array[0] if array.ndim == ndim + 1 and array.shape[0] == 1 else array


def _debug(sample: Mapping[str, Any], num_steps: int) -> DebugTensors:
    tensors = _required(sample, "rollout_debug_tensors")
    stds = _float32(_required(tensors, "rollout_noise_std_devs"), "noise_std_devs", (num_steps, 1))
    return DebugTensors(
        noises=_float32(_required(tensors, "rollout_variance_noises"), "variance_noises"),
        means=_float32(_required(tensors, "rollout_prev_sample_means"), "prev_sample_means"),
        model_outputs=_float32(_required(tensors, "rollout_model_outputs"), "model_outputs"),
        stds=stds[:, 0],
    )
