"""Two engines, one request: the local engine makes the trajectories of the real server, from the seeds alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cross_scoring import by_trainer, by_velocities, relative
from rollout_replay import make_request

from miles_wan.records import PromptRecord
from miles_wan.rollout.local import LocalEngine
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.tiny import TinyPaths
from miles_wan.wan.family import load_family
from miles_wan.wan.model import WanModel, load_model

pytestmark = pytest.mark.e2e

EVERY_LAW = [("flow_sde", (0, 1, 4)), ("cps", (0, 1, 4)), ("ode", ())]


@pytest.fixture(scope="module")
def model(tiny_paths: TinyPaths) -> WanModel:
    return load_model(load_family(tiny_paths.model), dtype="fp32")


@pytest.fixture(scope="module")
def local(tiny_paths: TinyPaths, model: WanModel) -> LocalEngine:
    return LocalEngine(load_family(tiny_paths.model), model, device=torch.device("cpu"))


@pytest.mark.parametrize(("kind", "steps"), EVERY_LAW)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("image", [True, False])
def test_both_engines_make_the_same_samples(
    engine: SGLangEngine,
    local: LocalEngine,
    record: PromptRecord,
    run: Any,
    image: bool,
    guidance: float,
    kind: str,
    steps: tuple[int, ...],
) -> None:
    # 64x32 from a square image: the first frame is cropped.
    request = make_request(
        record,
        image=image,
        seeds=(7, 100),
        width=64,
        guidance_scale=guidance,
        kind=kind,
        stochastic_steps=steps,
        keep_final=True,
    )
    theirs = run(engine.generate(request, [1, 0], return_conditioning=True))
    ours = local.generate(request, [1, 0], return_conditioning=True)
    for our, their in zip(ours, theirs, strict=True):
        assert our.seed == their.seed
        assert np.abs(our.frames.astype(int) - their.frames).max() <= 1
        assert relative(our.trajectory.final_latent, their.trajectory.final_latent) <= 1e-5
        assert our.trajectory.latents.shape == their.trajectory.latents.shape
        for our_pair, their_pair in zip(our.trajectory.latents, their.trajectory.latents, strict=True):
            assert relative(our_pair[0], their_pair[0]) <= 1e-5
            assert relative(our_pair[1], their_pair[1]) <= 1e-5
        np.testing.assert_allclose(our.trajectory.log_probs, their.trajectory.log_probs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(our.trajectory.sigmas, their.trajectory.sigmas, rtol=0, atol=1e-7)
        assert (our.trajectory.steps, our.trajectory.has_condition) == (steps, image)
        assert their.trajectory.has_condition is image


@pytest.mark.parametrize("kind", ["flow_sde", "cps"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("image", [True, False])
def test_the_other_side_gives_each_trajectory_the_same_likelihood(
    engine: SGLangEngine,
    local: LocalEngine,
    model: WanModel,
    record: PromptRecord,
    run: Any,
    image: bool,
    guidance: float,
    kind: str,
) -> None:
    request = make_request(
        record,
        image=image,
        seeds=(7, 100),
        num_frames=9,
        height=64,
        guidance_scale=guidance,
        kind=kind,
        stochastic_steps=(0, 1, 2, 4),
    )
    theirs, ours = run(engine.generate_debug(request, [0, 1])), local.generate_debug(request, [0, 1])
    for our, their in zip(ours, theirs, strict=True):
        served, made = their.output.trajectory, our.output.trajectory
        scored = by_trainer(model, served, theirs[0].output.conditioning, request.sampling)
        np.testing.assert_allclose(served.log_probs, scored, rtol=0, atol=1e-5)
        scored = by_velocities(model, their.debug.model_outputs, made, request.sampling)
        np.testing.assert_allclose(made.log_probs, scored, rtol=0, atol=1e-5)


@pytest.mark.parametrize("image", [True, False])
def test_both_engines_condition_on_the_same(
    engine: SGLangEngine, local: LocalEngine, record: PromptRecord, run: Any, image: bool
) -> None:
    named = type(record)(**{**vars(record), "prompt": "  A red  ball, é!\n", "negative_prompt": " a blue bird "})
    for each in (record, named):
        request = make_request(each, image=image, height=64)
        their = run(engine.generate(request, [0], return_conditioning=True))[0].conditioning
        our = local.generate(request, [0], return_conditioning=True)[0].conditioning
        np.testing.assert_allclose(our.prompt_embeds, their.prompt_embeds, rtol=0, atol=1e-5)
        np.testing.assert_allclose(our.negative_prompt_embeds, their.negative_prompt_embeds, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(our.prompt_embeds == 0, their.prompt_embeds == 0)
        assert (our.condition_latent is not None) is image
        if image:
            np.testing.assert_allclose(our.condition_latent, their.condition_latent, rtol=0, atol=1e-5)


def test_both_engines_do_the_same_in_every_step(
    engine: SGLangEngine, local: LocalEngine, record: PromptRecord, run: Any
) -> None:
    request = make_request(record, stochastic_steps=(0, 2, 5))
    their = run(engine.generate_debug(request, [0]))[0]
    our = local.generate_debug(request, [0])[0]
    assert set(our.states) == set(range(7))
    np.testing.assert_array_equal(our.debug.noises, their.debug.noises)
    np.testing.assert_allclose(our.debug.stds, their.debug.stds, rtol=1e-6)
    np.testing.assert_allclose(our.log_probs, their.log_probs, rtol=0, atol=1e-5)
    for step in range(6):
        assert relative(our.debug.model_outputs[step], their.debug.model_outputs[step]) <= 1e-5
        assert relative(our.debug.means[step], their.debug.means[step]) <= 1e-5
    for index, state in their.states.items():
        assert relative(our.states[index], state) <= 1e-5
