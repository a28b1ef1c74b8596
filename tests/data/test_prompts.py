"""A record file is read whole or refused with all its faults."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from miles_wan.data import crop_report, load_records
from miles_wan.errors import InputError
from miles_wan.tiny import TinyPaths


def write_image(path: Path, *, size: tuple[int, int] = (64, 64), seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def write(path: Path, *lines: Any) -> Path:
    """JSON lines; strings are written as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def faults_of(path: Path) -> tuple[str, ...]:
    with pytest.raises(InputError) as raised:
        load_records(path)
    return raised.value.faults


def only_fault(path: Path) -> str:
    faults = faults_of(path)
    assert len(faults) == 1, faults
    return faults[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


# --- what is read


def test_a_line_becomes_a_record(file: Path) -> None:
    image = write_image(file.parent / "first frame.png")
    line = {"input": "ein roter Kreis — läuft", "metadata": {"image_path": image.name, "style": {"colour": [1, 2]}}}
    (record,) = load_records(write(file, line)).records
    assert record.prompt == "ein roter Kreis — läuft"
    assert record.image_path == str(image)
    assert record.negative_prompt is None
    assert record.metadata["style"] == {"colour": [1, 2]}
    assert record.source == f"{file}:1"
    assert len(record.record_id) == 16


def test_relative_images_start_at_the_file_not_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set" / "images").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    image = write_image(tmp_path / "set" / "images" / "a.png")
    write(tmp_path / "set" / "train.jsonl", {"input": "a", "metadata": {"image_path": "images/a.png"}})
    monkeypatch.chdir(tmp_path / "elsewhere")
    (record,) = load_records("../set/train.jsonl").records
    assert record.image_path == str(image)


def test_no_image_is_text_to_video(file: Path) -> None:
    dataset = load_records(write(file, {"input": "a"}, {"input": "b", "metadata": {"image_path": None}}))
    assert [record.image_path for record in dataset.records] == [None, None]
    assert not dataset.has_images


def test_a_negative_prompt_may_stand_in_either_place(file: Path) -> None:
    lines = [{"input": "a", "negative_prompt": "blurred"}, {"input": "b", "metadata": {"negative_prompt": "blurred"}}]
    assert [record.negative_prompt for record in load_records(write(file, *lines)).records] == ["blurred", "blurred"]
    assert "keep one" in only_fault(write(file, {**lines[0], "metadata": {"negative_prompt": "other"}}))


def test_blank_lines_and_a_byte_order_mark_are_no_fault(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbf{"input": "a"}\r\n\r\n{"input": "b"}')
    assert [record.prompt for record in load_records(file).records] == ["a", "b"]


def test_the_toy_data_set_is_in_the_format(tiny_paths: TinyPaths) -> None:
    train, validation = load_records(tiny_paths.train_jsonl), load_records(tiny_paths.eval_jsonl)
    assert train.duplicates == validation.duplicates == 0
    assert not {record.record_id for record in train.records} & {record.record_id for record in validation.records}


def test_the_example_data_set_is_in_the_format() -> None:
    dataset = load_records(Path(__file__).parents[2] / "data" / "example.jsonl")
    assert len(dataset) == 4
    assert any(record.image_path is None for record in dataset.records)


# --- identity


def test_the_id_is_what_the_line_says_not_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_image(tmp_path / "a" / "x.png")
    write_image(tmp_path / "b" / "y.png")  # the same pixels under another name
    first = load_records(write(tmp_path / "a" / "1.jsonl", {"input": "p", "metadata": {"image_path": "x.png"}}))
    second = load_records(
        write(tmp_path / "b" / "2.jsonl", {"input": "q"}, {"input": "p", "metadata": {"image_path": "y.png"}})
    )
    assert first.records[0].record_id == second.records[1].record_id


def test_prompt_negative_prompt_and_pixels_each_change_the_id(file: Path) -> None:
    write_image(file.parent / "a.png", seed=1)
    write_image(file.parent / "b.png", seed=2)
    lines = [
        {"input": "p"},
        {"input": "q"},
        {"input": "p", "negative_prompt": ""},
        {"input": "p", "negative_prompt": "n"},
        {"input": "p", "metadata": {"image_path": "a.png"}},
        {"input": "p", "metadata": {"image_path": "b.png"}},
    ]
    assert len({record.record_id for record in load_records(write(file, *lines)).records}) == len(lines)


def test_duplicates_are_left_out_counted_and_named(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(file, {"input": "a"}, {"input": "b"}, {"input": "a"}, {"input": "a"})
    with caplog.at_level(logging.WARNING):
        dataset = load_records(file)
    assert [record.prompt for record in dataset.records] == ["a", "b"]
    assert dataset.duplicates == 2
    (warning,) = caplog.messages
    assert "2 duplicate records" in warning
    assert f"{file}:3 repeats {file}:1" in warning


def test_other_metadata_is_another_record(file: Path) -> None:
    write(file, {"input": "a", "metadata": {"target": 1}}, {"input": "a", "metadata": {"target": 2}})
    dataset = load_records(file)
    assert (len(dataset), dataset.duplicates) == (2, 0)


# --- faults


def test_a_missing_file(file: Path) -> None:
    assert only_fault(file) == f"{file}: no such data file; check the path"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "cannot be read" in only_fault(tmp_path)


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_file(file: Path, content: str) -> None:
    file.write_text(content)
    assert "holds no records" in only_fault(file)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"input": "a"', "not a JSON object on one line"),
        ("a prompt", "not a JSON object on one line"),
        ('["a"]', "is a list"),
        ({"metadata": {}}, "has no input"),
        ({"input": ""}, "input is empty"),
        ({"input": " \t"}, "input is empty"),
        ({"input": 3}, "input is a number"),
        ({"input": None}, "input is a null"),
        ({"input": ["a"]}, "input is a list"),
        ({"input": "a", "metadata": "x"}, "metadata is a string"),
        ({"input": "a", "metadata": {"image_path": 7}}, "image_path is a number"),
        ({"input": "a", "metadata": {"image_path": ""}}, "image_path is empty"),
        ({"input": "a", "negative_prompt": 1}, "negative_prompt is a number"),
        ('{"input": "a", "input": "b"}', "the key 'input' comes twice"),
        ({"input": "a\0b"}, "input holds a NUL character"),
        ('{"input": "a\\ud800"}', "input holds half of a surrogate pair at character 1"),
        ('{"input": "a", "negative_prompt": "\\udc00"}', "negative_prompt holds half of a surrogate pair"),
        ({"input": "a", "image_path": "x.png"}, "unknown key 'image_path'"),
        ({"input": "a", "metadata": {"image_path": "absent.png"}}, "absent.png does not exist"),
    ],
)
def test_a_faulty_line_is_named_with_its_number(file: Path, line: Any, words: str) -> None:
    write(file, {"input": "good"}, line)
    fault = only_fault(file)
    assert fault.startswith(f"{file}:2: ")
    assert words in fault


def test_text_that_is_not_utf_8(file: Path) -> None:
    file.write_bytes('{"input": "läuft"}\n'.encode("latin-1"))
    assert "is not UTF-8" in only_fault(file)


def test_an_image_that_is_no_image(file: Path) -> None:
    (file.parent / "x.png").write_text("hello")
    assert "is not an image" in only_fault(write(file, {"input": "a", "metadata": {"image_path": "x.png"}}))


def test_an_image_of_16_bits_would_turn_white(file: Path) -> None:
    Image.fromarray(np.full((8, 8), 30000, dtype=np.uint16)).save(file.parent / "deep.png")
    write(file, {"input": "a", "metadata": {"image_path": "deep.png"}})
    assert "more than 8 bits a channel" in only_fault(file)


def test_a_named_pipe_as_data_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in only_fault(tmp_path / "pipe")


def test_a_folder_as_image(file: Path) -> None:
    (file.parent / "x.png").mkdir()
    assert "cannot be read" in only_fault(write(file, {"input": "a", "metadata": {"image_path": "x.png"}}))


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_truncated_image_is_found_although_its_header_is_whole(file: Path, suffix: str) -> None:
    image = write_image(file.parent / f"x.{suffix}", size=(256, 256))
    image.write_bytes(image.read_bytes()[:-2000])
    with Image.open(image) as opened:
        assert opened.size == (256, 256)
    assert "cannot be decoded" in only_fault(write(file, {"input": "a", "metadata": {"image_path": image.name}}))


def test_all_faults_of_a_file_are_told_together_in_the_order_of_its_lines(file: Path) -> None:
    broken = {"input": "", "extra": 1, "metadata": {"image_path": "absent.png"}}
    write(file, {"input": 1}, {"input": "good"}, "{", broken, {"input": "a", "metadata": {"image_path": "gone.png"}})
    numbers = [int(fault.removeprefix(f"{file}:").split(":")[0]) for fault in faults_of(file)]
    assert numbers == [1, 3, 4, 4, 4, 5]


# --- shapes of images


def test_images_far_from_the_working_size_are_counted_and_named(file: Path) -> None:
    sizes = {"wide.png": (128, 64), "tall.png": (64, 128), "near.png": (110, 64)}
    for name, size in sizes.items():
        write_image(file.parent / name, size=size)
    records = load_records(
        write(file, *({"input": name, "metadata": {"image_path": name}} for name in sizes), {"input": "t"})
    ).records
    report = crop_report(records, 128, 64, 1.25)
    assert (report.names, report.count, report.images) == (("tall.png",), 1, 3)
    assert report.warning is not None
    assert all(word in report.warning for word in ("1 of 3 images", "128x64", "tall.png"))
    assert crop_report(records, 128, 64, 1.1).names == ("tall.png", "near.png")  # 128/64 is 1.16 times 110/64


def test_images_that_fit_give_no_warning(file: Path) -> None:
    write_image(file.parent / "a.png", size=(1280, 704))
    records = load_records(write(file, {"input": "a", "metadata": {"image_path": "a.png"}})).records
    assert crop_report(records, 1280, 704, 1.0).warning is None


def test_a_photograph_turned_by_its_camera_counts_as_it_is_shown(file: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to show
    Image.new("RGB", (128, 64)).save(file.parent / "a.jpg", exif=exif)
    records = load_records(write(file, {"input": "a", "metadata": {"image_path": "a.jpg"}})).records
    assert crop_report(records, 64, 128, 1.25).count == 0
    assert crop_report(records, 128, 64, 1.25).count == 1
