"""Sample videos as mp4 that every player and browser shows.

In: frames uint8 [T, H, W, 3] and frames per second. Out: one H.264 file. It knows nothing of who made the frames.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from miles_wan.tracking.writing import TrackingError, replacing, write_failure

# H.264's numbers, written into the file; without them players guess the matrix by the picture's size. The matrix is BT.601
# because common Python readers assume it whatever the file says; primaries and transfer are those of screens.
_MATRIX_BT601, _PRIMARIES_BT709, _LIMITED_RANGE = 6, 1, 1

# x264's macroblock tree reads memory that nobody has written: the same frames gave other quantisers in another process.
_REPRODUCIBLE = "mbtree=0"


def write_video(path: str | Path, frames: NDArray[np.uint8], fps: float) -> Path:
    """Write ``frames`` as H.264 mp4 (yuv420p) and return the path. The file appears only when it is complete.

    Args:
        path: target; folders are created, an existing file is replaced.
        frames: uint8 [T, H, W, 3] RGB, T >= 1. An odd height or width is padded by one repeated row or column.
        fps: frames per second, above 0.

    Raises:
        TrackingError: frames of another layout or type, or the file cannot be written.
    """
    target = Path(path)
    _check(target, frames, fps)
    try:
        with replacing(target) as temporary:
            _encode(temporary, _padded_to_even(frames), Fraction(fps).limit_denominator(1001))
    except av.FFmpegError as error:
        raise write_failure(target, OSError(error.errno, error.strerror)) from error
    return target


def _check(path: Path, frames: NDArray[np.uint8], fps: float) -> None:
    shape, dtype = np.shape(frames), np.asarray(frames).dtype
    if dtype != np.uint8 or len(shape) != 4 or shape[-1] != 3 or 0 in shape:
        raise TrackingError(f"{path}: frames are {dtype} {list(shape)}, expected uint8 [T, H, W, 3] with T >= 1.")
    if fps <= 0:
        raise TrackingError(f"{path}: fps is {fps}, it must be above 0.")


def _padded_to_even(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """yuv420p stores one colour for 2 x 2 pixels, so both sides must be even."""
    _, height, width, _ = frames.shape
    return np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _encode(path: Path, frames: NDArray[np.uint8], fps: Fraction) -> None:
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "16", "x264-params": _REPRODUCIBLE})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.colorspace, context.color_range = _MATRIX_BT601, _LIMITED_RANGE
        context.color_primaries = context.color_trc = _PRIMARIES_BT709
        for image in frames:
            rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            container.mux(stream.encode(rgb.reformat(format="yuv420p")))
        container.mux(stream.encode())
