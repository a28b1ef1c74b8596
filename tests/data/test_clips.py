"""A file of clips is read, with every unusable record by name, or refused with all its faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from miles_wan.data import load_clips
from miles_wan.data.clips import counted, script_of, summarised
from miles_wan.errors import InputError


def write(folder: Path, *lines: Any) -> Path:
    """JSON lines; strings are written as they are. A video called good.mp4 exists (nobody opens it here)."""
    (folder / "good.mp4").write_bytes(b"video")
    path = folder / "clips.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


GOOD = {"video_path": "good.mp4", "input": "a red circle moves up"}


def test_a_line_becomes_a_record(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "first.png")
    line = {**GOOD, "metadata": {"image_path": "first.png", "style": 3}}
    clips = load_clips(write(tmp_path, GOOD, line))
    plain, given = clips.records
    assert plain.caption == "a red circle moves up"
    assert plain.video_path == str(tmp_path / "good.mp4")
    assert plain.image_path is None
    assert plain.source == f"{tmp_path / 'clips.jsonl'}:1"
    assert given.image_path == str(tmp_path / "first.png")
    assert given.image_sha256 is not None
    assert given.metadata["style"] == 3
    assert clips.bad == clips.notes == ()


def test_unusable_records_are_named_and_counted_and_the_others_kept(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    path = write(
        tmp_path,
        GOOD,
        {"video_path": "absent.mp4", "input": "x"},
        {"video_path": "folder.mp4", "input": "x"},
        {"video_path": "empty.mp4", "input": "x"},
        {"video_path": "good.mp4"},
        {"video_path": "good.mp4", "input": "  "},
        {"video_path": "good.mp4", "input": "a\0b"},
        {"input": "x"},
        {**GOOD, "metadata": {"image_path": "broken.png"}},
    )
    clips = load_clips(path)
    assert [record.source for record in clips.records] == [f"{path}:1"]
    assert counted(clips.bad) == {
        "missing_video": 2,
        "empty_video": 1,
        "no_caption": 2,
        "bad_caption": 1,
        "no_video_path": 1,
        "bad_image": 1,
    }
    assert [finding.source.rsplit(":", 1)[1] for finding in clips.bad] == [str(line) for line in range(2, 10)]
    text = "\n".join(summarised(clips.bad))
    for part in ("missing_video: 2", f"{path}:2", "absent.mp4 does not exist", f"{path}:4", "has zero bytes"):
        assert part in text


def test_a_file_of_another_format_is_refused_with_all_its_faults(tmp_path: Path) -> None:
    path = write(
        tmp_path, GOOD, "{", {**GOOD, "fps": 3}, {"video_path": 3, "input": 4}, {**GOOD, "metadata": {"image_path": 1}}
    )
    with pytest.raises(InputError) as raised:
        load_clips(path)
    faults = raised.value.faults
    assert [fault.removeprefix(f"{path}:")[0] for fault in faults] == ["2", "3", "4", "4", "5"]
    for part in ("not a JSON object", "unknown key 'fps'", "video_path is a number", "input is a number", "image_path"):
        assert any(part in fault for fault in faults), part


def test_a_file_without_one_usable_record_is_refused_with_the_fault_of_each(tmp_path: Path) -> None:
    path = write(tmp_path, {"video_path": "absent.mp4", "input": "x"}, {"video_path": "good.mp4", "input": ""})
    with pytest.raises(InputError) as raised:
        load_clips(path)
    assert len(raised.value.faults) == 2
    with pytest.raises(InputError, match="no such data file"):
        load_clips(tmp_path / "none.jsonl")


def test_repeated_lines_are_left_out(tmp_path: Path) -> None:
    clips = load_clips(write(tmp_path, GOOD, GOOD, {**GOOD, "input": "another caption"}))
    assert [record.caption for record in clips.records] == [GOOD["input"], "another caption"]
    assert counted(clips.notes) == {"duplicate": 1}


@pytest.mark.parametrize(
    ("text", "script"),
    [("ein roter Kreis", "LATIN"), ("一个红色的圆 A", "CJK"), ("красный круг", "CYRILLIC"), ("123 !", None)],
)
def test_the_script_of_a_caption_is_that_of_most_letters(text: str, script: str | None) -> None:
    assert script_of(text) == script


def test_captions_in_another_script_are_named_and_kept(tmp_path: Path) -> None:
    foreign = {**GOOD, "input": "红色的圆向上移动"}
    clips = load_clips(write(tmp_path, GOOD, {**GOOD, "input": "a blue square"}, foreign))
    assert len(clips) == 3
    (note,) = clips.notes
    assert (note.kind, note.source) == ("other_language", f"{clips.path}:3")
    assert "CJK" in note.text
