"""A toy data set of moving coloured shapes. In: a folder, a seed, two sizes. Out: first frames (PNG), captions, train and
validation JSON lines in the project's data format, and how each scene goes on. It knows no model.

A scene is (colour, shape, direction, background); no scene is used twice, so validation is unseen in prompt and image.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from miles_wan.errors import InputError

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 50),
    "purple": (140, 60, 180),
    "orange": (245, 140, 30),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
# Unit steps in image coordinates (x to the right, y down).
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "direction": tuple(DIRECTIONS),
    "background": tuple(COLOURS),
}
IMAGE_SIZE = 64


@dataclass(frozen=True)
class Scene:
    """One record: what the first frame shows and how it goes on."""

    colour: str
    shape: str
    direction: str
    background: str

    @property
    def caption(self) -> str:
        return f"a {self.colour} {self.shape} moves {self.direction} on a {self.background} background"


def all_scenes() -> list[Scene]:
    """Every scene whose shape can be told from its background, in a fixed order."""
    choices = product(COLOURS, SHAPES, DIRECTIONS, COLOURS)
    return [Scene(*choice) for choice in choices if choice[0] != choice[3]]


def caption_words() -> list[str]:
    """The words of all captions, each once, sorted."""
    return sorted({word for scene in all_scenes() for word in scene.caption.split()})


@dataclass(frozen=True)
class Filming:
    """How scenes are filmed; lengths are shares of the picture's side.

    Attributes:
        radius: smallest and largest half width of a shape.
        behind: how far behind the middle it starts.
        travel: how far it goes.
    """

    radius: tuple[float, float] = (0.14, 0.2)
    behind: float = 0.2
    travel: float = 0.4


@dataclass(frozen=True)
class Motion:
    """One film of a scene: where its shape starts, half its width, and how far it goes, in pixels."""

    scene: Scene
    start: tuple[float, float]
    radius: float
    travel: float

    def frame(self, progress: float) -> Image.Image:
        """The picture when the shape has gone this share (0 to 1) of its way."""
        distance = progress * self.travel
        x, y = (at + step * distance for at, step in zip(self.start, DIRECTIONS[self.scene.direction], strict=True))
        return draw_frame(self.scene, centre=(x, y), radius=self.radius)

    def clip(self, num_frames: int, *, dimming: float = 0.0) -> NDArray[np.uint8]:
        """The whole way at an even pace, uint8 [T, H, W, 3] for T >= 2 frames, while ``dimming`` of the light goes (0 to 1)."""
        frames = []
        for index in range(num_frames):
            progress = index / (num_frames - 1)
            frames.append(np.asarray(self.frame(progress)) * (1 - dimming * progress))
        return np.stack(frames).round().astype(np.uint8)


def draw_motion(scene: Scene, rng: random.Random, filming: Filming) -> Motion:
    """A film of ``scene``, its size and its start somewhat different each time."""
    size = rng.uniform(*filming.radius) * IMAGE_SIZE
    steps = DIRECTIONS[scene.direction]
    x, y = (0.5 - filming.behind * step + rng.uniform(-0.05, 0.05) for step in steps)
    return Motion(scene, (x * IMAGE_SIZE, y * IMAGE_SIZE), size, filming.travel * IMAGE_SIZE)


def write_dataset(
    folder: Path,
    *,
    seed: int,
    train_records: int,
    eval_records: int,
    with_images: bool = True,
    filming: Filming = Filming(),
) -> None:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``images/`` into ``folder``.

    Args:
        with_images: whether the records name their first frames; else they are for text-to-video.
        filming: how the first frames are taken.

    Raises:
        InputError: a size is below 1, or there are not enough different scenes.
    """
    check_sizes(train_records=train_records, eval_records=eval_records)
    rng = random.Random(seed)
    train, validation = split_scenes(rng, train_records=train_records, eval_records=eval_records)
    (folder / "images").mkdir(parents=True)
    for split, scenes in (("validation", validation), ("train", train)):
        lines = list(_records(folder, split, scenes, rng=rng, with_images=with_images, filming=filming))
        write_lines(folder / f"{split}.jsonl", lines)


def split_scenes(rng: random.Random, *, train_records: int, eval_records: int) -> tuple[list[Scene], list[Scene]]:
    """The scenes of training and those of validation; none is in both."""
    scenes = rng.sample(all_scenes(), train_records + eval_records)
    return scenes[eval_records:], scenes[:eval_records]


def write_lines(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def check_sizes(*, train_records: int, eval_records: int) -> None:
    """Raise ``InputError`` with every fault of the two sizes."""
    sizes = {"train_records": train_records, "eval_records": eval_records}
    faults = [f"{name} is {size}; it must be at least 1." for name, size in sizes.items() if size < 1]
    available = len(all_scenes())
    if not faults and sum(sizes.values()) > available:
        faults.append(
            f"train_records + eval_records is {sum(sizes.values())}, but there are only {available} different scenes "
            "of moving shapes; ask for fewer records."
        )
    if faults:
        raise InputError(faults)


def draw_frame(scene: Scene, *, centre: tuple[float, float], radius: float) -> Image.Image:
    """A frame, IMAGE_SIZE squared RGB; ``centre`` and ``radius`` in pixels."""
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), COLOURS[scene.background])
    draw = ImageDraw.Draw(image)
    x, y = centre
    box = (x - radius, y - radius, x + radius, y + radius)
    fill = COLOURS[scene.colour]
    if scene.shape == "circle":
        draw.ellipse(box, fill=fill)
    elif scene.shape == "square":
        draw.rectangle(box, fill=fill)
    else:
        draw.polygon(((x, y - radius), (x - radius, y + radius), (x + radius, y + radius)), fill=fill)
    return image


def _records(
    folder: Path,
    split: str,
    scenes: Sequence[Scene],
    *,
    rng: random.Random,
    with_images: bool,
    filming: Filming,
) -> Iterator[dict[str, object]]:
    for index, scene in enumerate(scenes):
        path = f"images/{split}_{index:04d}.png"
        draw_motion(scene, rng, filming).frame(0.0).save(folder / path)
        metadata = {
            **({"image_path": path} if with_images else {}),
            "colour": scene.colour,
            "shape": scene.shape,
            "direction": scene.direction,
            "background": scene.background,
        }
        yield {"input": scene.caption, "metadata": metadata}
