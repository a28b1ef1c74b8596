"""Clips of moving shapes with their captions, small and made in the test: the toy data of supervised training. To make the
ones of docs/supervised.md: ``python tests/toy_clips.py FOLDER``."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
from clip_files import write_clip
from PIL import Image

from miles_wan.tiny.dataset import DIRECTIONS, IMAGE_SIZE, Scene, all_scenes, draw_frame


def scene_frames(scene: Scene, *, frames: int, rng: random.Random) -> np.ndarray:
    """[T, 64, 64, 3]: the shape of the scene crosses the picture."""
    dx, dy = DIRECTIONS[scene.direction]
    radius, way = rng.uniform(10, 13), IMAGE_SIZE / 2
    start = (IMAGE_SIZE / 2 - dx * way / 2, IMAGE_SIZE / 2 - dy * way / 2)
    pictures: list[Image.Image] = []
    for number in range(frames):
        done = way * number / max(1, frames - 1)
        centre = (start[0] + dx * done, start[1] + dy * done)
        pictures.append(draw_frame(scene, centre=centre, radius=radius))
    return np.stack([np.asarray(picture) for picture in pictures])


def write_toy_clips(
    folder: Path, *, train: int, evaluation: int, frames: int = 9, seed: int = 0, every_second_wide: bool = False
) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``validation.jsonl`` with mp4 files of different scenes; their paths."""
    rng = random.Random(seed)
    scenes = rng.sample(all_scenes(), train + evaluation)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for split, chosen in (("train", scenes[:train]), ("validation", scenes[train:])):
        lines = []
        for number, scene in enumerate(chosen):
            name = f"{split}_{number:03d}.mp4"
            pictures = scene_frames(scene, frames=frames, rng=rng)
            write_clip(folder / name, pictures[:, 16:48] if every_second_wide and number % 2 else pictures, fps=8)
            lines.append({"video_path": name, "input": scene.caption})
        path = folder / f"{split}.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        paths.append(path)
    return paths[0], paths[1]


if __name__ == "__main__":
    write_toy_clips(Path(sys.argv[1]), train=64, evaluation=16)
