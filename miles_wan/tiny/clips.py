"""The moving shapes as video files. In: scenes and a source of random numbers. Out: mp4 clips with a data file for supervised
training. It knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from miles_wan.tiny.dataset import Filming, Scene, draw_motion, write_lines
from miles_wan.tracking.media import write_video

# The smallest clip in which all is seen: three latent frames (given, moving, arrived) at the four tokens of 64 x 64 pixels.
NUM_FRAMES = 9
FPS = 8
# Larger than in the random world: circle, square and triangle must be told apart after a small VAE, in the 32 x 32 pixels that
# the reward sees.
FILMING = Filming(radius=(0.2, 0.26), behind=0.2, travel=0.4)
# How much of the light is gone at the end of a training clip. A model that learns from such clips draws and moves the shapes
# well, and lets the light go down: what reinforcement learning can mend, since the PickScore has seen them in full light.
DIMMING = (0.2, 1.0)


def write_clips(
    folder: Path, name: str, scenes: Sequence[Scene], *, rng: random.Random, dimming: tuple[float, float] = (0.0, 0.0)
) -> Path:
    """Write one clip of each scene to ``clips/{name}_{i}.mp4`` and ``{name}.jsonl`` with the captions; return the data file.

    Args:
        folder: created if needed.
        name: of the data file, and where the names of its clips begin.
        dimming: least and greatest share of the light that is gone at the end of a clip; each clip has its own.

    Raises:
        TrackingError: a clip cannot be written.
    """
    lines = []
    for index, scene in enumerate(scenes):
        path = f"clips/{name}_{index:04d}.mp4"
        frames = draw_motion(scene, rng, FILMING).clip(NUM_FRAMES, dimming=rng.uniform(*dimming))
        write_video(folder / path, frames, FPS)
        lines.append({"video_path": path, "input": scene.caption})
    write_lines(folder / f"{name}.jsonl", lines)
    return folder / f"{name}.jsonl"
