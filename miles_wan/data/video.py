"""Clips out of video files. In: a file and the clip wanted. Out: frames uint8 [T, H, W, 3] of the working size, upright and
evenly spaced in time, or the reason why there are none. It knows no caption and no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from av.stream import Disposition
from PIL import Image

from miles_wan.errors import MilesWanError, first_line
from miles_wan.pixels import fill_size
from miles_wan.records import UInt8

# Time stamps are rounded to the container's tick, those of webm to milliseconds.
_TICKS_OF_JITTER = 2.5
_RELATIVE_JITTER = 0.1
_ROTATION_ROUNDING = 1  # PyAV cuts the angle to whole degrees


class BadClipError(MilesWanError):
    """A video that gives no clip; ``kind`` is one of ``clips.BAD_KINDS``."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text
        super().__init__(text)


@dataclass(frozen=True)
class ClipFormat:
    """The clip that is cut from the beginning of a video.

    ``sizes`` are the working sizes (width, height) in pixels: of several, aspect buckets, each video takes the one whose
    shape is nearest to its own. Frame k shows the video at k ``stride`` / ``fps`` seconds; without ``fps`` it is the
    video's own frame number k ``stride``.
    """

    sizes: tuple[tuple[int, int], ...]
    num_frames: int
    fps: float | None
    stride: int = 1


@dataclass(frozen=True)
class Clip:
    """``frames`` [T, H, W, 3], and the ``notes`` (kind of ``clips.NOTE_KINDS``, sentence) of the video."""

    frames: UInt8
    notes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Frame:
    """One decoded frame and the time in seconds from which it is shown, counted from the first one."""

    frame: av.VideoFrame
    time: float
    duration: float


def read_clip(path: str | Path, wanted: ClipFormat) -> Clip:
    """Decode the clip ``wanted`` of an mp4, webm or anything else that FFmpeg reads. Decoding ends with the clip.

    Frames are turned by the file's rotation, scaled to cover the working size and cropped in the middle.

    Raises:
        BadClipError: the file holds no such clip; the message names the file.
    """
    path = Path(path)
    try:
        with av.open(str(path)) as container:
            stream = _video_stream(container, path)
            return _clip(container, stream, path=path, wanted=wanted)
    except (av.FFmpegError, OSError, ValueError) as error:  # ValueError: PyAV on codecs it cannot open
        raise BadClipError(
            "unreadable", f"video {path} cannot be decoded ({first_line(error)}); encode it again"
        ) from error


