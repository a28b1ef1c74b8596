"""What the local engine promises: trajectories the trainer can score, noise by the seed alone, refused requests."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_parts import local_engine, model_of, rescored
from PIL import Image

from miles_wan.errors import EngineError
from miles_wan.rollout.local import LocalEngine
from miles_wan.tiny import TinyPaths
from miles_wan.wan.facts import DEFAULT_NEGATIVE_PROMPT
from miles_wan.wan.lora import inject_lora
from miles_wan.wan.model import WanModel
from miles_wan.wan.text import MAX_TOKENS
from miles_wan.wan.video import image_pixels

STOCHASTIC = ("flow_sde", "dance_sde", "cps", "flow_grpo_wan")


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize("image", [True, False])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_trainer_finds_the_log_probs_of_the_trajectory(
    local: LocalEngine, model: WanModel, make_request: Any, kind: str, image: bool, guidance: float
) -> None:
    request = make_request(image=image, kind=kind, guidance_scale=guidance)
    output = local.generate(request, [0], return_conditioning=True)[0]
    assert output.trajectory is not None
    assert output.trajectory.has_condition is image
    np.testing.assert_array_equal(output.trajectory.log_probs, rescored(model, request, output))


def test_a_squared_error_is_the_log_prob_of_cps_if_asked(local: LocalEngine, make_request: Any) -> None:
    answer = local.generate_debug(make_request(kind="cps", cps_log_prob="squared_error"), [0])[0]
    assert answer.debug is not None
    for step in (0, 1, 3):
        residual = answer.debug.stds[step] * answer.debug.noises[step][:, 1:]
        assert answer.log_probs[step] == pytest.approx(-(residual**2).mean(), rel=1e-5)


def test_a_trajectory_says_what_it_is(local: LocalEngine, make_request: Any) -> None:
    request = make_request(keep_final=True, stochastic_steps=(3, 1))
    first, second = local.generate(request, [1, 0], return_conditioning=True)
    trajectory = first.trajectory
    assert (trajectory.steps, trajectory.seed, trajectory.policy_version) == ((1, 3), 8, 3)
    assert (first.seed, second.seed) == (8, 7)
    assert trajectory.latents.shape == (2, 2, 48, 2, 2, 2)
    assert trajectory.final_latent.shape == (48, 2, 2, 2)
    assert first.conditioning.prompt_embeds.shape == first.conditioning.negative_prompt_embeds.shape == (512, 32)
    assert second.conditioning is None
    given = np.broadcast_to(first.conditioning.condition_latent, (2, 2, 48, 1, 2, 2))
    np.testing.assert_array_equal(trajectory.latents[:, :, :, :1], given)
    assert first.frames.shape == (5, 32, 32, 3)
    assert first.frames.dtype == np.uint8


def test_all_noise_is_that_of_a_cpu_generator_with_the_seed(local: LocalEngine, make_request: Any) -> None:
    answer = local.generate_debug(make_request(image=False), [1])[0]
    generator = torch.Generator().manual_seed(8)
    start, *draws = (torch.randn(1, 48, 2, 2, 2, generator=generator)[0].numpy() for _ in range(4))
    np.testing.assert_array_equal(answer.states[0], start)
    for step, draw in zip((0, 1, 3), draws, strict=True):
        np.testing.assert_array_equal(answer.debug.noises[step], draw)
    assert not answer.debug.noises[[2, 4, 5]].any()
    assert [index for index, value in enumerate(answer.log_probs) if value] == [0, 1, 3]


def test_without_stochastic_steps_nothing_is_kept_unless_asked(local: LocalEngine, make_request: Any) -> None:
    request = make_request(stochastic_steps=())
    assert local.generate(request, [0])[0].trajectory is None
    kept = local.generate(replace(request, keep_final=True), [0])[0].trajectory
    assert kept.latents.shape == (0, 2, 48, 2, 2, 2)
    assert kept.steps == ()
    assert kept.final_latent.shape == (48, 2, 2, 2)


def test_explicit_sigmas_are_used_as_they_are(local: LocalEngine, make_request: Any) -> None:
    grid = (1.0, 0.8, 0.5, 0.0)
    request = make_request(sigmas=grid, num_inference_steps=3, stochastic_steps=(1,))
    answer = local.generate_debug(request, [0])[0]
    np.testing.assert_array_equal(answer.output.trajectory.sigmas, np.float32(grid))
    g = 0.7 * math.sqrt(0.8 / (1 - 0.8))
    assert answer.debug.stds[1] == pytest.approx(g * math.sqrt(0.8 - 0.5), rel=1e-6)


def test_a_seed_gives_the_same_video_in_any_order_of_calls(
    tiny_paths: TinyPaths, model: WanModel, local: LocalEngine, make_request: Any
) -> None:
    request, other = make_request(), make_request(image=False, guidance_scale=1.0)
    first = local.generate(request, [0])[0]
    local.generate(other, [1])
    again = local.generate(request, [0])[0]
    fresh = local_engine(tiny_paths, model)
    fresh.prepare([other.record, request.record], guidance_scale=3.0)
    for output in (again, fresh.generate(request, [0])[0]):
        np.testing.assert_array_equal(output.frames, first.frames)
        np.testing.assert_array_equal(output.trajectory.latents, first.trajectory.latents)
        np.testing.assert_array_equal(output.trajectory.log_probs, first.trajectory.log_probs)


def test_a_batch_makes_the_videos_of_its_samples(local: LocalEngine, make_request: Any) -> None:
    request = make_request(seeds=(7, 8, 9))
    together = local.generate(request, [2, 0, 1])
    for output, index in zip(together, (2, 0, 1), strict=True):
        alone = local.generate(request, [index])[0]
        latents = alone.trajectory.latents
        assert np.linalg.norm(output.trajectory.latents - latents) <= 1e-6 * np.linalg.norm(latents)
        np.testing.assert_allclose(output.trajectory.log_probs, alone.trajectory.log_probs, atol=1e-6)
        assert np.abs(output.frames.astype(int) - alone.frames).max() <= 1


def test_it_rolls_out_with_what_the_transformer_holds_now(tiny_paths: TinyPaths, make_request: Any) -> None:
    model = model_of(tiny_paths)
    transformer = model["transformer"]
    inject_lora(transformer, rank=4, alpha=8, targets=("to_q", "to_v"), seed=1)
    engine = local_engine(tiny_paths, model)
    request = make_request()
    before = engine.generate(request, [0])[0].trajectory.latents
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    after = engine.generate(request, [0])[0].trajectory.latents
    np.testing.assert_array_equal(before[0, 0], after[0, 0])
    assert np.abs(before - after).max() > 1e-3
    assert all(parameter.grad is None for parameter in transformer.parameters())
    transformer(  # what ran without gradients leaves nothing behind that stops one with
        hidden_states=torch.randn(1, 48, 2, 2, 2),
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=torch.randn(1, 512, 32),
        return_dict=False,
    )[0].sum().backward()


def test_bf16_states_stay_float32(tiny_paths: TinyPaths, make_request: Any) -> None:
    engine = local_engine(tiny_paths, model_of(tiny_paths, dtype="bf16"))
    trajectory = engine.generate(make_request(), [0])[0].trajectory
    start, after = torch.from_numpy(trajectory.latents[0])
    noise = torch.randn(1, *start.shape, generator=torch.Generator().manual_seed(trajectory.seed))[0]
    assert torch.equal(start[:, 1:], noise[:, 1:])
    assert bool((after.bfloat16().float() != after).any())


def test_the_default_negative_prompt_is_the_server_engines(local: LocalEngine, make_request: Any) -> None:
    from sglang.multimodal_gen.configs.sample.wan import Wan2_2_TI2V_5B_SamplingParam

    assert Wan2_2_TI2V_5B_SamplingParam.negative_prompt == DEFAULT_NEGATIVE_PROMPT
    request = make_request()
    named = replace(request, record=replace(request.record, negative_prompt=f" {DEFAULT_NEGATIVE_PROMPT} "))
    empty = replace(request, record=replace(request.record, negative_prompt=""))
    default, same, other = (
        local.generate(each, [0], return_conditioning=True)[0].conditioning.negative_prompt_embeds
        for each in (request, named, empty)
    )
    np.testing.assert_array_equal(default, same)
    assert np.abs(default - other).max() > 1e-3
    assert np.flatnonzero(np.abs(other).max(1)).tolist() == [0]  # the end token alone


def test_a_prompt_that_is_cut_is_told(local: LocalEngine, make_request: Any, caplog: pytest.LogCaptureFixture) -> None:
    request = make_request(guidance_scale=1.0)
    long = replace(request, record=replace(request.record, prompt="red ball " * 300))
    embeds = local.generate(long, [0], return_conditioning=True)[0].conditioning.prompt_embeds
    assert embeds.shape == (MAX_TOKENS, 32)
    (message,) = caplog.messages
    assert re.search(r"a prompt of \d{4} tokens is cut to 512: red ball", message)


def test_an_image_is_upright_covers_the_video_and_is_cropped_in_the_middle(tmp_path: Path) -> None:
    wide = np.zeros((32, 96, 3), dtype=np.uint8)
    wide[:, 32:64] = (255, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    Image.fromarray(np.rot90(wide)).save(tmp_path / "turned.png", exif=exif)
    whole = image_pixels(str(tmp_path / "turned.png"), 96, 32)
    torch.testing.assert_close(whole, torch.from_numpy(wide).permute(2, 0, 1) / 127.5 - 1)
    middle = image_pixels(str(tmp_path / "turned.png"), 32, 32)
    torch.testing.assert_close(middle, whole[:, :, 32:64])
    larger = image_pixels(str(tmp_path / "turned.png"), 64, 64)
    assert larger.shape == (3, 64, 64)
    torch.testing.assert_close(larger[:, 32, 32], torch.tensor([1.0, -1.0, -1.0]))


def test_a_replaced_image_is_encoded_anew(local: LocalEngine, make_request: Any, tmp_path: Path) -> None:
    request = make_request()
    path = tmp_path / "frame.png"
    request = replace(request, record=replace(request.record, image_path=str(path)))

    def latent(colour: tuple[int, int, int]) -> Any:
        Image.new("RGB", (32, 32), colour).save(path)
        return local.generate(request, [0], return_conditioning=True)[0].conditioning.condition_latent

    red, green = latent((255, 0, 0)), latent((0, 200, 10))
    assert np.abs(red - green).max() > 1e-2


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    r"100x64.*multiples of 32": lambda folder: {"width": 100, "height": 64},
    "6 frames": lambda folder: {"num_frames": 6},
    "1 frame: with a first image": lambda folder: {"num_frames": 1},
    "unknown transition 'sde'": lambda folder: {"kind": "sde"},
    r"\[0, 6\].*lie in \[0, 5\]": lambda folder: {"stochastic_steps": (0, 6)},
    "kind ode: it has no density": lambda folder: {"kind": "ode"},
    "step 5 with cps": lambda folder: {"kind": "cps", "stochastic_steps": (5,)},
    "noise level 0 with flow_sde": lambda folder: {"noise_level": 0.0},
    "3 sigmas for 6 steps; give 7": lambda folder: {"sigmas": (1.0, 0.5, 0.0)},
    "append the terminal 0": lambda folder: {"sigmas": (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)},
    "unknown cps_log_prob 'sum'": lambda folder: {"cps_log_prob": "sum"},
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(
    local: LocalEngine, make_request: Any, tmp_path: Path, message: str
) -> None:
    with pytest.raises(EngineError, match=rf"train\.jsonl:1: .*{message}"):
        local.generate(make_request(**CHANGES[message](tmp_path)), [0])


def test_a_sample_that_was_not_asked_for_is_refused(local: LocalEngine, make_request: Any) -> None:
    for indices in ([2], [-1], []):
        with pytest.raises(EngineError, match="a request with 2 seeds"):
            local.generate(make_request(), indices)


@pytest.mark.parametrize("content", [None, b"no image", b""])
def test_an_image_that_cannot_be_read_is_named(
    local: LocalEngine, make_request: Any, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "lost.png"
    if content is not None:
        path.write_bytes(content)
    request = make_request()
    request = replace(request, record=replace(request.record, image_path=str(path)))
    with pytest.raises(EngineError, match=r"train\.jsonl:1: image .*lost\.png cannot be read"):
        local.generate(request, [0])


def test_values_that_are_not_finite_are_an_error(tiny_paths: TinyPaths, make_request: Any) -> None:
    model = model_of(tiny_paths)
    model["transformer"].proj_out.bias.data[0] = math.nan
    engine = local_engine(tiny_paths, model)
    with pytest.raises(EngineError, match=r"train\.jsonl:1: .*not finite"):
        engine.generate(make_request(), [0])
