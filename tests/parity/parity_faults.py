"""Engines with one fault each, around an engine that has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from miles_wan.parity.parts import Adapter, EngineSide
from miles_wan.records import RolloutRequest
from miles_wan.rollout.base import Answer
from miles_wan.wan.conditioning import ModelInput
from miles_wan.wan.experts import Experts
from miles_wan.wan.model import WanModel


class Around:
    """An engine that works; the subclasses do not."""

    def __init__(self, engine: EngineSide) -> None:
        self.engine = engine

    def push(self, adapter: Adapter, *, policy_version: int) -> None:
        self.engine.push(adapter, policy_version=policy_version)

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        return self.engine.rollout(request, sample_indices)


class OtherSampling(Around):
    """Samples with other settings than it is asked for."""

    def __init__(self, engine: EngineSide, **changes: Any) -> None:
        super().__init__(engine)
        self.changes = changes

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        return self.engine.rollout(replace(request, sampling=replace(request.sampling, **self.changes)), sample_indices)


class OtherRecord(Around):
    """Generates, and says so in its conditioning, from another record of the batch."""

    def __init__(self, engine: EngineSide, requests: Sequence[RolloutRequest]) -> None:
        super().__init__(engine)
        turned = [*requests[1:], requests[0]]
        self.others = {request.group_index: other for request, other in zip(requests, turned, strict=True)}

    def other(self, request: RolloutRequest) -> RolloutRequest:
        return replace(request, record=self.others[request.group_index].record)

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        return self.engine.rollout(self.other(request), sample_indices)


class ShuffledConditions(OtherRecord):
    """Generates from the right record and returns the conditioning of another."""

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        answers = self.engine.rollout(request, sample_indices)
        [other] = self.engine.rollout(self.other(request), sample_indices[:1])
        return with_conditioning_of(answers, other)


class OtherPrompt(OtherRecord):
    """Generates from the right image with another record's prompt, and says that it used the right one."""

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        mixed = replace(request.record, prompt=self.other(request).record.prompt)
        answers = self.engine.rollout(replace(request, record=mixed), sample_indices)
        [right] = self.engine.rollout(request, sample_indices[:1])
        return with_conditioning_of(answers, right)


class ShuffledSamples(OtherPrompt):
    """As ``OtherPrompt``, for the second half of each call alone."""

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        right = self.engine.rollout(request, sample_indices)
        wrong = super().rollout(request, sample_indices)
        half = len(right) // 2
        return right[:half] + wrong[half:]


class OtherImage(OtherRecord):
    """Generates from another record's image with the right prompt, and says that it used the right one."""

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        mixed = replace(request.record, image_path=self.other(request).record.image_path)
        answers = self.engine.rollout(replace(request, record=mixed), sample_indices)
        [right] = self.engine.rollout(request, sample_indices[:1])
        return with_conditioning_of(answers, right)


class DeafToModule(Around):
    """Ignores the second push into one module."""

    def __init__(self, engine: EngineSide, module: str) -> None:
        super().__init__(engine)
        self.module = module
        self.held: Adapter = {}

    def push(self, adapter: Adapter, *, policy_version: int) -> None:
        self.held = adapter if not self.held else {**adapter, self.module: self.held[self.module]}
        self.engine.push(self.held, policy_version=policy_version)


class DeafTo(Around):
    """Ignores the pushes of these policy versions."""

    def __init__(self, engine: EngineSide, *versions: int) -> None:
        super().__init__(engine)
        self.versions = versions

    def push(self, adapter: Adapter, *, policy_version: int) -> None:
        if policy_version not in self.versions:
            self.engine.push(adapter, policy_version=policy_version)


class OtherLogProb(Around):
    """Serves other log-probs than those of its steps."""

    def __init__(self, engine: EngineSide, log_prob: Callable[[Answer, int], float]) -> None:
        super().__init__(engine)
        self.log_prob = log_prob

    def rollout(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        return [self.changed(answer) for answer in self.engine.rollout(request, sample_indices)]

    def changed(self, answer: Answer) -> Answer:
        trajectory = answer.output.trajectory
        values = np.array([self.log_prob(answer, step) for step in trajectory.steps], np.float32)
        output = replace(answer.output, trajectory=replace(trajectory, log_probs=values))
        return replace(answer, output=output)


class Miscalled:
    """A model that works, for an engine that calls it wrongly; the subclasses do."""

    def __init__(self, model: WanModel) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class ScalarTimesteps(Miscalled):
    """Called with the same timestep for every token of a conditioned video."""

    def input(self, latents: Tensor, timestep: Tensor, **others: Any) -> ModelInput:
        return replace(self.model.input(latents, timestep, **others), timestep=timestep.float())


class OtherBoundary(Miscalled):
    """Called with another boundary between its experts."""

    def __init__(self, model: WanModel, boundary: float) -> None:
        super().__init__(model)
        self.experts = Experts(model.experts.names, boundary)


class SwappedExperts(Miscalled):
    """Each expert is called in the place, and with the guidance, of the other."""

    def velocity(self, expert: str, inputs: ModelInput, **others: Any) -> Tensor:
        first, second = self.model.names
        return self.model.velocity(second if expert == first else first, inputs, **others)


def over_all_noise(answer: Answer, step: int) -> float:
    """The log-prob over all frames, the given one too, from the noise: what SGLang does without our hook."""
    noise, std = answer.debug.noises[step].astype(np.float64), float(answer.debug.stds[step])
    return float(-(noise**2).mean() / 2) - math.log(std) - math.log(2 * math.pi) / 2


def over_all_states(answer: Answer, step: int) -> float:
    """The log-prob over all frames from the stored states, whose first frame was put back."""
    std = float(answer.debug.stds[step])
    residual = (answer.states[step + 1] - answer.debug.means[step]).astype(np.float64)
    return float(-((residual / std) ** 2).mean() / 2) - math.log(std) - math.log(2 * math.pi) / 2


def changed(adapter: Adapter, change: Callable[[str, Tensor], Tensor]) -> Adapter:
    """The adapter with every tensor replaced by ``change(name, tensor)``."""
    return {module: {name: change(name, tensor) for name, tensor in own.items()} for module, own in adapter.items()}


def without_effect(name: str, tensor: Tensor) -> Tensor:
    """For ``changed``: an adapter that adds nothing."""
    return tensor * 0 if ".lora_B." in name else tensor


def with_conditioning_of(answers: list[Answer], other: Answer) -> list[Answer]:
    first = replace(answers[0], output=replace(answers[0].output, conditioning=other.output.conditioning))
    return [first, *answers[1:]]
