"""What leaves a quantized trainer is plain weights: the engine's checkpoint, and merged adapters."""

from __future__ import annotations

import json
import shutil
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from quantized_base import adapted, output_of, write_odd_transformer
from safetensors.torch import load_file, save_file

from miles_wan.errors import InputError, MilesWanError
from miles_wan.tiny import TinyPaths
from miles_wan.wan import dequantised
from miles_wan.wan.dequantised import RECORD, dequantised_checkpoint
from miles_wan.wan.family import check_model_folder, load_family
from miles_wan.wan.load import load_transformer
from miles_wan.wan.merge import merged_weights, save_merged
from miles_wan.wan.quantized_linear import QuantizedLinear

SCHEMES = pytest.mark.parametrize("scheme", ["int8", "fp8"])
DTYPES = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
WEIGHTS = "diffusion_pytorch_model.safetensors"
NAME = "blocks.0.attn1.to_q.weight"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_odd_transformer(tmp_path_factory.mktemp("odd"))


@pytest.fixture
def model(tiny_paths: TinyPaths, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may change."""
    return shutil.copytree(tiny_paths.model, tmp_path / "model")


@SCHEMES
@DTYPES
def test_the_engine_loads_bit_for_bit_what_the_trainer_computes_with(
    tiny_paths: TinyPaths, tmp_path: Path, scheme: Any, dtype: str
) -> None:
    out = dequantised_checkpoint(load_family(tiny_paths.model), scheme, dtype, tmp_path / "engine")
    trainer = load_transformer(tiny_paths.model, dtype=dtype, quantization=scheme)
    stored = load_file(out / "transformer" / WEIGHTS)
    for name, parameter in trainer.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        layer = trainer.get_submodule(prefix)
        if leaf == "weight_scale":
            continue
        if leaf == "weight" and isinstance(layer, QuantizedLinear):
            product = (layer.weight.float() * layer.weight_scale[:, None]).to(layer.compute_dtype)
            assert torch.equal(stored.pop(name), product), name
        else:
            assert torch.equal(stored.pop(name), parameter), name
    assert not stored
    with torch.no_grad():
        types = {"dtype": torch.bfloat16} if dtype == "bf16" else {}
        engine = load_transformer(out, dtype=dtype)
        assert torch.equal(output_of(engine, **types), output_of(trainer, **types))


@SCHEMES
def test_the_folder_is_a_whole_checkpoint_of_the_same_model(tiny_paths: TinyPaths, tmp_path: Path, scheme: Any) -> None:
    source = load_family(tiny_paths.model)
    out = dequantised_checkpoint(source, scheme, "fp32", tmp_path / "engine")
    assert check_model_folder(out) == []
    made = load_family(out)
    assert (made.family, made.transformer, made.vae) == (source.family, source.transformer, source.vae)
    pipeline = WanPipeline.from_pretrained(out, local_files_only=True)
    assert pipeline.config.expand_timesteps
    assert (out / "vae").resolve() == (tiny_paths.model / "vae").resolve()


def test_both_experts_are_dequantised(tiny_paths: TinyPaths, model: Path, tmp_path: Path) -> None:
    other = load_transformer(model, dtype="fp32")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.save_pretrained(model / "transformer_2")
    one = load_family(tiny_paths.model)
    two = type(one)(
        **{name: getattr(one, name) for name in one.__dataclass_fields__}
        | {
            "path": model,
            "family": type(one.family)(**vars(one.family) | {"experts": ("transformer", "transformer_2")}),
        }
    )
    out = dequantised_checkpoint(two, "int8", "fp32", tmp_path / "engine")
    for expert in two.experts:
        assert not (out / expert).is_symlink()
        trainer = dict(merged_weights(load_transformer(model, dtype="fp32", subfolder=expert, quantization="int8")))
        stored = load_file(out / expert / WEIGHTS)
        assert all(torch.equal(tensor, stored[name]) for name, tensor in trainer.items())


def test_without_quantization_the_engine_loads_the_checkpoint_itself(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    assert dequantised_checkpoint(load_family(tiny_paths.model), "none", "bf16", tmp_path / "x") == tiny_paths.model
    assert list(tmp_path.iterdir()) == []


def made_at(out: Path) -> int:
    return (out / RECORD).stat().st_mtime_ns


def test_a_whole_folder_of_the_same_weights_is_kept_and_any_other_is_made_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run" / "engine"

    def make(scheme: Any = "int8", dtype: str = "fp32") -> bool:
        """Whether it was made again."""
        before = made_at(out) if out.exists() else None
        dequantised_checkpoint(load_family(model), scheme, dtype, out)
        return made_at(out) != before

    assert make()
    assert not make()
    assert make("fp8")
    assert make("fp8", "bf16")
    assert not make("fp8", "bf16")
    file = model / "transformer" / WEIGHTS
    weights, size = load_file(file), file.stat().st_size
    save_file(weights | {NAME: -weights[NAME]}, file, metadata={"format": "pt"})
    assert file.stat().st_size == size
    assert make("fp8", "bf16")
    stored = load_file(out / "transformer" / WEIGHTS)
    trainer = dict(merged_weights(load_transformer(model, dtype="bf16", quantization="fp8")))
    assert all(torch.equal(tensor, stored[name]) for name, tensor in trainer.items())
    with (out / "transformer" / WEIGHTS).open("r+b") as file:
        file.truncate(1000)
    assert make("fp8", "bf16")
    assert check_model_folder(out) == []
    (out / RECORD).write_text("{")
    assert make("fp8", "bf16")
    assert {path.name for path in out.parent.iterdir()} == {"engine", ".engine.lock"}


def test_what_a_killed_call_left_is_not_taken_for_a_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "engine"

    def killed(transformer: Any, folder: Path) -> None:
        save_merged(transformer, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(dequantised, "save_merged", killed)
    with pytest.raises(KeyboardInterrupt):
        dequantised_checkpoint(load_family(model), "int8", "fp32", out)
    assert not out.exists()
    monkeypatch.undo()
    (out.with_name(".engine.partial") / "stale").write_text("")
    dequantised_checkpoint(load_family(model), "int8", "fp32", out)
    assert not (out / "stale").exists()
    assert not out.with_name(".engine.partial").exists()


def test_calls_at_the_same_time_make_it_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def counted(transformer: Any, folder: Path) -> None:
        written.append(folder)
        save_merged(transformer, folder)

    monkeypatch.setattr(dequantised, "save_merged", counted)
    folder, out = load_family(model), tmp_path / "engine"
    threads = [threading.Thread(target=dequantised_checkpoint, args=(folder, "int8", "fp32", out)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1
    assert check_model_folder(out) == []


def test_nothing_else_is_replaced(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "videos"
    out.mkdir()
    (out / "mine.mp4").write_text("")
    with pytest.raises(InputError, match="is to hold the dequantised checkpoint, but is something else; move it away"):
        dequantised_checkpoint(load_family(model), "int8", "fp32", out)
    assert (out / "mine.mp4").exists()
    with pytest.raises(InputError, match="lies inside the checkpoint that it is made from"):
        dequantised_checkpoint(load_family(model), "int8", "fp32", model / "engine")


def test_a_full_disk_is_told_before_the_work(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 2**10))
    with pytest.raises(InputError, match=r"GiB, 0\.0 GiB are free; give more space"):
        dequantised_checkpoint(load_family(model), "int8", "fp32", tmp_path / "engine")
    assert not (tmp_path / ".engine.partial").exists()


def test_a_folder_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(MilesWanError, match=r"run/engine could not be written \(.*\); free or give another place"):
        dequantised_checkpoint(load_family(model), "int8", "fp32", tmp_path / "run" / "engine")


@SCHEMES
@DTYPES
def test_merging_folds_the_adapter_into_the_dequantised_base_as_peft_does(
    odd: Path, tmp_path: Path, scheme: Any, dtype: str
) -> None:
    quantized = adapted(odd, quantization=scheme, dtype=dtype)
    merged = dict(merged_weights(quantized))
    reference = adapted(odd, dtype=dtype)
    layers = dict(reference.named_modules())
    for name, layer in quantized.named_modules():
        if isinstance(layer, QuantizedLinear):
            layers[name].weight.data = layer.dequantised()
    reference.fuse_lora()
    expected = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in reference.state_dict().items()
        if ".lora_" not in name
    }
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == expected[name].dtype
        # peft adds in place: a float32 update to a bf16 weight is one rounding, too.
        torch.testing.assert_close(tensor, expected[name], rtol=2.0**-8 if dtype == "bf16" else 1e-6, atol=1e-6)
    # Rounded to 8 bits again, the small update would be lost: it is there.
    plain = dict(merged_weights(load_transformer(odd, dtype=dtype, quantization=scheme)))
    lora = quantized.get_submodule("blocks.0.attn1.to_q")
    update = 6 / 4 * lora.lora_B["default"].weight @ lora.lora_A["default"].weight
    torch.testing.assert_close(merged[NAME] - plain[NAME], update.to(merged[NAME].dtype), rtol=0.05, atol=5e-3)


@SCHEMES
def test_a_merged_export_computes_what_the_adapted_transformer_does(odd: Path, tmp_path: Path, scheme: Any) -> None:
    transformer = adapted(odd, quantization=scheme)
    before = {name: parameter.clone() for name, parameter in transformer.named_parameters()}
    save_merged(transformer, tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(output_of(loaded), output_of(transformer), rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["ffn_dim"] == 63
    assert all(torch.equal(parameter, before[name]) for name, parameter in transformer.named_parameters())


@SCHEMES
def test_peft_does_not_merge_into_8_bits_without_a_word(odd: Path, scheme: Any) -> None:
    transformer = adapted(odd, quantization=scheme)
    with pytest.raises((RuntimeError, NotImplementedError)):
        transformer.fuse_lora()
