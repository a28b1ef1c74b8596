"""Everything that can be known beforehand is checked before anything starts, and all faults are told together."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from miles_wan import doctor
from miles_wan.config import Config
from miles_wan.doctor import machine, rewards
from miles_wan.errors import InputError
from miles_wan.tiny import TinyPaths
from miles_wan.wan.load import load_transformer, meta_transformer
from miles_wan.wan.lora import inject_lora, save_adapter, trainable_parameters

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def tree(tiny_paths: TinyPaths, tmp_path: Path) -> dict[str, Any]:
    """A configuration without a fault, as a tree that a test may change."""
    reward = {"name": "pickscore", "model": str(tiny_paths.reward), "processor": str(tiny_paths.reward)}
    return {
        "model": {"path": str(tiny_paths.model)},
        "data": {"train": str(tiny_paths.train_jsonl), "eval": str(tiny_paths.eval_jsonl)},
        "rollout": {"width": 32, "height": 32, "num_frames": 5, "prompts_per_rollout": 2, "samples_per_prompt": 2},
        "reward": {"functions": [reward]},
        "eval": {"interval": 1},
        "cluster": {"device": "cpu", "num_gpus": 1},
        "output_dir": str(tmp_path / "runs" / "one"),
    }


def check(tree: dict[str, Any]) -> doctor.Report:
    return doctor.check(Config.model_validate(tree))


def faults_of(tree: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(InputError) as raised:
        check(tree)
    return raised.value.faults


def only_fault(tree: dict[str, Any]) -> str:
    faults = faults_of(tree)
    assert len(faults) == 1, faults
    return faults[0]


def write_lines(path: Path, *lines: Any) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


# --- a run that may start


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


# --- all together


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


# --- data


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


# --- model


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: (folder / "model_index.json").unlink(), "model_index.json"),
        (lambda folder: shutil.rmtree(folder / "vae"), "vae"),
    ],
)
def test_a_damaged_model_folder(
    tree: dict[str, Any], tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = Path(shutil.copytree(tree["model"]["path"], tmp_path / "model"))
    damage(folder)
    tree["model"]["path"] = str(folder)
    fault = only_fault(tree)
    assert fault.startswith("model.path: ")
    assert str(folder) in fault
    assert words in fault


def make_t2v_a14b(folder: Path) -> None:
    """The configuration files of a two-expert model."""
    config = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps({**config, "in_channels": 16, "out_channels": 16}))
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    vae = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").write_text(json.dumps({**vae, "z_dim": 16, "scale_factor_spatial": 8}))
    index = json.loads((folder / "model_index.json").read_text())
    index.update(transformer_2=index["transformer"], boundary_ratio=0.875, expand_timesteps=False)
    (folder / "model_index.json").write_text(json.dumps(index))


def test_two_experts_are_recognised_and_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tree["model"]["path"], tmp_path / "model"))
    make_t2v_a14b(folder)
    tree["model"]["path"] = str(folder)
    fault = only_fault(tree)
    assert "wan2.2-t2v-a14b" in fault
    assert "later version" in fault


def test_a_start_adapter_that_is_not_there(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["model"]["init_adapter"] = str(tmp_path)
    assert only_fault(tree).startswith(f"model.init_adapter: {tmp_path}: holds no adapter")


def test_a_start_adapter_must_fit(tree: dict[str, Any], tmp_path: Path) -> None:
    transformer = load_transformer(Path(tree["model"]["path"]), dtype="fp32")
    inject_lora(transformer, rank=4, alpha=8, targets=("to_q",), seed=0)
    save_adapter(tmp_path, {n: p.detach() for n, p in trainable_parameters(transformer)}, rank=4, alpha=8)
    tree["model"].update(init_adapter=str(tmp_path), lora_rank=4, lora_alpha=8, lora_targets=["to_q"])
    check(tree)
    tree["model"].update(lora_rank=8, lora_alpha=9)
    faults = faults_of(tree)
    assert any("expected (8, " in fault for fault in faults)
    assert any("was trained with alpha 8" in fault for fault in faults)
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(b"not safetensors")
    assert "is not a readable adapter" in only_fault(tree)


def test_adapter_targets_that_match_nothing(tree: dict[str, Any]) -> None:
    tree["model"]["lora_targets"] = ["self_attn.q"]
    assert "'self_attn.q' matches no linear layer of a block" in only_fault(tree)


def test_weights_of_another_configuration_are_found_before_they_are_loaded(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tree["model"]["path"], tmp_path / "model"))
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_layers": 3}))
    tree["model"]["path"] = str(folder)
    fault = only_fault(tree)
    assert "the weights do not fit config.json" in fault
    assert "missing, first blocks.2." in fault


@pytest.mark.parametrize("component", ["vae", "text_encoder"])
def test_a_tensor_that_is_missing_from_what_only_the_engine_loads_is_found(
    tree: dict[str, Any], tmp_path: Path, component: str
) -> None:
    folder = Path(shutil.copytree(tree["model"]["path"], tmp_path / "model"))
    tree["model"]["path"] = str(folder)
    (file,) = (folder / component).glob("*.safetensors")
    tensors = load_file(file)
    lost = next(name for name in sorted(tensors) if "block" in name)
    del tensors[lost]
    save_file(tensors, file)
    fault = only_fault(tree)
    assert f"{folder / component}: the weights do not fit config.json (1 missing, first {lost})" in fault


@pytest.mark.parametrize("component", ["vae", "text_encoder", "transformer"])
def test_a_configuration_that_makes_no_model_is_a_fault_and_no_traceback(
    tree: dict[str, Any], tmp_path: Path, component: str
) -> None:
    folder = Path(shutil.copytree(tree["model"]["path"], tmp_path / "model"))
    tree["model"]["path"] = str(folder)
    config = folder / component / "config.json"
    key = {"vae": "dim_mult", "text_encoder": "d_model", "transformer": "ffn_dim"}[component]
    config.write_text(json.dumps({**json.loads(config.read_text()), key: "x"}))
    assert f"{folder / component}: config.json describes no" in " ".join(faults_of(tree))


@pytest.mark.parametrize("heads", ["x", None, 0, -2, 2.5, [2]])
def test_a_number_of_heads_that_is_none(tree: dict[str, Any], tmp_path: Path, heads: Any) -> None:
    folder = Path(shutil.copytree(tree["model"]["path"], tmp_path / "model"))
    tree["model"]["path"] = str(folder)
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_attention_heads": heads}))
    assert f"num_attention_heads is {heads!r}: not a positive whole number" in only_fault(tree)


@pytest.mark.parametrize(
    "weight_map", [None, [], {}, {"a": "../a.safetensors"}, {"a": "/etc/passwd"}, {"a": "x" * 5000}]
)
def test_an_index_that_names_no_files_of_its_folder(tree: dict[str, Any], tmp_path: Path, weight_map: Any) -> None:
    folder = Path(shutil.copytree(tree["model"]["path"], tmp_path / "model"))
    tree["model"]["path"] = str(folder)
    index = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "names no files of this folder" in only_fault(tree)


# --- mesh


def test_a_mesh_that_shards_nothing(tree: dict[str, Any]) -> None:
    tree["cluster"]["num_gpus"] = 2
    tree["training"] = {"dp_size": 1}
    assert "shards nothing" in only_fault(tree)


def test_a_mesh_that_does_not_fit_its_devices(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda(tree, monkeypatch, exist=1, each=2**16)
    fault = only_fault(tree)
    assert "training.dp_size = 1: a rank needs" in fault
    assert "has 0.06 MiB" in fault


# --- video size


@pytest.mark.parametrize(
    ("change", "place", "nearest"),
    [
        ({"width": 100}, "rollout.width", "96 and 128"),
        ({"height": 720}, "rollout.width, rollout.height", "704 and 736"),
        ({"num_frames": 6}, "rollout.num_frames", "5 and 9"),
        ({"num_frames": 1}, "rollout.num_frames", "at least 5 frames"),
    ],
)
def test_an_illegal_size_names_the_nearest_legal_values(
    tree: dict[str, Any], change: dict[str, int], place: str, nearest: str
) -> None:
    tree["rollout"].update(change)
    fault = only_fault(tree)
    assert fault.startswith(place)
    assert nearest in fault


@pytest.mark.parametrize(("tp", "sp", "split"), [(3, 1, 3), (2, 2, 4)])
def test_attention_heads_must_divide_over_an_engines_devices(
    tree: dict[str, Any], tp: int, sp: int, split: int
) -> None:
    tree["cluster"]["num_gpus"] = tp * sp
    shard_over_all(tree)
    tree["rollout"].update(tp_size=tp, sp_size=sp)
    fault = only_fault(tree)
    assert fault.startswith(f"rollout.tp_size x rollout.sp_size = {tp} x {sp}: the 2 attention heads")
    assert f"do not divide by {split}; it can be 1, 2" in fault


def test_one_frame_without_images_is_legal(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["data"] = {"train": write_lines(tmp_path / "a.jsonl", {"input": "a"}), "eval": None}
    tree["eval"]["interval"] = 0
    tree["rollout"]["num_frames"] = 1
    check(tree)


def write_hollow_weights(folder: Path) -> None:
    """Weights of the shapes that config.json says, as a file with a header and a hole: no disk, no time."""
    transformer = meta_transformer(json.loads((folder / "config.json").read_text()))
    header, end = {}, 0
    for name, tensor in transformer.state_dict().items():
        start, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (file,) = folder.glob("*.safetensors")
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def test_the_released_size_below_its_trained_sizes_is_a_warning(tree: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tree["model"]["path"], tmp_path / "model"))
    config = folder / "transformer" / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "num_attention_heads": 24, "attention_head_dim": 128})
    )
    write_hollow_weights(folder / "transformer")
    tree["model"]["path"] = str(folder)
    (warning,) = check(tree).warnings
    assert "32x32 is below the sizes wan2.2-ti2v-5b was trained at (1280x704 or 704x1280)" in warning
    tree["rollout"].update(width=704, height=1280)
    assert not any("trained at" in warning for warning in check(tree).warnings)


# --- rewards


@pytest.mark.parametrize("field", ["model", "processor"])
def test_reward_folders_must_exist(tree: dict[str, Any], tmp_path: Path, field: str) -> None:
    tree["reward"]["functions"][0][field] = str(tmp_path / "absent")
    assert only_fault(tree) == (
        f"reward.functions: pickscore: {field} {tmp_path / 'absent'}: no such folder; give a CLIP folder or a hub id"
    )


@pytest.mark.parametrize(("field", "words"), [("model", "holds no config.json"), ("processor", "holds none of")])
def test_reward_folders_must_hold_what_they_are_for(
    tree: dict[str, Any], tmp_path: Path, field: str, words: str
) -> None:
    tree["reward"]["functions"][0][field] = str(tmp_path)
    assert words in only_fault(tree)


def test_a_reward_folder_must_be_a_whole_clip(tree: dict[str, Any], tmp_path: Path) -> None:
    source, copy = tree["reward"]["functions"][0]["model"], tmp_path / "reward"
    shutil.copytree(source, copy)
    tree["reward"]["functions"][0].update(model=str(copy), processor=str(copy))
    (weights,) = copy.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    (copy / "tokenizer.json").unlink()
    assert "cannot tell texts apart" in faults_of(tree)[1]
    (copy / "tokenizer.json").write_text("{")
    faults = faults_of(tree)
    assert len(faults) == 2
    assert f"{weights}: is not a whole weight file" in faults[0]
    assert "does not load as a CLIP processor" in faults[1]
    (copy / "config.json").write_text('{"model_type": "bert"}')
    assert "is a model of type 'bert'" in faults_of(tree)[0]


def test_hub_ids_of_rewards_are_faults_only_when_they_cannot_come(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["reward"]["functions"] = [{"name": "pickscore"}]  # the released model and processor, by hub id
    monkeypatch.setattr(rewards, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(rewards, "is_offline_mode", lambda: True)
    faults = faults_of(tree)
    assert len(faults) == 2
    assert all("HF_HUB_OFFLINE" in fault for fault in faults)
    monkeypatch.setattr(rewards, "is_offline_mode", lambda: False)
    check(tree)


def test_a_users_reward_must_be_importable(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_for_doctor.py").write_text("def good(batch): return [0.0] * len(batch)\n")
    monkeypatch.syspath_prepend(tmp_path)
    tree["reward"]["functions"] = [{"name": "mine_for_doctor:good"}]
    check(tree)
    tree["reward"]["functions"] = [{"name": "mine_for_doctor:bad"}]
    assert "has no 'bad'" in only_fault(tree)


# --- devices


def test_more_worker_slots_than_cores_is_a_warning(tree: dict[str, Any]) -> None:
    cores = len(os.sched_getaffinity(0))
    tree["cluster"]["num_gpus"] = cores + 1
    shard_over_all(tree)
    (warning,) = check(tree).warnings
    assert f"{cores + 1} worker slots share {cores} CPU core(s)" in warning


def shard_over_all(tree: dict[str, Any]) -> None:
    """Every device gets a rank and a prompt."""
    devices = tree["cluster"].get("num_gpus", 1)
    tree["training"] = {"dp_size": devices}
    tree["rollout"]["prompts_per_rollout"] = devices


def use_cuda(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, exist: int, each: int = 2**36, **cluster: Any
) -> list[str | None]:
    """Pretend that ``exist`` devices exist; the lists that were asked about are returned."""
    lists: list[str | None] = []

    def ask(environment: dict[str, str]) -> list[int]:
        listed = environment.get("CUDA_VISIBLE_DEVICES")
        lists.append(listed)
        if listed is None:
            return [each] * exist
        numbers = [int(number) for number in listed.split(",") if number]
        seen = next((i for i, number in enumerate(numbers) if number >= exist), len(numbers))  # as CUDA reads it
        return [each] * seen

    monkeypatch.setattr(machine, "cuda_device_bytes", ask)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tree["cluster"] = {"device": "cuda", **cluster}
    shard_over_all(tree)
    return lists


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


# --- output folder


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