def nearest_size(aspect: float, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The size (width, height) whose aspect ratio is nearest to ``aspect`` (width / height), measured by their ratio."""
    return min(sizes, key=lambda size: abs(math.log(size[0] / size[1] / aspect)))


def _video_stream(container: av.container.InputContainer, path: Path) -> av.VideoStream:
    moving = [stream for stream in container.streams.video if not stream.disposition & Disposition.attached_pic]
    if not moving:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "none"
        raise BadClipError("no_video_stream", f"{path} has no video stream (its streams: {kinds}); give a video")
    moving[0].thread_type = "AUTO"
    return moving[0]


def _clip(container: av.container.InputContainer, stream: av.VideoStream, *, path: Path, wanted: ClipFormat) -> Clip:
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    tick = float(stream.time_base or 0)
    seen: list[float] = []
    picture: _Picture | None = None
    taken: list[np.ndarray] = []
    repeated = 0
    for frame, is_new in _spaced(_decoded(container, stream, rate=rate, path=path, seen=seen), wanted, tick=tick):
        if picture is None:
            picture = _Picture(frame.frame, stream, wanted, path=path)
        taken.append(picture.pixels(frame.frame) if is_new else taken[-1])
        repeated += not is_new
        if len(taken) == wanted.num_frames:
            break
    if len(taken) < wanted.num_frames or picture is None:
        at = f"at {wanted.fps:g} frames a second" if wanted.fps is not None else "at its own frame rate"
        raise BadClipError(
            "too_few_frames",
            f"video {path} has {len(taken)} frames {at} with stride {wanted.stride} (it holds {len(seen)}), {wanted.num_frames} are "
            "needed; remove it, or lower data.num_frames, data.stride or data.fps",
        )
    notes = list(picture.notes)
    if _is_variable(seen, tick):
        notes.append(("variable_frame_rate", f"video {path} has a variable frame rate"))
    if repeated:
        notes.append(
            ("repeated_frames", f"video {path} is slower than data.fps: {repeated} of its frames are repeated")
        )
    return Clip(np.stack(taken), tuple(notes))


def _decoded(
    container: av.container.InputContainer, stream: av.VideoStream, *, rate: float, path: Path, seen: list[float]
) -> Iterator[_Frame]:
    """All frames with their times. Where a time stamp is missing or goes back, the nominal rate gives it."""
    nominal = 1 / rate if rate > 0 else 0.0
    start: float | None = None
    for frame in container.decode(stream):
        if frame.is_corrupt:
            raise BadClipError("unreadable", f"video {path} is damaged at frame {len(seen)}; fetch or encode it again")
        stamp = frame.time
        if start is None:
            start = stamp if stamp is not None else 0.0
        time = stamp - start if stamp is not None else -1.0
        if seen and time <= seen[-1]:
            time = seen[-1] + nominal
        elif not seen:
            time = 0.0
        seen.append(time)
        duration = float(frame.duration * frame.time_base) if frame.duration and frame.time_base else nominal
        yield _Frame(frame, time, duration)


def _spaced(frames: Iterator[_Frame], wanted: ClipFormat, *, tick: float) -> Iterator[tuple[_Frame, bool]]:
    """The frames of the clip in order, each with whether it is new (False: the one before once more)."""
    if wanted.fps is None:
        yield from ((frame, True) for index, frame in enumerate(frames) if index % wanted.stride == 0)
        return
    step = wanted.stride / wanted.fps
    shown: _Frame | None = None
    new, index = False, 0
    for frame in frames:
        # A frame is shown until the next one begins; a time stamp may be rounded by a tick.
        while shown is not None and index * step < frame.time - tick:
            yield shown, new
            new, index = False, index + 1
        shown, new = frame, True
    while shown is not None and index * step < shown.time + shown.duration - tick / 2:
        yield shown, new
        new, index = False, index + 1


class _Picture:
    """How the frames of one video become pixels: its rotation, pixel shape and working size, known from the first frame."""

    def __init__(self, first: av.VideoFrame, stream: av.VideoStream, wanted: ClipFormat, *, path: Path) -> None:
        turns = first.rotation / 90
        if abs(turns - round(turns)) > _ROTATION_ROUNDING / 90:
            raise BadClipError(
                "odd_rotation",
                f"video {path} is turned by {first.rotation:g} degrees, which is no quarter turn; encode it upright",
            )
        self._turns = round(turns) % 4  # counter-clockwise
        aspect = float(stream.sample_aspect_ratio or 1) or 1.0
        self._pixel_aspect = 1 / aspect if self._turns % 2 else aspect
        width, height = (first.height, first.width) if self._turns % 2 else (first.width, first.height)
        self.size = nearest_size(width * self._pixel_aspect / height, wanted.sizes)
        self.notes: list[tuple[str, str]] = []
        if self._turns:
            self.notes.append(("turned", f"video {path} is turned upright by {first.rotation:g} degrees"))
        if width * self._pixel_aspect < self.size[0] or height < self.size[1]:
            self.notes.append(
                ("enlarged", f"video {path} is {width}x{height}, smaller than {self.size[0]}x{self.size[1]}")
            )

    def pixels(self, frame: av.VideoFrame) -> UInt8:
        """[H, W, 3] of the working size."""
        upright = np.rot90(frame.to_ndarray(format="rgb24"), self._turns)
        filled = fill_size(Image.fromarray(np.ascontiguousarray(upright)), *self.size, pixel_aspect=self._pixel_aspect)
        return np.asarray(filled, dtype=np.uint8)


def _is_variable(times: Sequence[float], tick: float) -> bool:
    intervals = np.diff(times)
    if len(intervals) < 2:
        return False
    allowed = max(_TICKS_OF_JITTER * tick, _RELATIVE_JITTER * float(np.median(intervals)))
    return bool(intervals.max() - intervals.min() > allowed)
