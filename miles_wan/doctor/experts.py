"""Checks what a model with two experts, or one that needs images, asks of a configuration and its records. In: what a model
folder says, configuration, data. Out: faults. It reads no weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_wan.combinations import step_range
from miles_wan.config import Config
from miles_wan.data import Dataset
from miles_wan.timesteps import timestep_of
from miles_wan.wan.experts import Experts
from miles_wan.wan.family import ModelFolder


def expert_faults(model: ModelFolder, config: Config) -> list[str]:
    """Faults of what belongs to two experts: guidance, which are trained, and whether the trained steps are theirs."""
    experts, rollout = model.routing, config.rollout
    faults = []
    try:
        experts.guidance(rollout.guidance_scale, rollout.guidance_scale_2)
    except ValueError as error:
        family = model.family
        released = [scale for scale in (family.guidance_scale, family.guidance_scale_2) if scale is not None]
        faults.append(
            f"rollout.guidance_scale, rollout.guidance_scale_2: {error} ({family.name} was released with "
            f"{' and '.join(f'{scale:g}' for scale in released)})"
        )
    try:
        trained = experts.chosen(config.model.train_experts)
    except ValueError as error:
        return [*faults, f"model.train_experts = {config.model.train_experts}: {error}"]
    return faults if len(experts.names) == 1 else [*faults, *_step_faults(experts, trained, config)]


def _step_faults(experts: Experts, trained: Sequence[str], config: Config) -> list[str]:
    from miles_wan.flow import explicit_sigmas, shifted_sigmas  # torch takes seconds

    rollout, steps = config.rollout, config.rollout.num_inference_steps
    try:
        sigmas = explicit_sigmas(rollout.sigmas) if rollout.sigmas else shifted_sigmas(steps, rollout.flow_shift)
    except ValueError:
        return []  # told by check_config
    own = experts.route(timestep_of(sigmas[:-1]).tolist())
    told = ", ".join(f"{experts.label(name)} {_span(own[name])}" for name in experts.names)
    if config.algorithm.loss == "nft":
        free = sum(len(own[name]) for name in trained)
        if config.algorithm.nft.sigmas_per_sample <= free:
            return []
        return [
            f"algorithm.nft.sigmas_per_sample = {config.algorithm.nft.sigmas_per_sample}: the trained experts have {free} "
            f"steps of this grid ({told}); lower it"
        ]
    given = rollout.step_selection == "given" and rollout.steps is not None
    candidates = set(rollout.steps or ()) if given else set(range(*step_range(config)))
    field = "rollout.steps" if given else "rollout.window_range"
    faults = []
    foreign = sorted(candidates - {step for name in trained for step in own[name]})
    if foreign:
        faults.append(
            f"model.train_experts = {config.model.train_experts}: steps {_span(foreign)} of {field} belong to the expert that "
            f"is not trained; on this grid the steps are {told}: set {field} within those of the trained one"
        )
    faults += [
        f"model.train_experts = {config.model.train_experts}: no step of {field} belongs to the expert of "
        f"{experts.label(name)} noise, which would never be trained; on this grid the steps are {told}: change {field}, "
        "rollout.flow_shift or num_inference_steps, or train the other one alone"
        for name in trained
        if not candidates & set(own[name])
    ]
    return faults


def _span(steps: Sequence[int]) -> str:
    """Steps in a row, as people write them."""
    return "none" if not steps else str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def image_faults(model: ModelFolder, datasets: list[Dataset]) -> list[str]:
    """Records with a first image where the model takes none, or without one where it needs it."""
    kind = model.image_conditioning
    if kind == "first_frame":
        return []
    records = [record for data in datasets for record in data.records]
    wrong = [record.source for record in records if (record.image_path is None) == (kind == "channels")]
    if not wrong:
        return []
    told = "have no first image, which it needs" if kind == "channels" else "have a first image, which it does not take"
    return [
        f"{len(wrong)} of {len(records)} records {told} (first {wrong[0]}): {model.family.name} makes videos from "
        f"{'an image and a prompt' if kind == 'channels' else 'a prompt alone'}; change the records or the model"
    ]
