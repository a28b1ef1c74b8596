"""One kept step as the engine took it and as the trainer scores it. In: answers of an engine and a trainer. Out: pairs with
both sides' values and the figures of their difference. It judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_wan.flow import masked_mean, transition
from miles_wan.parity.parts import EngineSide, Trainer
from miles_wan.records import Conditioning, Float32, RolloutRequest, SamplingSettings
from miles_wan.rollout.base import Answer
from miles_wan.training.batch import step_noises


@dataclass(frozen=True)
class Group:
    """What an engine made of one request: an answer for each sample, and the conditioning that each call returned (the
    first of them is what training uses for the whole group)."""

    request: RolloutRequest
    answers: Sequence[Answer]
    conditionings: Sequence[Conditioning]


@dataclass(frozen=True)
class Pair:
    """One (sample, kept step). Tensors [1, C, F, h, w] in float32 on the CPU; ``mask`` [1, 1, F, h, w].

    ``expert`` is the component that the timestep chooses. The engine's: ``state``, ``next_state``, ``velocity``, ``mean``, ``noise``, ``log_prob``; ``engine_std`` is measured, by
    (next state - mean) over the noise. The trainer's: ``own_velocity``, ``own_mean``, ``own_std``, ``own_log_prob``.
    ``seed_noise`` is what the sample's seed gives for this step.
    """

    group: int
    sample: int
    step: int
    sampling: SamplingSettings
    sigma: float
    sigma_next: float
    sigma_max: float
    timestep: float
    expert: str
    has_condition: bool
    state: Tensor
    next_state: Tensor
    mask: Tensor
    velocity: Tensor
    mean: Tensor
    noise: Tensor
    seed_noise: Tensor
    engine_std: float
    log_prob: float
    own_velocity: Tensor
    own_mean: Tensor
    own_std: float
    own_log_prob: float

    @property
    def has_given_frame(self) -> bool:
        """Whether latent frame 0 was given by an image, and not sampled."""
        return not bool(self.mask.all())

    @property
    def model_output_gap(self) -> float:
        """Relative, over the sampled elements."""
        return relative(self.own_velocity, self.velocity, self.mask)

    @property
    def mean_gap(self) -> float:
        """Root mean square, in units of the std."""
        return rms(self.own_mean - self.mean, self.mask) / self.own_std

    @property
    def kl_gap(self) -> float:
        """KL per element between the two laws, as the dppo loss takes it."""
        return self.mean_gap**2 / 2

    @property
    def log_prob_gap(self) -> float:
        return abs(self.own_log_prob - self.log_prob)

    @property
    def noise_gap(self) -> float:
        return float((self.noise - self.seed_noise).abs().max())

    @property
    def next_state_gap(self) -> float:
        """Of next state and mean + std noise, root mean square in units of the std."""
        return rms(self.next_state - self.mean - self.engine_std * self.noise, self.mask) / self.engine_std

    def engine_density(self, *, everywhere: bool = False, stored: bool = False, squared_error: bool = False) -> float:
        """The log-prob of the engine's step from its own noise and std.

        Args:
            everywhere: over all frames, the given one too.
            stored: from the stored next state and the mean instead of the noise.
            squared_error: without variance and constants.
        """
        std = self.engine_std
        residual = (self.next_state - self.mean).double() if stored else self.noise.double() * std
        mask = torch.ones_like(self.mask) if everywhere else self.mask
        squares = float(masked_mean(residual**2, mask))
        if squared_error:
            return -squares
        return -squares / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi) if std > 0 else math.nan


def collect(engine: EngineSide, requests: Sequence[RolloutRequest], *, samples_per_call: int) -> Iterator[Group]:
    """Roll out every sample of every request, so many in a call. Raises EngineError."""
    for request in requests:
        answers: list[Answer] = []
        conditionings: list[Conditioning] = []
        for start in range(0, len(request.seeds), samples_per_call):
            indices = range(len(request.seeds))[start : start + samples_per_call]
            part = engine.rollout(request, tuple(indices))
            answers += part
            conditionings += [one.output.conditioning for one in part[:1] if one.output.conditioning is not None]
        yield Group(request, answers, conditionings)


def score(groups: Sequence[Group], trainer: Trainer) -> list[Pair]:
    """Every kept step under the trainer's weights, conditioned on what the engine returned."""
    return [
        _pair(number, sample, position, group, trainer)
        for number, group in enumerate(groups)
        for sample in range(len(group.answers))
        for position in range(len(group.request.stochastic_steps))
    ]


def _pair(number: int, sample: int, position: int, group: Group, trainer: Trainer) -> Pair:
    answer, sampling = group.answers[sample], group.request.sampling
    trajectory, debug = answer.output.trajectory, answer.debug
    if trajectory is None or debug is None:
        raise ValueError("parity needs trajectories and the engine's debug tensors")
    step = trajectory.steps[position]
    sigma, sigma_next, sigma_max = (float(answer.sigmas[index]) for index in (step, step + 1, 1))
    own_velocity, inputs = trainer.velocity(
        answer.states[step],
        float(trajectory.timesteps[position]),
        group.conditionings[0],
        has_condition=trajectory.has_condition,
        sampling=sampling,
    )
    next_state, mean, noise = (
        _batch(value) for value in (answer.states[step + 1], debug.means[step], debug.noises[step])
    )
    law = transition(
        sampling.kind,
        inputs.state,
        own_velocity,
        sigma=sigma,
        sigma_next=sigma_next,
        sigma_max=sigma_max,
        noise_level=sampling.noise_level,
        next_sample=next_state,
        mask=inputs.mask,
        cps_log_prob=sampling.cps_log_prob,
    )
    return Pair(
        group=number,
        sample=sample,
        step=step,
        sampling=sampling,
        sigma=sigma,
        sigma_next=sigma_next,
        sigma_max=sigma_max,
        timestep=float(trajectory.timesteps[position]),
        expert=trainer.model.experts.of(float(trajectory.timesteps[position])),
        has_condition=trajectory.has_condition,
        state=_batch(answer.states[step]),
        next_state=next_state,
        mask=inputs.mask,
        velocity=_batch(debug.model_outputs[step]),
        mean=mean,
        noise=noise,
        seed_noise=_batch(step_noises(trajectory)[position]),
        engine_std=_measured_std(next_state - mean, noise, inputs.mask),
        log_prob=float(trajectory.log_probs[position]),
        own_velocity=own_velocity,
        own_mean=law.mean,
        own_std=float(law.std),
        own_log_prob=float(law.log_prob),
    )


def _measured_std(added: Tensor, noise: Tensor, mask: Tensor) -> float:
    """The factor of ``noise`` in what was ``added``, by least squares; NaN without noise."""
    added, noise = added.double() * mask, noise.double() * mask
    squares = float((noise**2).sum())
    return float((added * noise).sum()) / squares if squares > 0 else math.nan


def relative(ours: Tensor, theirs: Tensor, mask: Tensor) -> float:
    """||ours - theirs|| / ||theirs|| over the sampled elements."""
    size = rms(theirs, mask)
    return rms(ours - theirs, mask) / size if size > 0 else math.nan


def rms(values: Tensor, mask: Tensor) -> float:
    """Root mean square over the sampled elements."""
    return math.sqrt(float(masked_mean(values.double() ** 2, mask)))


def _batch(array: Float32) -> Tensor:
    return torch.from_numpy(array)[None]
