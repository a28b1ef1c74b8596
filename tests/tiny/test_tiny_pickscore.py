"""The tiny PickScore loads as the real one does, and its score tells images and prompts apart."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

from miles_wan.tiny import TinyPaths
from miles_wan.tiny.dataset import all_scenes


@pytest.fixture(scope="module")
def clip(tiny_paths: TinyPaths) -> tuple[CLIPModel, CLIPProcessor]:
    return CLIPModel.from_pretrained(tiny_paths.reward), CLIPProcessor.from_pretrained(tiny_paths.reward)


def scores(clip: tuple[CLIPModel, CLIPProcessor], prompts: list[str], images: list[Image.Image]) -> torch.Tensor:
    """PickScore / 26 of every pair, [prompts, images], by CLIP's own forward."""
    model, processor = clip
    inputs = processor(text=prompts, images=images, return_tensors="pt", padding=True, truncation=True, max_length=77)
    with torch.no_grad():
        return model(**inputs).logits_per_text / 26


def test_the_score_tells_images_and_prompts_apart(clip: tuple[CLIPModel, CLIPProcessor], tiny_paths: TinyPaths) -> None:
    records = [json.loads(line) for line in tiny_paths.eval_jsonl.read_text().splitlines()]
    images = [Image.open(tiny_paths.eval_jsonl.parent / record["metadata"]["image_path"]) for record in records]
    table = scores(clip, [record["input"] for record in records], images)
    assert table.std(dim=1).min() > 0.005
    assert table.std(dim=0).min() > 0.005


def test_the_score_tells_noise_images_apart(clip: tuple[CLIPModel, CLIPProcessor]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
    table = scores(clip, [all_scenes()[0].caption], [Image.fromarray(frame) for frame in noise])
    assert table.std() > 0.005


def test_the_temperature_is_that_of_pickscore(clip: tuple[CLIPModel, CLIPProcessor]) -> None:
    assert clip[0].logit_scale.exp().item() == pytest.approx(100.0, rel=1e-5)


def test_caption_words_are_whole_and_any_text_comes_back(clip: tuple[CLIPModel, CLIPProcessor]) -> None:
    tokenizer = clip[1].tokenizer
    for scene in all_scenes():
        ids = tokenizer(scene.caption).input_ids
        assert len(ids) == len(scene.caption.split()) + 2
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    text = "zebras, ünïcode & 海 …"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True).replace(" ", "") == text.replace(
        " ", ""
    )


def test_long_text_is_cut_at_77_tokens(clip: tuple[CLIPModel, CLIPProcessor]) -> None:
    tokenizer = clip[1].tokenizer
    assert tokenizer.model_max_length == 77
    ids = tokenizer("red " * 200, truncation=True).input_ids
    assert len(ids) == 77
    assert ids[-1] == tokenizer.eos_token_id
