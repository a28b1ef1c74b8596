"""Everything that can be known beforehand is checked before anything starts, and all faults are told together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from doctor_cases import check, faults_of, only_fault, write_lines
from PIL import Image


def test_a_faultless_run_gives_back_what_was_read_and_leaves_no_trace(tree: dict[str, Any], tmp_path: Path) -> None:
    report = check(tree)
    assert report.model.family.name == "wan2.2-ti2v-5b"
    assert len(report.train) == 64
    assert report.eval is not None
    assert len(report.eval) == 64
    assert report.warnings == ()
    assert list(tmp_path.iterdir()) == []


def test_without_validation_data_there_is_none(tree: dict[str, Any]) -> None:
    tree["data"]["eval"] = None
    tree["eval"]["interval"] = 0
    assert check(tree).eval is None


def test_a_relative_output_folder_is_fine(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree["output_dir"] = "runs/relative"
    check(tree)


def test_faults_of_every_kind_are_told_together(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["data"]["train"] = write_lines(tmp_path / "train.jsonl", "{", {"input": ""})
    tree["data"]["eval"] = str(tmp_path / "absent.jsonl")
    tree["rollout"].update(width=33, num_frames=6)
    tree["reward"]["functions"] += [{"name": "no_such_module:f"}]
    (tmp_path / "file").write_text("")
    tree["output_dir"] = str(tmp_path / "file" / "run")
    faults = faults_of(tree)
    starts = [
        "data.train",
        "data.train",
        "data.eval",
        "rollout.width",
        "rollout.num_frames",
        "reward.functions",
        "output_dir",
    ]
    assert len(faults) == len(starts)
    assert all(fault.startswith(start) for fault, start in zip(faults, starts, strict=True)), faults


def test_a_missing_data_file(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["data"]["train"] = str(tmp_path / "absent.jsonl")
    assert only_fault(tree) == f"data.train: {tmp_path / 'absent.jsonl'}: no such data file; check the path"


def test_all_faults_of_both_files_have_their_lines(tree: dict[str, Any], tmp_path: Path) -> None:
    Image.new("RGB", (256, 256)).save(tmp_path / "cut.bmp")
    (tmp_path / "cut.bmp").write_bytes((tmp_path / "cut.bmp").read_bytes()[:1000])
    train, validation = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    missing, cut = ({"input": "a", "metadata": {"image_path": name}} for name in ("absent.png", "cut.bmp"))
    tree["data"]["train"] = write_lines(train, '{"input"', {"input": "fine"}, missing, cut)
    tree["data"]["eval"] = write_lines(validation, {"input": "  "})
    faults = faults_of(tree)
    lines = [f"data.train: {train}:1", f"data.train: {train}:3", f"data.train: {train}:4", f"data.eval: {validation}:1"]
    assert len(faults) == 4
    assert all(fault.startswith(f"{line}: ") for fault, line in zip(faults, lines, strict=True)), faults


def test_an_eval_interval_needs_eval_data(tree: dict[str, Any]) -> None:
    tree["data"]["eval"] = None
    assert "eval.interval = 1" in only_fault(tree)


def test_validation_records_that_are_trained_on_are_counted(
    tree: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tree["data"]["eval"] = tree["data"]["train"]
    (warning,) = check(tree).warnings
    assert "64 of 64 validation records are also training records" in warning
    assert warning in caplog.messages


def test_images_of_another_shape_are_a_counted_warning(tree: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    tree["rollout"].update(width=64, height=32)  # the toy images are square
    with caplog.at_level(logging.WARNING):
        warnings = check(tree).warnings
    assert [warning.partition(" images")[0] for warning in warnings] == ["data.train: 64 of 64", "data.eval: 64 of 64"]
    assert set(warnings) <= set(caplog.messages)
