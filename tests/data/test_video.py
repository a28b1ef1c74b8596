"""A clip is what a person would see: upright, evenly in time, filling the size; a video that gives none says why."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from clip_files import grey_frames, halves, turn, write_clip, write_sound

from miles_wan.data.clips import BAD_KINDS, NOTE_KINDS
from miles_wan.data.video import BadClipError, ClipFormat, nearest_size, read_clip

SIZE = (64, 48)
LEVELS = [20 * number for number in range(12)]


def wanted(frames: int, *, fps: float | None = None, stride: int = 1, sizes: tuple = (SIZE,)) -> ClipFormat:
    return ClipFormat(sizes=sizes, num_frames=frames, fps=fps, stride=stride)


def shown_levels(path: Path, format: ClipFormat) -> list[int]:
    """Which of LEVELS each frame of the clip shows."""
    means = read_clip(path, format).frames.mean(axis=(1, 2, 3))
    nearest = [int(np.argmin([abs(mean - level) for level in LEVELS])) for mean in means]
    assert max(abs(mean - LEVELS[number]) for mean, number in zip(means, nearest, strict=True)) < 4
    return nearest


def fault(path: Path, format: ClipFormat) -> BadClipError:
    with pytest.raises(BadClipError) as raised:
        read_clip(path, format)
    assert raised.value.kind in BAD_KINDS
    assert str(path) in raised.value.text
    return raised.value


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_a_clip_is_the_first_frames_at_its_own_rate_or_every_stride_of_them(tmp_path: Path, suffix: str) -> None:
    path = write_clip(tmp_path / f"clip{suffix}", grey_frames(LEVELS), fps=24)
    assert shown_levels(path, wanted(5)) == [0, 1, 2, 3, 4]
    assert shown_levels(path, wanted(5, stride=2)) == [0, 2, 4, 6, 8]
    clip = read_clip(path, wanted(5))
    assert clip.frames.shape == (5, 48, 64, 3)
    assert clip.frames.dtype == np.uint8
    assert clip.notes == ()


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_a_target_rate_picks_the_frame_shown_at_each_time(tmp_path: Path, suffix: str) -> None:
    path = write_clip(tmp_path / f"clip{suffix}", grey_frames(LEVELS), fps=24)
    # frame k of the clip is shown at k stride / fps seconds: number 24 k stride / fps of the video, rounded down
    assert shown_levels(path, wanted(9, fps=24)) == list(range(9))
    assert shown_levels(path, wanted(5, fps=12)) == [0, 2, 4, 6, 8]
    assert shown_levels(path, wanted(5, fps=16)) == [int(24 * k / 16) for k in range(5)]
    assert shown_levels(path, wanted(4, fps=24, stride=3)) == [0, 3, 6, 9]


def test_a_slow_video_repeats_its_frames_and_says_so(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4", grey_frames(LEVELS), fps=8)
    assert shown_levels(path, wanted(9, fps=16)) == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    ((kind, text),) = read_clip(path, wanted(9, fps=16)).notes
    assert kind == "repeated_frames"
    assert "4 of its frames" in text


def test_variable_frame_rates_are_followed_by_time(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.2, 0.3, 0.4, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    path = write_clip(tmp_path / "clip.mp4", grey_frames(LEVELS), fps=10, times=times)
    at = [max(number for number, time in enumerate(times) if time <= k / 5 + 1e-9) for k in range(6)]
    assert at == [0, 2, 4, 4, 4, 6]
    assert shown_levels(path, wanted(6, fps=5)) == at
    assert "variable_frame_rate" in {kind for kind, _ in read_clip(path, wanted(6, fps=5)).notes}


@pytest.mark.parametrize(("degrees", "dark"), [(90, "top"), (180, "right"), (270, "bottom")])
def test_a_turned_video_is_turned_upright(tmp_path: Path, degrees: int, dark: str) -> None:
    # the left half is black: turned clockwise by 90 degrees it is at the top
    path = turn(write_clip(tmp_path / "clip.mp4", halves(5)), degrees)
    size = (64, 32) if degrees == 180 else (32, 64)
    clip = read_clip(path, wanted(5, sizes=(size,)))
    picture = clip.frames[0].mean(axis=2)
    middle = (picture.shape[0] // 2, picture.shape[1] // 2)
    parts = {
        "top": picture[: middle[0] - 2],
        "bottom": picture[middle[0] + 2 :],
        "left": picture[:, : middle[1] - 2],
        "right": picture[:, middle[1] + 2 :],
    }
    assert parts[dark].max() < 20
    assert [kind for kind, _ in clip.notes] == ["turned"]


def test_a_video_turned_by_no_quarter_is_refused(tmp_path: Path) -> None:
    path = turn(write_clip(tmp_path / "clip.mp4", halves(5)), 30)
    error = fault(path, wanted(5))
    assert error.kind == "odd_rotation"
    assert "no quarter turn" in error.text


def test_the_middle_of_a_wide_video_fills_the_size(tmp_path: Path) -> None:
    frames = np.zeros((5, 32, 96, 3), dtype=np.uint8)
    frames[:, :, 32:64] = 200  # the middle third is what a square shows
    path = write_clip(tmp_path / "clip.mp4", frames)
    clip = read_clip(path, wanted(5, sizes=((32, 32),)))
    assert clip.frames.shape == (5, 32, 32, 3)
    assert clip.frames[:, :, 3:-3].min() > 190
    larger = read_clip(path, wanted(5, sizes=((64, 64),)))
    assert [kind for kind, _ in larger.notes] == ["enlarged"]


def test_pixels_that_are_not_square_are_stretched(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4", halves(5, width=64, height=64), pixel_aspect=Fraction(2, 1))
    clip = read_clip(path, wanted(5, sizes=((128, 64), (64, 64))))
    assert clip.frames.shape == (5, 64, 128, 3)  # shown 128 wide: the wide bucket
    assert clip.frames[0, :, :60].max() < 20
    assert clip.frames[0, :, 68:].min() > 235


def test_each_video_takes_the_bucket_of_its_shape() -> None:
    sizes = ((1280, 704), (704, 1280), (960, 960))
    assert nearest_size(16 / 9, sizes) == (1280, 704)
    assert nearest_size(9 / 16, sizes) == (704, 1280)
    assert nearest_size(1.2, sizes) == (960, 960)


def test_videos_without_a_clip_say_why(tmp_path: Path) -> None:
    good = write_clip(tmp_path / "good.mp4", grey_frames(LEVELS), fps=24)
    short = fault(good, wanted(13))
    assert short.kind == "too_few_frames"
    assert "has 12 frames" in short.text
    assert "13 are needed" in short.text
    assert fault(good, wanted(9, fps=12)).kind == "too_few_frames"  # half a second is 6 frames at that rate
    assert fault(write_sound(tmp_path / "sound.mp4"), wanted(5)).kind == "no_video_stream"
    rubbish = tmp_path / "rubbish.mp4"
    rubbish.write_bytes(np.random.default_rng(0).bytes(4000))
    assert fault(rubbish, wanted(5)).kind == "unreadable"
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    assert fault(cut, wanted(5)).kind == "unreadable"
    assert fault(tmp_path / "absent.mp4", wanted(5)).kind == "unreadable"


def test_every_kind_has_one_meaning() -> None:
    assert not BAD_KINDS.keys() & NOTE_KINDS.keys()
