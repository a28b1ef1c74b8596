"""The real server on the tiny checkpoint: what it serves is what the trainer computes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import RUN_ID
from diffusers import AutoencoderKLWan
from PIL import Image
from rollout_replay import make_request, replayed_log_probs, step_law, velocity

from miles_wan.errors import EngineError
from miles_wan.records import PromptRecord, RolloutOutput
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.rollout.sglang.plugin import HOOKS
from miles_wan.tiny import TinyPaths

pytestmark = pytest.mark.e2e


def test_every_hook_is_active(engine: SGLangEngine, run: Any) -> None:
    identity = run(engine.identity())
    assert identity["hooks"] == {hook.name: "active" for hook in HOOKS}
    assert identity["pipeline_config"] == "Wan2_2_TI2V_5B_Config"


def test_idle_workers_leave_the_processor_alone(engine: SGLangEngine, run: Any) -> None:
    family = psutil.Process(run(engine.identity())["pid"]).children(recursive=True)
    workers = [process for process in family if "scheduler" in process.name()]
    assert len(workers) == 2
    before = [sum(worker.cpu_times()[:2]) for worker in workers]
    time.sleep(3)
    used = [sum(worker.cpu_times()[:2]) - start for worker, start in zip(workers, before, strict=True)]
    assert max(used) < 0.3  # of 3 s


@pytest.mark.parametrize("kind", ["flow_sde", "cps"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("image", [True, False])
def test_the_served_log_prob_is_the_trainers(
    engine: SGLangEngine, transformer: Any, record: PromptRecord, run: Any, image: bool, guidance: float, kind: str
) -> None:
    request = make_request(record, image=image, guidance_scale=guidance, kind=kind, stochastic_steps=(1, 2, 4))
    output = run(engine.generate(request, [0], return_conditioning=True))[0]
    assert output.trajectory.has_condition is image
    replayed = replayed_log_probs(transformer, output.trajectory, output.conditioning, guidance=guidance, kind=kind)
    np.testing.assert_allclose(output.trajectory.log_probs, replayed.numpy(), atol=1e-5)


def test_a_conditioned_step_scored_over_all_frames_is_another_number(
    engine: SGLangEngine, transformer: Any, record: PromptRecord, run: Any
) -> None:
    output = run(engine.generate(make_request(record), [0], return_conditioning=True))[0]
    everything = type(output.trajectory)(**{**vars(output.trajectory), "has_condition": False})
    replayed = replayed_log_probs(transformer, everything, output.conditioning, guidance=3.0)
    assert np.abs(replayed.numpy() - output.trajectory.log_probs).min() > 0.01


def test_model_outputs_agree_with_diffusers_in_every_step(
    engine: SGLangEngine, transformer: Any, record: PromptRecord, run: Any
) -> None:
    answer = run(engine.generate_debug(make_request(record, stochastic_steps=(0, 2, 4)), [0]))[0]
    for step in (0, 2, 4):
        state = torch.from_numpy(answer.states[step])
        v = velocity(transformer, state, float(answer.sigmas[step]), answer.output.conditioning, guidance=3.0)
        assert float((v - torch.from_numpy(answer.debug.model_outputs[step])).abs().max()) < 2e-5


@pytest.mark.parametrize(("width", "height", "frames"), [(64, 32, 5), (32, 64, 9), (96, 64, 1)])
def test_the_requested_size_is_honoured(
    engine: SGLangEngine, record: PromptRecord, run: Any, width: int, height: int, frames: int
) -> None:
    image = frames > 1
    request = make_request(record, image=image, width=width, height=height, num_frames=frames)
    output = run(engine.generate(request, [0]))[0]
    assert output.frames.shape == (frames, height, width, 3)
    assert output.frames.dtype == np.uint8


@pytest.mark.parametrize("steps", [(1, 2), ()])
def test_frames_are_the_decoded_final_latent(
    engine: SGLangEngine, tiny_paths: TinyPaths, record: PromptRecord, run: Any, steps: tuple[int, ...]
) -> None:
    request = make_request(record, stochastic_steps=steps, keep_final=True)
    [output] = run(engine.generate(request, [0], return_conditioning=True))
    assert output.trajectory.steps == steps
    assert output.trajectory.latents.shape == (len(steps), 2, 48, 2, 2, 2)
    assert output.trajectory.log_probs.shape == (len(steps),)
    np.testing.assert_array_equal(output.trajectory.final_latent[:, :1], output.conditioning.condition_latent)
    vae = AutoencoderKLWan.from_pretrained(tiny_paths.model / "vae", torch_dtype=torch.float32)
    latent = torch.from_numpy(output.trajectory.final_latent.copy())[None]
    shape = (1, -1, 1, 1, 1)
    latent = latent * torch.tensor(vae.config.latents_std).view(shape) + torch.tensor(vae.config.latents_mean).view(
        shape
    )
    with torch.no_grad():
        video = vae.decode(latent).sample[0].clamp(-1, 1) / 2 + 0.5
    expected = (video * 255).permute(1, 2, 3, 0).numpy()
    assert np.abs(output.frames - expected).max() <= 0.51


def test_the_condition_latent_is_the_encoded_image(
    engine: SGLangEngine, tiny_paths: TinyPaths, record: PromptRecord, run: Any
) -> None:
    output = run(engine.generate(make_request(record), [0], return_conditioning=True))[0]
    vae = AutoencoderKLWan.from_pretrained(tiny_paths.model / "vae", torch_dtype=torch.float32)
    image = Image.open(record.image_path or "").convert("RGB").resize((32, 32), Image.Resampling.LANCZOS)
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    with torch.no_grad():
        latent = vae.encode(pixels).latent_dist.mode()
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    expected = ((latent - mean) / std)[0].numpy()
    assert output.conditioning.condition_latent.shape == expected.shape == (48, 1, 2, 2)
    np.testing.assert_allclose(output.conditioning.condition_latent, expected, atol=1e-4)
    np.testing.assert_array_equal(output.trajectory.latents[0, 0][:, :1], output.conditioning.condition_latent)


def test_a_seed_gives_the_same_video_whoever_else_asks(engine: SGLangEngine, record: PromptRecord, run: Any) -> None:
    request = make_request(record, seeds=(11, 12, 13, 11))

    async def together() -> list[Any]:
        return await asyncio.gather(*(engine.generate(request, [index]) for index in range(4)))

    alone = run(engine.generate(request, [1]))[0]
    first, second, third, again = (output for [output] in run(together()))
    np.testing.assert_array_equal(first.trajectory.latents, again.trajectory.latents)
    np.testing.assert_array_equal(second.trajectory.latents, alone.trajectory.latents)
    np.testing.assert_array_equal(second.frames, alone.frames)
    assert np.abs(first.trajectory.latents - third.trajectory.latents).max() > 0.1
    assert [first.seed, second.seed, third.seed] == [11, 12, 13]


@pytest.mark.parametrize("image", [True, False])
def test_several_samples_of_a_request_are_those_of_single_requests(
    engine: SGLangEngine, record: PromptRecord, run: Any, image: bool
) -> None:
    request = make_request(record, image=image, seeds=(21, 5, 2**62, 9), keep_final=True, stochastic_steps=(0, 1, 3))
    together = run(engine.generate(request, [0, 1, 2, 3], return_conditioning=True))
    some = run(engine.generate(request, [3, 1]))
    assert [output.seed for output in together] == [21, 5, 2**62, 9]
    assert [output.conditioning is None for output in together] == [False, True, True, True]
    for index in range(4):
        [alone] = run(engine.generate(request, [index], return_conditioning=index == 0))
        assert_same(together[index], alone)
    assert_same(some[0], together[3])
    assert_same(some[1], together[1])


def assert_same(one: RolloutOutput, other: RolloutOutput) -> None:
    np.testing.assert_array_equal(one.frames, other.frames)
    for a, b in ((one.trajectory, other.trajectory), (one.conditioning, other.conditioning)):
        if a is not None and b is not None:
            for name, value in vars(a).items():
                np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)


def test_a_grid_that_the_request_names_is_used_and_not_kept(
    engine: SGLangEngine, transformer: Any, record: PromptRecord, run: Any
) -> None:
    sigmas = (1.0, 0.95, 0.8, 0.6, 0.3, 0.1, 0.0)
    request = make_request(record, seeds=(7, 8), sigmas=sigmas, stochastic_steps=(1, 3))
    outputs = run(engine.generate(request, [0, 1], return_conditioning=True))
    for output in outputs:
        np.testing.assert_array_equal(output.trajectory.sigmas, np.array(sigmas, np.float32))
        replayed = replayed_log_probs(transformer, output.trajectory, outputs[0].conditioning, guidance=3.0)
        np.testing.assert_allclose(output.trajectory.log_probs, replayed.numpy(), atol=1e-5)
    run(engine.generate(make_request(record), [0]))  # which refuses a grid that is not the server's


@pytest.mark.parametrize("image", [True, False])
def test_squared_error_is_served_as_the_trainer_has_it(
    engine: SGLangEngine, transformer: Any, record: PromptRecord, run: Any, image: bool
) -> None:
    request = make_request(record, image=image, kind="cps", cps_log_prob="squared_error", stochastic_steps=(1, 3))
    [output] = run(engine.generate(request, [0], return_conditioning=True))
    sigmas, given = output.trajectory.sigmas, 1 if image else 0
    for (state, after), step, served in zip(
        torch.from_numpy(output.trajectory.latents), (1, 3), output.trajectory.log_probs, strict=True
    ):
        v = velocity(transformer, state, float(sigmas[step]), output.conditioning, guidance=3.0)
        mean, _ = step_law("cps", state, v, torch.from_numpy(sigmas), step, eta=0.7)
        assert served == pytest.approx(-float((after - mean)[:, given:].square().mean()), rel=1e-4)


def test_shared_memory_of_requests_bears_the_name_of_the_run(
    engine: SGLangEngine, record: PromptRecord, run: Any
) -> None:
    run(engine.generate(make_request(record), [0]))
    assert Path(f"/dev/shm/sglang-{RUN_ID}").is_dir()


@pytest.mark.parametrize("image", [True, False])
def test_noise_is_that_of_a_cpu_generator_with_the_seed(
    engine: SGLangEngine, record: PromptRecord, run: Any, image: bool
) -> None:
    answer = run(engine.generate_debug(make_request(record, image=image, seeds=(5,)), [0]))[0]
    generator = torch.Generator().manual_seed(5)
    shape = (1, 48, 2, 2, 2)
    start, first, second = (torch.randn(shape, generator=generator)[0].numpy() for _ in range(3))
    given = 1 if image else 0
    np.testing.assert_array_equal(answer.states[0][:, given:], start[:, given:])
    np.testing.assert_array_equal(answer.debug.noises[0], first)
    np.testing.assert_array_equal(answer.debug.noises[1], second)


def test_a_validation_video_has_no_noise_and_no_trajectory(
    engine: SGLangEngine, record: PromptRecord, run: Any
) -> None:
    request = make_request(record, stochastic_steps=())
    output = run(engine.generate(request, [0]))[0]
    assert output.trajectory is None
    answer = run(engine.generate_debug(request, [0]))[0]
    assert not answer.debug.noises.any()
    np.testing.assert_array_equal(answer.output.frames, output.frames)


def test_an_explicit_negative_prompt_is_used(engine: SGLangEngine, record: PromptRecord, run: Any) -> None:
    named = type(record)(**{**vars(record), "negative_prompt": "a red bird"})
    default = run(engine.generate(make_request(record), [0], return_conditioning=True))[0].conditioning
    other = run(engine.generate(make_request(named), [0], return_conditioning=True))[0].conditioning
    np.testing.assert_array_equal(default.prompt_embeds, other.prompt_embeds)
    assert np.abs(default.negative_prompt_embeds - other.negative_prompt_embeds).max() > 1e-3


def test_a_missing_image_is_an_error_that_names_the_record(
    engine: SGLangEngine, record: PromptRecord, run: Any, tmp_path: Path
) -> None:
    lost = type(record)(**{**vars(record), "image_path": str(tmp_path / "lost.png")})
    with pytest.raises(EngineError, match=r"train\.jsonl:1.*HTTP 500.*lost\.png"):
        run(engine.generate(make_request(lost), [0]))
    run(engine.health())


def test_a_size_that_the_model_cannot_make_is_an_error(engine: SGLangEngine, record: PromptRecord, run: Any) -> None:
    with pytest.raises(EngineError, match="100x64 is not a multiple of 32x32"):
        run(engine.generate(make_request(record, width=100, height=64), [0]))


def test_another_flow_shift_than_the_servers_is_an_error(engine: SGLangEngine, record: PromptRecord, run: Any) -> None:
    with pytest.raises(EngineError, match="6 steps with flow_shift 3 give"):
        run(engine.generate(make_request(record, flow_shift=3.0), [0]))


def test_one_conditioned_frame_leaves_nothing_to_sample(engine: SGLangEngine, record: PromptRecord, run: Any) -> None:
    with pytest.raises(EngineError, match="nothing to sample"):
        run(engine.generate(make_request(record, num_frames=1), [0]))
