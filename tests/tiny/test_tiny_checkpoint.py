"""The tiny checkpoint has the released layout, is the checkpoint the reference numbers were recorded with, and
diffusers' own pipelines run it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer, UMT5EncoderModel

from miles_wan.tiny import TinyPaths
from miles_wan.tiny.checkpoint import make_tokenizer
from miles_wan.tiny.dataset import all_scenes

GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_transformer_is_the_one_the_reference_numbers_were_recorded_with(tiny_paths: TinyPaths) -> None:
    folder = tiny_paths.model / "transformer"
    ours = load_file(folder / "diffusion_pytorch_model.safetensors")
    golden = load_file(GOLDEN / "tiny_ti2v_transformer.safetensors")
    assert set(ours) == set(golden)
    assert all(torch.equal(ours[name], golden[name]) for name in golden)
    config, golden_config = (
        json.loads(path.read_text()) for path in (folder / "config.json", GOLDEN / "tiny_ti2v_transformer_config.json")
    )
    assert {**config, "_diffusers_version": ""} == {**golden_config, "_diffusers_version": ""}


def test_vae_and_text_encoder_are_those_of_the_recorded_rollout(tiny_paths: TinyPaths) -> None:
    """The recorded run began from this image and the empty negative prompt."""
    golden = load_file(GOLDEN / "rollout_ti2v.safetensors")
    vae = AutoencoderKLWan.from_pretrained(tiny_paths.model / "vae")
    tokenizer = AutoTokenizer.from_pretrained(tiny_paths.model / "tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(tiny_paths.model / "text_encoder")
    pixels = golden["image_pixels"].float().permute(2, 0, 1)[None, :, None] / 127.5 - 1
    with torch.no_grad():
        latent = vae.encode(pixels).latent_dist.mode()[0]
        empty = encoder(**tokenizer("", return_tensors="pt")).last_hidden_state[0]
    torch.testing.assert_close(latent, golden["trajectory.latents"][0][:, :1], atol=1e-6, rtol=0)
    torch.testing.assert_close(empty, golden["negative_prompt_embeds.valid"], atol=1e-6, rtol=0)


def test_the_model_index_says_what_the_released_one_says(tiny_paths: TinyPaths) -> None:
    index = json.loads((tiny_paths.model / "model_index.json").read_text())
    assert index.pop("_diffusers_version")
    assert index == {
        "_class_name": "WanPipeline",
        "boundary_ratio": None,
        "expand_timesteps": True,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }


def test_the_scheduler_is_flow_matching_with_shift_5(tiny_paths: TinyPaths) -> None:
    config = UniPCMultistepScheduler.from_pretrained(tiny_paths.model / "scheduler").config
    assert (config.prediction_type, config.use_flow_sigmas, config.flow_shift) == ("flow_prediction", True, 5.0)


@pytest.mark.parametrize(("frames", "latent_frames"), [(1, 1), (5, 2), (9, 3)])
def test_the_vae_compresses_4x16x16_into_48_channels(tiny_paths: TinyPaths, frames: int, latent_frames: int) -> None:
    vae = AutoencoderKLWan.from_pretrained(tiny_paths.model / "vae")
    assert (vae.config.scale_factor_temporal, vae.config.scale_factor_spatial) == (4, 16)
    with torch.no_grad():
        latent = vae.encode(torch.zeros(1, 3, frames, 32, 64)).latent_dist.mode()
        video = vae.decode(latent).sample
    assert latent.shape == (1, 48, latent_frames, 2, 4)
    assert video.shape == (1, 3, frames, 32, 64)


def test_every_caption_has_its_own_tokens_and_none_is_unknown(tiny_paths: TinyPaths) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_paths.model / "tokenizer")
    captions = [scene.caption for scene in all_scenes()]
    ids = [tuple(tokenizer(caption).input_ids) for caption in captions]
    assert len(set(ids)) == len(captions)
    assert all(tokenizer.unk_token_id not in row for row in ids)
    # One token a word, and the end.
    assert all(len(row) == len(caption.split()) + 1 for row, caption in zip(ids, captions, strict=True))
    assert {row[-1] for row in ids} == {tokenizer.eos_token_id}


def test_text_outside_the_captions_is_spelled(tiny_paths: TinyPaths) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_paths.model / "tokenizer")
    assert tokenizer.unk_token_id not in tokenizer("zebra").input_ids
    assert tokenizer("").input_ids == [tokenizer.eos_token_id]
    assert max(tokenizer("über 3 %").input_ids) < 256


def test_different_captions_have_different_embeddings(tiny_paths: TinyPaths) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_paths.model / "tokenizer")
    encoder = UMT5EncoderModel.from_pretrained(tiny_paths.model / "text_encoder")
    captions = [scene.caption for scene in all_scenes()[:2]]
    with torch.no_grad():
        first, second = encoder(**tokenizer(captions, return_tensors="pt")).last_hidden_state
    assert (first - second).abs().max() > 0.1


def test_too_many_words_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        make_tokenizer([f"word{number}" for number in range(256)])


SHORT = {
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "output_type": "np",
}


def test_diffusers_makes_a_video_from_text(tiny_paths: TinyPaths) -> None:
    pipeline = WanPipeline.from_pretrained(tiny_paths.model, torch_dtype=torch.float32)
    one, other = (
        pipeline(prompt=prompt, generator=torch.Generator().manual_seed(0), **SHORT).frames[0]
        for prompt in ("a red circle moves right on a blue background", "a white square moves up on a black background")
    )
    assert one.shape == (5, 32, 32, 3)
    assert np.isfinite(one).all()
    assert np.abs(one - other).max() > 1e-3


def test_diffusers_makes_a_video_from_an_image(tiny_paths: TinyPaths) -> None:
    pipeline = WanImageToVideoPipeline.from_pretrained(tiny_paths.model, torch_dtype=torch.float32)
    record = json.loads(tiny_paths.train_jsonl.read_text().splitlines()[0])
    image = Image.open(tiny_paths.train_jsonl.parent / record["metadata"]["image_path"])
    given, mirrored = (
        pipeline(image=image, prompt=record["input"], generator=torch.Generator().manual_seed(0), **SHORT).frames[0]
        for image in (image, image.transpose(Image.Transpose.ROTATE_90))
    )
    assert given.shape == (5, 32, 32, 3)
    assert np.isfinite(given).all()
    assert np.abs(given - mirrored).max() > 1e-3
