"""Devices and the output folder are checked, and left as they were."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from doctor_cases import check, only_fault, shard_over_all, use_cuda

from miles_wan.doctor import machine
from miles_wan.wan import dequantised

Usage = namedtuple("Usage", "total used free")


def test_more_worker_slots_than_cores_is_a_warning(tree: dict[str, Any]) -> None:
    cores = len(os.sched_getaffinity(0))
    tree["cluster"]["num_gpus"] = cores + 1
    shard_over_all(tree)
    (warning,) = check(tree).warnings
    assert f"{cores + 1} worker slots share {cores} CPU core(s)" in warning


def test_cuda_on_a_machine_without_it(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda(tree, monkeypatch, exist=0)
    assert "--device cpu" in only_fault(tree)


def test_more_gpus_than_exist(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda(tree, monkeypatch, exist=4, num_gpus=5)
    fault = only_fault(tree)
    assert fault.startswith("cluster.num_gpus: 5 asked for")
    assert "4 CUDA device(s)" in fault
    tree["cluster"]["num_gpus"] = 4
    shard_over_all(tree)
    check(tree)


@pytest.mark.parametrize(("listed", "fits"), [("0,1", True), ("2,3", True), ("3,4", False), ("7,0", False)])
def test_the_device_list_must_exist(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, listed: str, fits: bool
) -> None:
    lists = use_cuda(tree, monkeypatch, exist=4, num_gpus=2, cuda_visible_devices=listed)
    if fits:
        check(tree)
    else:
        assert f"CUDA_VISIBLE_DEVICES={listed}" in only_fault(tree)
    assert lists == [listed]


def test_an_environment_that_hides_all_devices_shows_none() -> None:
    """The real question, asked in a process of its own."""
    assert machine.cuda_device_bytes({**os.environ, "CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.parametrize(("name", "is_folder"), [("checkpoints", False), ("videos", False), ("config.yaml", True)])
def test_what_is_in_the_way_in_the_output_folder(tree: dict[str, Any], name: str, is_folder: bool) -> None:
    path = Path(tree["output_dir"]) / name
    path.parent.mkdir(parents=True)
    path.mkdir() if is_folder else path.write_text("")
    assert f"{name} is in the way" in only_fault(tree)


def test_the_root_of_the_file_system_is_no_output_folder(tree: dict[str, Any]) -> None:
    tree["output_dir"] = "/"
    assert "is the root of the file system" in only_fault(tree)


@pytest.mark.parametrize("below", ["file", "file/run", "file/runs/run"])
def test_an_output_folder_below_a_file(tree: dict[str, Any], tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    tree["output_dir"] = str(tmp_path / below)
    assert only_fault(tree).startswith(f"output_dir: {tmp_path / below}: cannot be written")


def test_an_output_folder_nobody_can_write(tree: dict[str, Any]) -> None:
    tree["output_dir"] = "/proc/run"  # not even root can
    assert only_fault(tree).startswith("output_dir: /proc/run: cannot be written")


@pytest.mark.parametrize("left", ["metrics.jsonl", "summary.json", "checkpoints/step_3/data"])
def test_an_output_folder_with_a_run_is_not_overwritten(tree: dict[str, Any], left: str) -> None:
    path = Path(tree["output_dir"]) / left
    path.parent.mkdir(parents=True)
    path.write_text("x")
    fault = only_fault(tree)
    assert "--resume latest" in fault
    assert left.split("/")[0] in fault
    tree["resume"] = "latest"
    check(tree)
    assert path.read_text() == "x"


def test_an_empty_output_folder_is_kept(tree: dict[str, Any]) -> None:
    Path(tree["output_dir"]).mkdir(parents=True)
    check(tree)
    assert Path(tree["output_dir"]).is_dir()


def test_a_full_disk(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40 - 2**29, 2**29))
    assert "only 0.50 GiB are free" in only_fault(tree)


def test_the_engines_copy_of_a_quantized_base_needs_space(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["model"]["quantization"] = "int8"
    check(tree)
    monkeypatch.setattr(dequantised, "parameter_bytes", lambda _: 30 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 20 * 2**30))
    out = Path(tree["output_dir"]) / "engine_checkpoint"
    assert only_fault(tree) == (
        f"output_dir: {out}: the dequantised checkpoint for the engine takes 30.0 GiB, 20.0 GiB are free; give more space, "
        "or set model.quantization to none"
    )
    assert not out.parent.exists()
    tree["rollout"]["engine"] = "local"  # it computes with the trainer's own weights
    check(tree)


def test_samples_that_do_not_fit_into_shared_memory_are_a_warning(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"/dev/shm": 64 * 2**20}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, free.get(str(path), 2**39)))
    assert check(tree).warnings == ()  # tiny videos fit into 64 MiB
    tree["rollout"].update(width=1280, height=1280, num_frames=121)
    (warning, *_) = check(tree).warnings
    # 4 samples of 121 x 1280 x 1280 x 3 bytes and 2 steps x 2 states x 48 x 31 x 80 x 80 floats
    needed = 4 * (121 * 1280 * 1280 * 3 + 2 * 2 * 48 * 31 * 80 * 80 * 4) / 2**30
    assert f"0.1 GiB free, the samples of one rollout take {needed:.1f} GiB" in warning
