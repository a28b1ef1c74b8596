"""The rollout engine of a training worker: its own transformer makes the videos. In: requests. Out: videos with their
trajectories, as the server engine would return them. It knows no Ray, no optimizer and no sharding.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from miles_wan.errors import EngineError
from miles_wan.flow.transitions import CPS_LOG_PROBS, ETA_KINDS, KINDS
from miles_wan.records import Conditioning, Float32, PromptRecord, RolloutOutput, RolloutRequest, Trajectory, UInt8
from miles_wan.rollout.base import Answer, DebugTensors
from miles_wan.rollout.local.conditioning import encode_conditioning
from miles_wan.rollout.local.sampler import Step, denoise, sigma_grid
from miles_wan.wan.experts import TIMESTEPS
from miles_wan.wan.family import ModelFolder, legal_frames, legal_size
from miles_wan.wan.model import WanModel
from miles_wan.wan.text import PromptEncoder, prompts_of
from miles_wan.wan.video import VideoCodec


class LocalEngine:
    """Rolls out with transformers that are already loaded, plain or sharded, with or without adapters.

    Holds the VAE on the device and the text encoder on the CPU, both float32, and no weights of the transformers: what it
    computes with is what the trainer holds at that moment.

    Args:
        folder: the checkpoint the transformers are from.
        model: all its experts, in evaluation mode, on ``device``.
        device: where to compute.
    """

    def __init__(self, folder: ModelFolder, model: WanModel, *, device: torch.device) -> None:
        self._family = folder.family
        self._model = model
        self._device = device
        self._text = PromptEncoder(folder.path, device)
        self._codec = VideoCodec(folder.path, device)

    def prepare(self, records: Sequence[PromptRecord], *, guidance_scale: float) -> None:
        """Encode the prompts of several records while the text encoder is on the device once."""
        self._text.encode([prompt for record in records for prompt in prompts_of(record, guidance_scale)])

    def generate(
        self, request: RolloutRequest, sample_indices: Sequence[int], *, return_conditioning: bool = False
    ) -> list[RolloutOutput]:
        """The videos of ``request.seeds[i]`` for every i of ``sample_indices``, in that order; the first with the conditioning
        of their record if asked. They pass the transformer as one batch.

        With a sharded transformer this is a collective: every rank calls it, with a request of its own but equal shape
        (size, frames, steps, guidance on or off). A fault of the request is raised before the first forward.

        Raises:
            EngineError: a request that cannot be served, or values that are not finite.
        """
        return [answer.output for answer in self._answers(request, sample_indices, return_conditioning, debug=False)]

    def generate_debug(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        """As ``generate``, with every state and what was done in every step: for comparisons, it is large."""
        return self._answers(request, sample_indices, return_conditioning=True, debug=True)

    def _answers(
        self, request: RolloutRequest, sample_indices: Sequence[int], return_conditioning: bool, *, debug: bool
    ) -> list[Answer]:
        started = time.monotonic()
        sampling = request.sampling
        self._check(request, sample_indices)
        conditioning = self._conditioning(request)
        recording = _Recording(_kept_states(request, everything=debug), debug)
        for step in denoise(
            self._model,
            conditioning,
            sampling,
            seeds=[request.seeds[index] for index in sample_indices],
            stochastic_steps=request.stochastic_steps,
            latent_shape=self._family.latent_shape(sampling.num_frames, sampling.height, sampling.width),
            device=self._device,
        ):
            recording.add(step)
        frames = [self._codec.decode(torch.from_numpy(latent)) for latent in recording.final(self._source(request))]
        seconds = (time.monotonic() - started) / len(sample_indices)
        return [
            recording.answer(
                request,
                row,
                seed=request.seeds[index],
                frames=frames[row],
                conditioning=conditioning if return_conditioning and row == 0 else None,
                seconds=seconds,
            )
            for row, index in enumerate(sample_indices)
        ]

    def _conditioning(self, request: RolloutRequest) -> Conditioning:
        try:
            return encode_conditioning(
                request.record,
                request.sampling,
                text=self._text,
                codec=self._codec,
                image_conditioning=self._family.image_conditioning,
            )
        except EngineError as error:
            raise EngineError(f"{self._source(request)}: {error}") from error

    def _check(self, request: RolloutRequest, sample_indices: Sequence[int]) -> None:
        """Raises EngineError with everything that is wrong with the request."""
        sampling, with_image = request.sampling, request.record.image_path is not None
        steps, last = request.stochastic_steps, sampling.num_inference_steps - 1
        faults = [
            legal_size(sampling.width, sampling.height, self._family),
            legal_frames(sampling.num_frames, self._family, with_image=with_image and not self._family.needs_image),
            _grid_fault(request),
        ]
        if not sample_indices or not all(0 <= index < len(request.seeds) for index in sample_indices):
            faults.append(f"samples {list(sample_indices)} of a request with {len(request.seeds)} seeds")
        if with_image and self._family.image_conditioning == "none":
            faults.append(f"{self._family.name} takes no first image")
        if self._family.needs_image and not with_image:
            faults.append(f"{self._family.name} needs a first image")
        try:
            self._model.experts.guidance(sampling.guidance_scale, sampling.guidance_scale_2)
        except ValueError as error:
            faults.append(str(error))
        if sampling.kind not in KINDS:
            faults.append(f"unknown transition {sampling.kind!r}; known: {', '.join(KINDS)}")
        if sampling.cps_log_prob not in CPS_LOG_PROBS:
            faults.append(f"unknown cps_log_prob {sampling.cps_log_prob!r}; known: {', '.join(CPS_LOG_PROBS)}")
        if len(set(steps)) != len(steps) or not all(0 <= step <= last for step in steps):
            faults.append(f"stochastic steps {list(steps)} must be different and lie in [0, {last}]")
        if steps and sampling.kind == "ode":
            faults.append(f"stochastic steps {list(steps)} of the kind ode: it has no density")
        if steps and sampling.kind in ETA_KINDS and sampling.noise_level <= 0:
            faults.append(f"noise level {sampling.noise_level:g} with {sampling.kind}: it must be above 0")
        if sampling.kind == "cps" and last in steps:
            faults.append(f"step {last} with cps: the last step adds no noise and has no density")
        told = [fault for fault in faults if fault is not None]
        if told:
            raise EngineError(f"{self._source(request)}: {'; '.join(told)}")

    @staticmethod
    def _source(request: RolloutRequest) -> str:
        return request.record.source or request.record.record_id


@dataclass
class _Recording:
    """What is kept of the steps, on the CPU: the states of ``kept`` and the last one; every step's values with ``debug``."""

    kept: frozenset[int]
    debug: bool
    states: dict[int, Float32] = field(default_factory=dict)
    log_probs: list[Float32] = field(default_factory=list)
    stds: list[Float32] = field(default_factory=list)
    noises: list[Float32] = field(default_factory=list)
    means: list[Float32] = field(default_factory=list)
    velocities: list[Float32] = field(default_factory=list)
    last: int = 0

    def add(self, step: Step) -> None:
        for index, state in ((step.index, step.state), (step.index + 1, step.next_state)):
            if index in self.kept and index not in self.states:
                self.states[index] = _array(state)
        self.log_probs.append(_array(step.log_prob))
        if self.debug:
            self.stds.append(_array(step.std))
            self.noises.append(_array(step.noise))
            self.means.append(_array(step.mean))
            self.velocities.append(_array(step.velocity))
        self.last = step.index + 1

    def final(self, source: str) -> Float32:
        """The last states [B, C, F, h, w]. Raises EngineError if anything is not finite."""
        final = self.states[self.last]
        if not (np.isfinite(final).all() and np.isfinite(np.stack(self.log_probs)).all()):
            raise EngineError(f"{source}: the transformer made values that are not finite")
        return final

    def answer(
        self,
        request: RolloutRequest,
        row: int,
        *,
        seed: int,
        frames: UInt8,
        conditioning: Conditioning | None,
        seconds: float,
    ) -> Answer:
        states = {index: value[row] for index, value in self.states.items()}
        log_probs = np.stack(self.log_probs)[:, row]
        sigmas = sigma_grid(request.sampling).numpy()
        trajectory = (
            _trajectory(request, states, seed=seed, log_probs=log_probs, sigmas=sigmas)
            if request.keeps_trajectory
            else None
        )
        debug = (
            DebugTensors(
                noises=np.stack(self.noises)[:, row],
                means=np.stack(self.means)[:, row],
                model_outputs=np.stack(self.velocities)[:, row],
                stds=np.stack(self.stds)[:, row],
            )
            if self.debug
            else None
        )
        output = RolloutOutput(
            seed=seed, frames=frames, trajectory=trajectory, conditioning=conditioning, seconds=seconds
        )
        return Answer(output=output, states=states, log_probs=log_probs, sigmas=sigmas, debug=debug)


