"""Video files for tests, written with PyAV: of any frame rate, rotation and fault."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray


def grey_frames(levels: Sequence[int], *, width: int = 64, height: int = 48) -> NDArray[np.uint8]:
    """One frame [H, W, 3] of one grey each: a frame tells its number by its level."""
    return np.stack([np.full((height, width, 3), level, dtype=np.uint8) for level in levels])


def halves(frames: int, *, width: int = 64, height: int = 32) -> NDArray[np.uint8]:
    """Left half black, right half white."""
    picture = np.zeros((height, width, 3), dtype=np.uint8)
    picture[:, width // 2 :] = 255
    return np.stack([picture] * frames)


def write_clip(
    path: Path,
    frames: NDArray[np.uint8],
    *,
    fps: float = 8,
    times: Sequence[float] | None = None,
    codec: str | None = None,
    pixel_aspect: Fraction | None = None,
) -> Path:
    """mp4 (H.264) or webm (VP9) by the suffix. ``times`` are the frames' own, in seconds: a variable frame rate."""
    webm = path.suffix == ".webm"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            codec or ("libvpx-vp9" if webm else "libx264"), rate=Fraction(fps).limit_denominator(1001)
        )
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "4", "b": "0"} if webm else {"crf": "4"}
        if pixel_aspect is not None:
            stream.codec_context.sample_aspect_ratio = pixel_aspect
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for index, image in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24").reformat(format="yuv420p")
            if times is not None:
                frame.pts, frame.time_base = round(times[index] * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_sound(path: Path) -> Path:
    """A file with sound and nothing to see."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        for start in range(0, 16000, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def turn(path: Path, degrees: float) -> Path:
    """Let players turn an mp4 clockwise by ``degrees``: the matrix of its track header (ISO/IEC 14496-12, 8.3.2)."""
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 4 + 40
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    rows = (cos, sin, 0.0, -sin, cos, 0.0)
    for place, value in enumerate(rows):
        struct.pack_into(">i", content, matrix + 4 * place, round(value * 65536))
    path.write_bytes(content)
    return path
