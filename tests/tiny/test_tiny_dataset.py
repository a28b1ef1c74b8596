"""The toy data set is in the documented format, and validation is unseen in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from miles_wan.tiny import TinyPaths
from miles_wan.tiny.dataset import COLOURS, IMAGE_SIZE


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def pairs(path: Path) -> set[tuple[str, bytes]]:
    records = lines(path)
    return {(record["input"], (path.parent / record["metadata"]["image_path"]).read_bytes()) for record in records}


def test_the_64_validation_pairs_are_distinct_and_absent_from_training(tiny_paths: TinyPaths) -> None:
    train, validation = pairs(tiny_paths.train_jsonl), pairs(tiny_paths.eval_jsonl)
    assert len(validation) == len(lines(tiny_paths.eval_jsonl)) == 64
    assert len(train) == len(lines(tiny_paths.train_jsonl)) == 64
    assert not train & validation
    # Neither half of a pair is shared, so nothing can be learned by heart.
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in validation}
    assert not {image for _, image in train} & {image for _, image in validation}


def test_image_paths_are_relative_and_every_image_is_used(tiny_paths: TinyPaths) -> None:
    folder = tiny_paths.train_jsonl.parent
    records = lines(tiny_paths.train_jsonl) + lines(tiny_paths.eval_jsonl)
    used = {record["metadata"]["image_path"] for record in records}
    assert used == {f"images/{path.name}" for path in (folder / "images").iterdir()}


def test_a_first_frame_shows_what_its_caption_says(tiny_paths: TinyPaths) -> None:
    for record in lines(tiny_paths.eval_jsonl):
        metadata = record["metadata"]
        with Image.open(tiny_paths.eval_jsonl.parent / metadata["image_path"]) as image:
            pixels = np.asarray(image)
        assert pixels.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
        assert tuple(pixels[0, 0]) == COLOURS[metadata["background"]]
        shape = (pixels == COLOURS[metadata["colour"]]).all(-1)
        assert 0.03 < shape.mean() < 0.2
        words = {metadata[key] for key in ("colour", "shape", "direction", "background")}
        assert words <= set(record["input"].split())


def test_a_shape_starts_away_from_where_it_moves(tiny_paths: TinyPaths) -> None:
    towards = {"right": (1, 1), "left": (1, -1), "down": (0, 1), "up": (0, -1)}
    for record in lines(tiny_paths.eval_jsonl):
        metadata = record["metadata"]
        with Image.open(tiny_paths.eval_jsonl.parent / metadata["image_path"]) as image:
            shape = (np.asarray(image) == COLOURS[metadata["colour"]]).all(-1)
        axis, sign = towards[metadata["direction"]]
        assert sign * (np.argwhere(shape).mean(0)[axis] - IMAGE_SIZE / 2) < 0
