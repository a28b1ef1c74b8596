"""The model folder, its weights, adapters, mesh and the video size are checked from headers alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_cases import check, faults_of, only_fault, shard_over_all, use_cuda, write_lines
from safetensors.torch import load_file, save_file

from miles_wan.wan.load import load_transformer, meta_transformer
from miles_wan.wan.lora import inject_lora, save_adapter, trainable_parameters


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


def test_a_mesh_that_shards_nothing(tree: dict[str, Any]) -> None:
    tree["cluster"]["num_gpus"] = 2
    tree["training"] = {"dp_size": 1}
    assert "shards nothing" in only_fault(tree)


def test_a_mesh_that_does_not_fit_its_devices(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda(tree, monkeypatch, exist=1, each=2**16)
    fault = only_fault(tree)
    assert "training.dp_size = 1: a rank needs" in fault
    assert "has 0.06 MiB" in fault


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


def test_attention_heads_are_no_matter_where_the_ranks_generate(tree: dict[str, Any]) -> None:
    tree["cluster"]["num_gpus"] = 3
    shard_over_all(tree)
    tree["rollout"].update(tp_size=3, engine="local")
    check(tree)


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
