"""The local engine against diffusers' own pipelines on the same checkpoint: an independent sampler of the same equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from local_parts import deterministic
from PIL import Image
from transformers import AutoTokenizer, UMT5EncoderModel

from miles_wan.flow import shifted_sigmas
from miles_wan.rollout.local import LocalEngine
from miles_wan.tiny import TinyPaths


@pytest.fixture(scope="module")
def parts(tiny_paths: TinyPaths, transformer: WanTransformer3DModel) -> dict[str, Any]:
    """The components of a diffusers pipeline with the scheduler whose grid ours is."""
    return {
        "tokenizer": AutoTokenizer.from_pretrained(tiny_paths.model / "tokenizer"),
        "text_encoder": UMT5EncoderModel.from_pretrained(tiny_paths.model / "text_encoder"),
        "vae": AutoencoderKLWan.from_pretrained(tiny_paths.model / "vae", torch_dtype=torch.float32),
        "transformer": transformer,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "expand_timesteps": True,
    }


def pipeline_latent(pipeline: Any, request: Any, seed: int, **inputs: Any) -> Any:
    sampling = request.sampling
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=request.record.prompt,
        negative_prompt=request.record.negative_prompt,
        height=sampling.height,
        width=sampling.width,
        num_frames=sampling.num_frames,
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale,
        generator=torch.Generator().manual_seed(seed),
        max_sequence_length=512,
        output_type="latent",
        **inputs,
    ).frames[0]


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize("steps", [2, 6, 10, 50])
def test_the_closed_form_grid_is_the_schedulers(steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    torch.testing.assert_close(shifted_sigmas(steps, shift), scheduler.sigmas, rtol=0, atol=6e-8)  # one ulp below 1


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_video_from_text_is_diffusers(
    local: LocalEngine, parts: dict[str, Any], make_request: Any, guidance: float, per_token: bool
) -> None:
    """Bit for bit with one timestep per sample, which both engines use without an image. Of this checkpoint diffusers makes
    one equal timestep per token: its embedding is then a product of another shape, which rounds otherwise."""
    request = deterministic(make_request, parts["scheduler"], image=False, guidance_scale=guidance)
    expected = pipeline_latent(WanPipeline(**{**parts, "expand_timesteps": per_token}), request, 7).numpy()
    trajectory = local.generate(request, [0])[0].trajectory
    assert trajectory is not None
    assert trajectory.latents.shape == (0, 2, *expected.shape)
    gap = np.abs(trajectory.final_latent - expected).max() / np.abs(expected).max()
    assert gap <= (2e-6 if per_token else 0)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_video_from_an_image_is_diffusers(
    local: LocalEngine, parts: dict[str, Any], make_request: Any, guidance: float
) -> None:
    request = deterministic(make_request, parts["scheduler"], guidance_scale=guidance)
    pipeline = WanImageToVideoPipeline(**parts, image_processor=None, image_encoder=None)
    with Image.open(request.record.image_path) as image:  # square, as the video: nothing is cropped
        assert image.width == image.height
        expected = pipeline_latent(pipeline, request, 7, image=image.convert("RGB"))
    trajectory = local.generate(request, [0])[0].trajectory
    assert trajectory is not None
    np.testing.assert_array_equal(trajectory.final_latent, expected.numpy())


def test_frames_are_diffusers(local: LocalEngine, parts: dict[str, Any], make_request: Any) -> None:
    request = deterministic(make_request, parts["scheduler"], image=False)
    output = local.generate(request, [0])[0]
    assert output.trajectory is not None
    pipeline = WanPipeline(**parts)
    with torch.no_grad():
        video = parts["vae"].decode(torch.from_numpy(output.trajectory.final_latent)[None]).sample
    frames = pipeline.video_processor.postprocess_video(video, output_type="np")[0]
    assert np.abs(output.frames - frames * 255).max() <= 0.5001
