"""A picture of what a run did to its validation videos: a row for each prompt, its frames before training and after it.

python benchmarks/before_after.py --run runs/demo/run --out before_after.png
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import av
import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass(frozen=True)
class Arguments:
    """What to show."""

    run: Path
    """Output folder of a run that wrote validation videos."""
    out: Path
    """The picture (PNG)."""
    frames: int = 5
    """Frames of each video, evenly spread."""


def main() -> int:
    """Draw the picture. Exit code 2 where there is nothing to compare."""
    arguments = tyro.cli(Arguments)
    folders = sorted((arguments.run / "videos").glob("*"))
    names = sorted(path.name for path in folders[0].glob("*.mp4")) if len(folders) > 1 else []
    if not names:
        print(f"{arguments.run / 'videos'} holds no two validations with videos", file=sys.stderr)
        return 2
    figure, axes = plt.subplots(len(names), 2, figsize=(9, 1.05 * len(names) + 0.4), squeeze=False)
    for column, (title, folder) in enumerate((("before", folders[0]), ("after", folders[-1]))):
        for row, name in enumerate(names):
            axis = axes[row][column]
            axis.imshow(_strip(folder / name, arguments.frames))
            axis.set_xticks([])
            axis.set_yticks([])
        axes[0][column].set_title(title)
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=110)
    return 0


def _strip(path: Path, count: int) -> np.ndarray:
    """``count`` frames of a video side by side: uint8 [H, count * W, 3]."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    chosen = np.linspace(0, len(frames) - 1, count).round().astype(int)
    return np.concatenate([frames[index] for index in chosen], axis=1)


if __name__ == "__main__":
    sys.exit(main())
