"""Adapters: one pair per layer, float32, in a file that diffusers reads with the same result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from golden_data import padded_embeds, ti2v_rollout, write_model_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from miles_wan.errors import InputError
from miles_wan.wan.load import load_transformer
from miles_wan.wan.lora import (
    WEIGHTS_NAME,
    inject_lora,
    layer_prefix,
    load_adapter,
    report,
    save_adapter,
    trainable_parameters,
)

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
RANK, ALPHA = 4, 6


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("lora") / "model")


def fresh(model_folder: Path, *, rank=RANK, alpha=ALPHA, targets=TARGETS, seed=0, dtype="fp32", b=0.0) -> nn.Module:
    """The golden transformer with adapters; B is ``b`` times normal noise."""
    model = load_transformer(model_folder, dtype=dtype)
    inject_lora(model, rank=rank, alpha=alpha, targets=targets, seed=seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model):
            if "lora_B" in name and b:
                parameter.copy_(b * torch.randn(parameter.shape, generator=generator))
    return model


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainable_parameters(model)}


def output_of(model: nn.Module) -> Tensor:
    x = ti2v_rollout()["trajectory.latents"][1][None]
    text = padded_embeds("prompt_embeds")[None]
    with torch.no_grad():
        return model(hidden_states=x, timestep=torch.tensor([952.663]), encoder_hidden_states=text, return_dict=False)[
            0
        ]


def test_every_target_layer_of_every_block_carries_exactly_one_pair(model_folder):
    names = [name for name, _ in trainable_parameters(fresh(model_folder))]
    layers = {
        f"blocks.{block}.{layer}"
        for block in range(2)
        for layer in (
            *(f"{attention}.{part}" for attention in ("attn1", "attn2") for part in TARGETS[:4]),
            "ffn.net.0.proj",
            "ffn.net.2",
        )
    }
    assert {layer_prefix(name) for name in names} == layers
    assert sorted(names) == sorted(f"{layer}.lora_{side}.weight" for layer in layers for side in "AB")


def test_only_adapters_are_trained_and_the_base_output_is_unchanged(model_folder):
    model = fresh(model_folder)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert len(frozen) == len(dict(load_transformer(model_folder, dtype="fp32").named_parameters()))
    assert torch.equal(output_of(model), output_of(load_transformer(model_folder, dtype="fp32")))


def test_the_first_values_follow_from_the_seed_alone(model_folder):
    def adapter(*, seed: int, surroundings: int) -> dict[str, Tensor]:
        model = load_transformer(model_folder, dtype="fp32")
        torch.manual_seed(surroundings)
        before = torch.get_rng_state()
        inject_lora(model, rank=RANK, alpha=ALPHA, targets=TARGETS, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return adapter_of(model)

    first, again = adapter(seed=3, surroundings=5), adapter(seed=3, surroundings=6)
    other = adapter(seed=4, surroundings=5)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    assert all(bool((first[name] == 0).all()) for name in first if "lora_B" in name)


def test_adapters_are_float32_on_a_bf16_base(model_folder):
    model = fresh(model_folder, dtype="bf16")
    assert model.blocks[0].attn1.to_q.base_layer.weight.dtype == torch.bfloat16
    assert {parameter.dtype for _, parameter in trainable_parameters(model)} == {torch.float32}


def test_counts_follow_the_formula(model_folder):
    model = fresh(model_folder, rank=8)
    inner, ffn = 48, 64
    pairs = 8 * (inner + inner) + (inner + ffn) + (ffn + inner)  # per block and rank
    counted = report(model)
    base = sum(p.numel() for p in load_transformer(model_folder, dtype="fp32").parameters())
    assert counted.trainable_parameters == 2 * 8 * pairs
    assert counted.total_parameters == base + counted.trainable_parameters
    assert (counted.blocks, counted.lora_tensors, counted.layer_prefixes) == (2, 40, 20)


def test_a_target_that_matches_nothing_is_an_error_that_lists_the_layers(model_folder):
    model = load_transformer(model_folder, dtype="fp32")
    with pytest.raises(InputError) as error:
        inject_lora(model, rank=4, alpha=4, targets=("to_q", "q", "ffn.0"), seed=0)
    assert len(error.value.faults) == 2
    assert all("matches no linear layer of a block; layers are attn1.to_k" in fault for fault in error.value.faults)
    assert "'q'" in error.value.faults[0]


def test_targets_outside_the_blocks_are_not_taken(model_folder):
    model = load_transformer(model_folder, dtype="fp32")
    with pytest.raises(InputError):
        inject_lora(model, rank=4, alpha=4, targets=("proj_out",), seed=0)
    names = [name for name, _ in trainable_parameters(fresh(model_folder, targets=("ffn.net.2",)))]
    assert {layer_prefix(name) for name in names} == {"blocks.0.ffn.net.2", "blocks.1.ffn.net.2"}


def test_diffusers_loads_an_export_and_computes_the_same(model_folder, tmp_path, tiny_paths):
    trained = fresh(model_folder, b=0.3)
    save_adapter(tmp_path, adapter_of(trained), rank=RANK, alpha=ALPHA)
    pipeline = WanPipeline.from_pretrained(tiny_paths.model, local_files_only=True)
    pipeline.transformer = WanTransformer3DModel.from_pretrained(model_folder, subfolder="transformer")
    base = output_of(pipeline.transformer)
    pipeline.load_lora_weights(str(tmp_path), weight_name=WEIGHTS_NAME)
    loaded = output_of(pipeline.transformer)
    torch.testing.assert_close(loaded, output_of(trained), rtol=0, atol=1e-5)
    assert float((loaded - base).abs().max()) > 1e-3


def test_the_scale_is_alpha_over_rank(model_folder):
    by_alpha = fresh(model_folder, b=0.3, alpha=12)
    doubled = fresh(model_folder, b=0.3, alpha=6)
    with torch.no_grad():
        for name, parameter in trainable_parameters(doubled):
            if "lora_B" in name:
                parameter.mul_(2)
    torch.testing.assert_close(output_of(by_alpha), output_of(doubled), rtol=0, atol=1e-5)


def test_an_export_states_its_rank_and_alpha(model_folder, tmp_path):
    save_adapter(tmp_path, adapter_of(fresh(model_folder)), rank=RANK, alpha=ALPHA)
    with safe_open(tmp_path / WEIGHTS_NAME, "pt") as handle:
        metadata = json.loads(handle.metadata()["lora_adapter_metadata"])
    assert (metadata["transformer.r"], metadata["transformer.lora_alpha"]) == (RANK, ALPHA)


@pytest.mark.parametrize("as_file", [True, False])
def test_an_adapter_comes_back_as_it_was_saved(model_folder, tmp_path, as_file):
    trained = fresh(model_folder, b=0.3)
    save_adapter(tmp_path, adapter_of(trained), rank=RANK, alpha=ALPHA)
    start = fresh(model_folder, seed=9)
    load_adapter(start, tmp_path / WEIGHTS_NAME if as_file else tmp_path, alpha=ALPHA)
    expected, got = adapter_of(trained), adapter_of(start)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def faults_of(model: nn.Module, path: Path, *, alpha: int = ALPHA) -> str:
    with pytest.raises(InputError) as error:
        load_adapter(model, path, alpha=alpha)
    return "\n".join(error.value.faults)


def test_an_adapter_of_another_rank_alpha_or_layers_is_refused_with_every_fault(model_folder, tmp_path):
    trained = adapter_of(fresh(model_folder, targets=("to_q", "to_k")))
    save_adapter(tmp_path, trained, rank=RANK, alpha=ALPHA)
    start = fresh(model_folder, rank=8, targets=("to_q", "to_v"))
    before = adapter_of(start)
    faults = faults_of(start, tmp_path, alpha=5)
    assert "lacks blocks.0.attn1.to_v.lora_A.weight" in faults
    assert "has blocks.0.attn1.to_k.lora_A.weight, which model.lora_targets leaves out" in faults
    assert "expected (8, 48); set model.lora_rank" in faults
    assert "was trained with alpha 6, model.lora_alpha is 5" in faults
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter_of(start).items())


def test_another_alpha_alone_is_refused(model_folder, tmp_path):
    save_adapter(tmp_path, adapter_of(fresh(model_folder)), rank=RANK, alpha=ALPHA)
    assert "was trained with alpha 6, model.lora_alpha is 8" in faults_of(fresh(model_folder), tmp_path, alpha=8)


def test_a_missing_or_broken_file_is_refused_with_its_name(model_folder, tmp_path):
    model = fresh(model_folder)
    assert f"{tmp_path}: holds no adapter" in faults_of(model, tmp_path)
    (tmp_path / WEIGHTS_NAME).write_bytes(b"not safetensors")
    assert "is not a readable adapter in safetensors format" in faults_of(model, tmp_path)


def test_a_file_without_metadata_is_taken_by_its_shapes(model_folder, tmp_path):
    stored = adapter_of(fresh(model_folder, b=0.3))
    save_file({f"transformer.{name}": tensor for name, tensor in stored.items()}, tmp_path / WEIGHTS_NAME)
    start = fresh(model_folder)
    load_adapter(start, tmp_path, alpha=ALPHA)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in adapter_of(start).items())
    assert set(load_file(tmp_path / WEIGHTS_NAME)) == {f"transformer.{name}" for name in stored}
