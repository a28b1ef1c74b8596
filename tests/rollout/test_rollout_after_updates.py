"""Five adapters, one after the other, each larger: the server and the local engine still make the same samples. With the
adapter beside the weights (the shared server) and folded into them (a server of its own)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run, settings_for
from cross_scoring import by_trainer, by_velocities, relative
from diffusers import WanTransformer3DModel
from rollout_replay import ALPHA, RANK, TARGETS, make_request, push, random_adapter, zeroed

from miles_wan.parity.parts import set_adapter
from miles_wan.records import PromptRecord
from miles_wan.rollout.local import LocalEngine
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.tiny import TinyPaths
from miles_wan.wan.family import load_family
from miles_wan.wan.lora import inject_lora
from miles_wan.wan.model import WanModel, load_model

pytestmark = pytest.mark.e2e

PUSHES = 5
LAWS = {"flow_sde": (0, 1, 2, 4), "cps": (0, 1, 2, 4), "ode": ()}


@pytest.fixture(scope="module", params=["dynamic", "merge"])
def server(
    request: pytest.FixtureRequest, tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory, run: Run
) -> Iterator[SGLangEngine]:
    if request.param == "dynamic":
        yield request.getfixturevalue("engine")
        return
    settings = settings_for(tiny_paths.model, tmp_path_factory.mktemp("merging"), lora_merge_mode="merge")
    merging = SGLangEngine(settings)
    merging.start()
    yield merging
    run(merging.close())


@pytest.fixture(scope="module")
def adapted(tiny_paths: TinyPaths) -> WanModel:
    """The trainer's model: its adapters are layers of their own."""
    model = load_model(load_family(tiny_paths.model), dtype="fp32")
    inject_lora(model["transformer"], rank=RANK, alpha=ALPHA, targets=TARGETS, seed=0)
    return model


@pytest.mark.parametrize("server", ["merge"], indirect=True)
def test_two_servers_make_the_same_videos(
    server: SGLangEngine, engine: SGLangEngine, record: PromptRecord, run: Any
) -> None:
    # Before the first push to this one; a zero adapter beside the weights of the other adds exact zeros.
    request = make_request(record, seeds=(7, 100), keep_final=True)
    first, second = (run(one.generate(request, [0, 1], return_conditioning=True)) for one in (server, engine))
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours.frames, theirs.frames)
        np.testing.assert_array_equal(ours.trajectory.latents, theirs.trajectory.latents)
        np.testing.assert_array_equal(ours.trajectory.log_probs, theirs.trajectory.log_probs)


def test_after_five_adapters_both_engines_make_the_same_samples(
    server: SGLangEngine,
    adapted: WanModel,
    transformer: WanTransformer3DModel,
    tiny_paths: TinyPaths,
    record: PromptRecord,
    run: Any,
) -> None:
    local = LocalEngine(load_family(tiny_paths.model), adapted, device=torch.device("cpu"))

    def agree(**changes: Any) -> None:
        request = make_request(record, seeds=(7, 100), keep_final=True, **changes)
        theirs, ours = run(server.generate_debug(request, [0, 1])), local.generate_debug(request, [0, 1])
        for our, their in zip(ours, theirs, strict=True):
            served, made = their.output.trajectory, our.output.trajectory
            for index, state in their.states.items():
                assert relative(our.states[index], state) <= 1e-5
            np.testing.assert_allclose(made.log_probs, served.log_probs, rtol=0, atol=1e-5)
            scored = by_trainer(adapted, served, theirs[0].output.conditioning, request.sampling)
            np.testing.assert_allclose(served.log_probs, scored, rtol=0, atol=1e-5)
            scored = by_velocities(adapted, their.debug.model_outputs, made, request.sampling)
            np.testing.assert_allclose(made.log_probs, scored, rtol=0, atol=1e-5)

    probe = make_request(record)
    base = previous = run(server.generate(probe, [0]))[0].trajectory.latents
    tensors = random_adapter(transformer, 0)
    try:
        for number in range(1, PUSHES + 1):
            tensors = random_adapter(transformer, number, scale=0.025 * number)
            set_adapter(adapted, {"transformer": tensors})
            assert run(push(server, tensors, version=number)).unmapped == 0
            latents = run(server.generate(probe, [0]))[0].trajectory.latents
            assert relative(latents, previous) > 1e-4  # else agreement would say nothing
            previous = latents
            agree()
        for kind, steps in LAWS.items():
            for image in (True, False):
                for guidance in (1.0, 3.0):
                    agree(kind=kind, stochastic_steps=steps, image=image, guidance_scale=guidance, width=64)
    finally:
        run(push(server, zeroed(tensors)))
    np.testing.assert_array_equal(run(server.generate(probe, [0]))[0].trajectory.latents, base)