def _trajectory(
    request: RolloutRequest, states: Mapping[int, Float32], *, seed: int, log_probs: Float32, sigmas: Float32
) -> Trajectory:
    steps = tuple(sorted(request.stochastic_steps))
    final = states[len(sigmas) - 1]
    pairs = [np.stack([states[step], states[step + 1]]) for step in steps]
    return Trajectory(
        latents=np.stack(pairs) if pairs else np.zeros((0, 2, *final.shape), dtype=np.float32),
        steps=steps,
        sigmas=sigmas,
        timesteps=sigmas[list(steps)] * np.float32(TIMESTEPS),
        log_probs=log_probs[list(steps)],
        has_condition=request.record.image_path is not None,
        policy_version=request.policy_version,
        seed=seed,
        final_latent=final if request.keep_final else None,
    )


def _kept_states(request: RolloutRequest, *, everything: bool) -> frozenset[int]:
    """Both ends of every stochastic step and the last state, which is decoded; or all."""
    last = request.sampling.num_inference_steps
    ends = {index for step in request.stochastic_steps for index in (step, step + 1)}
    return frozenset(range(last + 1)) if everything else frozenset(ends | {last})


def _grid_fault(request: RolloutRequest) -> str | None:
    steps = request.sampling.num_inference_steps
    try:
        grid = sigma_grid(request.sampling)
    except ValueError as error:
        return str(error)
    return None if len(grid) == steps + 1 else f"{len(grid)} sigmas for {steps} steps; give {steps + 1}"


def _array(tensor: Tensor) -> Float32:
    return tensor.float().cpu().numpy()
