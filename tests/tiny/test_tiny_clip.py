"""The tiny CLIP loads with open_clip as released ones do, is small, and its score tells images and prompts apart."""

from __future__ import annotations

import json

import open_clip
import torch
from PIL import Image

from miles_wan.tiny import TinyPaths


def test_the_score_tells_images_and_prompts_apart(tiny_paths: TinyPaths) -> None:
    name = f"local-dir:{tiny_paths.clip}"
    model, preprocess = open_clip.create_model_from_pretrained(name)
    records = [json.loads(line) for line in tiny_paths.eval_jsonl.read_text().splitlines()]
    images = [Image.open(tiny_paths.eval_jsonl.parent / record["metadata"]["image_path"]) for record in records]
    tokens = open_clip.get_tokenizer(name)([record["input"] for record in records])
    with torch.no_grad():
        frames = model.encode_image(torch.stack([preprocess(image) for image in images]), normalize=True)
        table = model.encode_text(tokens, normalize=True) @ frames.T  # [prompts, images]
    assert table.std(dim=1).min() > 0.005
    assert table.std(dim=0).min() > 0.005


def test_it_is_below_one_megabyte(tiny_paths: TinyPaths) -> None:
    assert sum(file.stat().st_size for file in tiny_paths.clip.iterdir()) < 1e6
