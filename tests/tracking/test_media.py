"""A written mp4, read back by another decoder, holds the same pictures."""

import os
import resource
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import imageio_ffmpeg
import numpy as np
import pytest
from numpy.typing import NDArray

from miles_wan.tracking.media import write_video
from miles_wan.tracking.writing import TrackingError

# 8-bit limited-range YUV has 219 steps, and the encoder adds a little on flat areas.
FLAT_TOLERANCE = 4


def flat(colour: tuple[int, int, int], *, frames: int = 3, height: int = 32, width: int = 48) -> NDArray[np.uint8]:
    return np.broadcast_to(np.array(colour, np.uint8), (frames, height, width, 3)).copy()


def decoded(path: Path) -> NDArray[np.uint8]:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def decoded_by_ffmpeg(path: Path, *, height: int, width: int) -> NDArray[np.uint8]:
    """The ffmpeg program obeys the colour tags in the file, as players do."""
    command = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-v",
        "error",
        "-i",
        str(path),
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-",
    ]
    raw = subprocess.run(command, check=True, capture_output=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("fps", [8, 24, 23.976])
def test_frame_count_size_and_rate_are_kept(tmp_path: Path, frames: int, fps: float) -> None:
    path = write_video(tmp_path / "videos" / "a.mp4", flat((10, 20, 30), frames=frames), fps)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height) == (48, 32)
        assert stream.average_rate == Fraction(fps).limit_denominator(1001)
    assert len(decoded(path)) == frames


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (200, 120, 40)])
def test_colours_are_those_that_were_given(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    frames = flat(colour)
    path = write_video(tmp_path / "a.mp4", frames, 8)
    for read in (decoded(path), decoded_by_ffmpeg(path, height=32, width=48)):
        assert np.abs(read.astype(int) - frames).max() <= FLAT_TOLERANCE


def test_a_smooth_moving_picture_is_close_everywhere(tmp_path: Path) -> None:
    y, x = np.mgrid[0:64, 0:64]
    frames = np.stack([np.stack([x * 2 + 8 * t, y * 3, 255 - x - y], -1).clip(0, 255) for t in range(5)]).astype(
        np.uint8
    )
    read = decoded(write_video(tmp_path / "a.mp4", frames, 8))
    assert np.abs(read.astype(int) - frames).mean() < 2


@pytest.mark.parametrize(("height", "width"), [(31, 33), (31, 48), (32, 33), (1, 1)])
def test_an_odd_size_gets_one_repeated_row_or_column(tmp_path: Path, height: int, width: int) -> None:
    frames = flat((40, 160, 90), height=height, width=width)
    read = decoded(write_video(tmp_path / "a.mp4", frames, 8))
    assert read.shape == (3, height + height % 2, width + width % 2, 3)
    assert np.abs(read.astype(int) - np.array([40, 160, 90])).max() <= FLAT_TOLERANCE


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((2, 3, 32, 32), np.uint8),
        np.zeros((2, 32, 32, 3), np.float32),
        np.zeros((32, 32, 3), np.uint8),
        np.zeros((0, 32, 32, 3), np.uint8),
    ],
    ids=["channels first", "float", "one picture", "no frame"],
)
def test_another_layout_or_type_is_refused(tmp_path: Path, frames: NDArray[np.uint8]) -> None:
    with pytest.raises(TrackingError, match=r"a\.mp4: frames are .*expected uint8 \[T, H, W, 3\]"):
        write_video(tmp_path / "a.mp4", frames, 8)
    assert not (tmp_path / "a.mp4").exists()


def test_a_full_disk_leaves_the_old_video_and_no_rest(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", flat((255, 0, 0)), 8)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(TrackingError, match=r"Cannot write .*a\.mp4"):
            write_video(path, np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), np.uint8), 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]


_ENCODE = """
import hashlib, sys
import numpy as np
from miles_wan.tracking.media import write_video
for seed in (19, 21, 28):  # of forty such videos those that showed it
    rng = np.random.default_rng(seed)
    frames = [rng.normal(size=(16, 16, 3)).repeat(2, 0).repeat(2, 1) * 10 + 130 for _ in range(5)]
    path = write_video(sys.argv[1], np.stack(frames).clip(0, 255).astype(np.uint8), 8.0)
    print(hashlib.sha256(path.read_bytes()).hexdigest())
"""


def test_the_file_does_not_depend_on_what_lay_in_memory_before(tmp_path: Path) -> None:
    files = {
        subprocess.run(
            [sys.executable, "-c", _ENCODE, str(tmp_path / "video.mp4")],
            env={**os.environ, "MALLOC_PERTURB_": str(byte)},  # glibc fills fresh memory with it
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for byte in (0, 85, 170)
    }
    assert len(files) == 1
