"""What the launcher finds out before anything starts: devices, memory, and whether a checkpoint can be continued; what is told of the data."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_clips import write_toy_clips

from miles_wan.cluster.launch import output_lock
from miles_wan.errors import InputError
from miles_wan.supervised import launch, run
from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.dataset import RunData
from miles_wan.supervised.encode import ClipLibrary
from miles_wan.supervised.launch import check
from miles_wan.supervised.resume import Progress, clips_remembered, remembered
from miles_wan.supervised.settings import plan, read_settings, recipe_path
from miles_wan.tiny import make_tiny
from miles_wan.training.mesh import estimate
from miles_wan.wan.family import load_family
from miles_wan.wan.model import meta_model

GIB = 2**30


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    make_tiny(folder / "tiny", family="wan2.2-t2v-a14b", train_records=1, eval_records=1)
    write_toy_clips(folder / "clips", train=2, evaluation=1, frames=9)
    return folder


def settings(world: Path, output: Path, **changes: Any) -> SftConfig:
    places = {
        "model.path": str(world / "tiny" / "Wan2.2-T2V-A14B-tiny"),
        "data.train": str(world / "clips" / "train.jsonl"),
        "data.cache_dir": str(world / "cache"),
        "eval.interval": 0,
        "output_dir": str(output),
    }
    return read_settings([recipe_path("tiny")], places | {k.replace("__", "."): v for k, v in changes.items()})


def faults(config: SftConfig) -> list[str]:
    with pytest.raises(InputError) as raised:
        check(config)
    return list(raised.value.faults)


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of torchrun on two machines of two devices each."""
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "cuda_device_bytes", lambda _: [80 * GIB] * 2)


