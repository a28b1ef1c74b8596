"""An exported checkpoint computes what its base with its adapters does, is whole, and is written whole or not at all."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from quantized_base import ALPHA, RANK, adapted, output_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from miles_wan import cli
from miles_wan.errors import InputError, MilesWanError
from miles_wan.tiny import TinyPaths
from miles_wan.wan import export
from miles_wan.wan.export import export_checkpoint
from miles_wan.wan.family import check_model_folder, load_family
from miles_wan.wan.load import load_transformer
from miles_wan.wan.lora import WEIGHTS_NAME, adapter_folder, inject_lora, save_adapter, trainable_parameters
from miles_wan.wan.merge import merged_weights

WEIGHTS = "diffusion_pytorch_model.safetensors"
EXPERTS = ("transformer", "transformer_2")


def write_adapters(model: Path, root: Path, *, names: tuple[str, ...] = EXPERTS) -> Path:
    """Adapters that are not zero, another one for each expert."""
    folder = load_family(model)
    for number, name in enumerate(folder.experts):
        if name not in names:
            continue
        transformer = load_transformer(model, dtype="fp32", subfolder=name)
        inject_lora(transformer, rank=RANK, alpha=ALPHA, targets=("to_q", "to_out.0", "ffn.net.2"), seed=number)
        draw = torch.Generator().manual_seed(number)
        tensors = {n: 0.3 * torch.randn(p.shape, generator=draw) for n, p in trainable_parameters(transformer)}
        save_adapter(adapter_folder(root, name, folder.routing), tensors, rank=RANK, alpha=ALPHA)
    return root


@torch.no_grad()
def output(transformer: Any) -> torch.Tensor:
    return output_of(transformer.eval())


@pytest.mark.parametrize("paths", ["tiny_paths", "t2v_paths", "i2v_paths"])
def test_an_export_computes_what_diffusers_does_with_the_adapters(
    request: pytest.FixtureRequest, tmp_path: Path, paths: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model, out = request.getfixturevalue(paths).model, tmp_path / "new" / "out"
    adapters = write_adapters(model, tmp_path / "adapter")
    cli.main(["export", "--model", str(model), "--adapter", str(adapters), "--out", str(out)])
    assert check_model_folder(out) == []
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert not any(path.is_symlink() for path in out.rglob("*"))
    folder = load_family(model)
    assert load_family(out).routing == folder.routing
    exported = WanPipeline.from_pretrained(out, local_files_only=True)
    reference = WanPipeline.from_pretrained(model, local_files_only=True)
    told = capfd.readouterr().err.replace("\n", "")
    for name in folder.experts:
        plain = output(getattr(reference, name))
        place = adapter_folder(adapters, name, folder.routing)
        second = {"load_into_transformer_2": True} if name == "transformer_2" else {}
        reference.load_lora_weights(str(place), weight_name=WEIGHTS_NAME, **second)
        expected = output(getattr(reference, name))
        torch.testing.assert_close(output(getattr(exported, name)), expected, rtol=0, atol=1e-5)
        assert float((expected - plain).abs().max()) > 1e-3
        assert f"merged with {place / WEIGHTS_NAME}" in told


def test_an_expert_without_an_adapter_stays_as_it_is_and_that_is_told(t2v_paths: TinyPaths, tmp_path: Path) -> None:
    adapters = write_adapters(t2v_paths.model, tmp_path / "adapter", names=("transformer_2",))
    merged = export_checkpoint(t2v_paths.model, adapters, tmp_path / "out")
    assert merged == {"transformer": None, "transformer_2": adapters / "transformer_2" / WEIGHTS_NAME}
    before, after = (load_file(model / "transformer" / WEIGHTS) for model in (t2v_paths.model, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_keep_the_type_that_they_are_stored_in(tiny_paths: TinyPaths, tmp_path: Path, dtype: str) -> None:
    model = Path(shutil.copytree(tiny_paths.model, tmp_path / "model"))
    load_transformer(model, dtype=dtype).save_pretrained(model / "transformer")
    export_checkpoint(model, write_adapters(model, tmp_path / "adapter"), tmp_path / "out")

    def types(folder: Path) -> dict[str, str]:
        with safe_open(folder / "transformer" / WEIGHTS, "pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118

    assert types(tmp_path / "out") == types(model)
    assert ("BF16" in types(model).values()) == (dtype == "bf16")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_an_adapter_of_a_quantized_base_is_folded_into_what_it_was_trained_on(
    tiny_paths: TinyPaths, tmp_path: Path, scheme: Any, dtype: str
) -> None:
    trained = adapted(tiny_paths.model, quantization=scheme, dtype=dtype)
    tensors = {name: parameter.detach() for name, parameter in trainable_parameters(trained)}
    save_adapter(tmp_path / "adapter", tensors, rank=RANK, alpha=ALPHA)
    export_checkpoint(tiny_paths.model, tmp_path / "adapter", tmp_path / "out", quantization=scheme, dtype=dtype)
    stored = load_file(tmp_path / "out" / "transformer" / WEIGHTS)
    expected = dict(merged_weights(trained))  # its own tests: dequantised first, then as peft merges
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    if dtype == "fp32":
        exported = WanTransformer3DModel.from_pretrained(tmp_path / "out", subfolder="transformer")
        torch.testing.assert_close(output(exported), output(trained), rtol=0, atol=1e-5)


def faults_of(*arguments: Any) -> tuple[str, ...]:
    with pytest.raises(InputError) as raised:
        export_checkpoint(*arguments)
    return raised.value.faults


def test_faults_are_told_together(t2v_paths: TinyPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, adapters = tmp_path / "out", write_adapters(t2v_paths.model, tmp_path / "adapter")
    out.mkdir()
    file = adapters / "transformer" / WEIGHTS_NAME
    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    del tensors["transformer.blocks.0.attn1.to_q.lora_B.weight"]
    save_file(tensors, file, metadata=metadata)
    (adapters / "transformer_2" / WEIGHTS_NAME).write_bytes(b"not safetensors")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 2**10))
    exists, broken, unreadable, space = faults_of(t2v_paths.model, adapters, out)
    assert exists == f"--out: {out}: exists already; choose another folder or move it away"
    assert f"--adapter: {file} does not fit this model: 1 tensors differ, first blocks.0.attn1.to_q.lora_B" in broken
    assert "is missing and should be (" in broken
    assert "is not a readable adapter" in unreadable
    assert "the checkpoint takes 0.0 GiB, 0.0 GiB are free" in space
    assert list(out.iterdir()) == []


def test_an_adapter_of_another_model_or_none_is_refused(
    tiny_paths: TinyPaths, t2v_paths: TinyPaths, tmp_path: Path
) -> None:
    adapters = write_adapters(t2v_paths.model, tmp_path / "adapter")
    (fault,) = faults_of(tiny_paths.model, adapters, tmp_path / "out")
    assert fault.startswith(f"--adapter: {adapters}: holds no adapter for this model; it is looked for at {adapters}/")
    (fault,) = faults_of(t2v_paths.model, adapters / "transformer", tmp_path / "out")
    assert fault.endswith(
        f"transformer/transformer/{WEIGHTS_NAME} and/or {adapters}/transformer/transformer_2/{WEIGHTS_NAME}"
    )
    (fault,) = faults_of(tmp_path / "nothing", adapters, tmp_path / "out")
    assert fault.startswith(f"--model: {tmp_path / 'nothing'}: no such model folder")
    own = write_adapters(tiny_paths.model, tmp_path / "own")
    (fault,) = faults_of(tiny_paths.model, own, tiny_paths.model / "out")
    assert "lies inside the checkpoint" in fault
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_nothing(tiny_paths: TinyPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = write_adapters(tiny_paths.model, tmp_path / "adapter")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_weights", full)
    with pytest.raises(MilesWanError, match=r"out could not be written \(.*No space left on device\); free space"):
        export_checkpoint(tiny_paths.model, adapters, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