@pytest.mark.usefixtures("two_machines")
def test_a_machine_needs_devices_for_its_own_ranks(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(world, tmp_path / "out", device="cuda", training__dp_size=4)
    check(config)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    (fault,) = faults(config)
    assert "3 ranks on this machine need as many CUDA devices, it shows 2; lower torchrun's --nproc-per-node" in fault


@pytest.mark.usefixtures("two_machines")
def test_ranks_share_the_memory_of_their_own_machine(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    given: list[int] = []
    monkeypatch.setattr(launch, "model_faults", lambda *_, device_bytes: given.append(device_bytes) or [])
    check(settings(world, tmp_path / "out", training__dp_size=4))
    assert given == [32 * GIB]


@pytest.mark.parametrize(("videos", "named"), [(0, []), (1, ["training.dp_size = 2"])])
def test_memory_is_that_of_the_loaded_experts(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, videos: int, named: list[str]
) -> None:
    """Room for the trained expert, in four copies, and half of what the other one takes."""
    config = settings(
        world, tmp_path / "out", model__train_experts="low", training__dp_size=2, eval__videos=videos, device="cuda"
    )
    folder = load_family(config.model.path)
    one = estimate(meta_model(folder, dtype="fp32", names=["transformer_2"]), ranks=2)
    room = 4 * one.weight_bytes + one.weight_bytes // 2 + one.gathered_bytes
    monkeypatch.setattr(launch, "cuda_device_bytes", lambda _: [room] * 2)
    found = faults(config) if named else check(config) or []
    assert [fault.partition(":")[0] for fault in found] == named


def test_weights_of_an_expert_that_is_not_loaded_are_checked(world: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(world / "tiny" / "Wan2.2-T2V-A14B-tiny", model)
    (model / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    (fault,) = faults(settings(world, tmp_path / "out", model__path=str(model), model__train_experts="low"))
    assert fault.startswith(f"model.path: {model / 'transformer'}")


@pytest.mark.usefixtures("two_machines")
def test_under_torchrun_a_device_list_is_refused(world: Path, tmp_path: Path) -> None:
    (fault,) = faults(settings(world, tmp_path / "out", training__dp_size=4, cuda_visible_devices="0,1"))
    assert fault.startswith("cuda_visible_devices: 0,1")
    assert "start torchrun with CUDA_VISIBLE_DEVICES" in fault


@pytest.mark.usefixtures("two_machines")
def test_the_first_rank_of_torchrun_holds_the_output_folder(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(config: SftConfig) -> int:
        with pytest.raises(InputError, match="is in use by the run"), output_lock(Path(config.output_dir)):
            pass
        return 0

    monkeypatch.setattr(run, "run_rank", locked)
    flags = ["--recipe", "tiny", "--model", str(world / "tiny" / "Wan2.2-T2V-A14B-tiny"), "--eval-interval", "0"]
    flags += ["--data-jsonl", str(world / "clips" / "train.jsonl"), "--data.cache-dir", str(world / "cache")]
    assert launch.main([*flags, "--output-dir", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "config.yaml").is_file()


def test_captions_that_are_skipped_are_told_as_left_out(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = world / "clips" / "train.jsonl"
    first = json.loads(good.read_text().splitlines()[0])
    video = str(good.parent / first["video_path"])
    data = tmp_path / "data.jsonl"
    captions = ("a red circle", "a blue circle", "红色的圆", "a red circle")
    data.write_text("".join(json.dumps({"video_path": video, "input": caption}) + "\n" for caption in captions))
    for skipped, kinds in ((False, ["duplicate"]), (True, ["duplicate", "other_language"])):
        caplog.clear()
        config = settings(world, tmp_path / "out", data__train=str(data), data__skip_other_languages=skipped)
        folder = load_family(config.model.path)
        library = ClipLibrary(config.data.cache_dir, folder, plan(config, folder).clip, device=torch.device("cpu"))
        with caplog.at_level("INFO"):
            RunData(config, library).tell(tmp_path / "bad.jsonl")
        told = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
        assert [line["kind"] for line in told] == kinds
        (sentence,) = (record.getMessage() for record in caplog.records if "other_language" in record.getMessage())
        assert ("kept" in sentence, "left out" in sentence) == (not skipped, skipped)


def saved(config: SftConfig, **changes: Any) -> Path:
    """The folder of a checkpoint of ``config`` after two steps; ``changes`` are in its state."""
    folder = Path(config.output_dir) / "checkpoints" / "step_000002"
    folder.mkdir(parents=True)
    weights = load_family(config.model.path).transformer_folders
    settings = {**remembered(config, weights=weights), **clips_remembered((), ())}
    state = {"progress": asdict(Progress(finished=2)), "settings": settings, **changes}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_a_checkpoint_of_another_run_is_refused_before_anything_starts(world: Path, tmp_path: Path) -> None:
    saved(settings(world, tmp_path))
    check(settings(world, tmp_path, resume="latest", training__num_steps=400, training__micro_batch_size=1))
    model = tmp_path / "model"
    shutil.copytree(world / "tiny" / "Wan2.2-T2V-A14B-tiny", model)
    weights = "diffusion_pytorch_model.safetensors"
    shutil.copy(model / "transformer" / weights, model / "transformer_2" / weights)
    other = settings(world, tmp_path, resume="latest", seed=1, training__num_steps=1, model__path=str(model))
    found = faults(other)
    for part in (
        "seed is 1, the run was started with 0",
        "num_steps is 1, and 2 steps are finished",
        "weights are not",
    ):
        assert sum(part in fault for fault in found) == 1, part
    assert len(found) == 3


def test_a_refused_resume_leaves_the_configuration_of_the_run(world: Path, tmp_path: Path) -> None:
    saved(settings(world, tmp_path))
    (tmp_path / "config.yaml").write_text("of the run")
    flags = ["--recipe", "tiny", "--model", str(world / "tiny" / "Wan2.2-T2V-A14B-tiny"), "--eval-interval", "0"]
    flags += ["--data-jsonl", str(world / "clips" / "train.jsonl"), "--data.cache-dir", str(world / "cache")]
    assert launch.main([*flags, "--output-dir", str(tmp_path), "--resume", "latest", "--seed", "1"]) == 2
    assert (tmp_path / "config.yaml").read_text() == "of the run"


def test_a_damaged_checkpoint_is_told_before_anything_starts(world: Path, tmp_path: Path) -> None:
    folder = saved(settings(world, tmp_path), progress={"finished": 2, "unknown": 1})
    config = settings(world, tmp_path, resume="latest")
    assert "state.json of the newest checkpoint is damaged" in faults(config)[0]
    (folder / "state.json").write_text("{")
    assert "cannot be read" in faults(config)[0]
    (folder / "state.json").unlink()
    assert "lacks its state.json" in faults(config)[0]
