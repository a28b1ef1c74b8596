"""A base in 8 bits: what it holds, what it leaves alone, and that adapters on it come out and train as on a plain one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from golden_data import single
from quantized_base import ALPHA, RANK, TARGETS, adapted, gradients_of, output_of, write_odd_transformer
from safetensors.torch import load_file, save_file

from miles_wan.errors import InputError
from miles_wan.training.mesh import estimate, held_bytes
from miles_wan.wan.facts import FAMILIES
from miles_wan.wan.load import load_transformer, meta_transformer, weight_file_faults
from miles_wan.wan.lora import inject_lora, report, trainable_parameters
from miles_wan.wan.quantization import parameter_bytes, parameter_count, quantize_transformer
from miles_wan.wan.quantized_linear import FORMATS, QuantizedLinear

SCHEMES = pytest.mark.parametrize("scheme", ["int8", "fp8"])
LAYERS = {
    *(f"{attention}.{part}" for attention in ("attn1", "attn2") for part in ("to_q", "to_k", "to_v", "to_out.0")),
    "ffn.net.0.proj",
    "ffn.net.2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_odd_transformer(tmp_path_factory.mktemp("odd"))


@SCHEMES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_linear_layers_of_the_blocks_are_quantized_and_nothing_else(folder: Path, scheme: Any, dtype: str) -> None:
    before = dict(load_transformer(folder, dtype=dtype).named_parameters())
    transformer = load_transformer(folder, dtype=dtype, quantization=scheme)
    layers = {name for name, module in transformer.named_modules() if isinstance(module, QuantizedLinear)}
    assert layers == {f"blocks.{block}.{layer}" for block in range(2) for layer in LAYERS}
    weights, scales = ({f"{layer}.{leaf}" for layer in layers} for leaf in ("weight", "weight_scale"))
    after = dict(transformer.named_parameters())
    assert after.keys() - before.keys() == scales
    for name, parameter in after.items():
        if name in weights:
            assert parameter.dtype == FORMATS[scheme].dtype
        elif name in scales:
            assert (parameter.dtype, parameter.shape) == (torch.float32, before[name.removesuffix("_scale")].shape[:1])
        else:
            assert parameter.dtype == before[name].dtype
            assert torch.equal(parameter, before[name])


@SCHEMES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_come_out_as_on_a_plain_base(folder: Path, scheme: Any, dtype: str) -> None:
    plain, quantized = adapted(folder, dtype=dtype, b=0), adapted(folder, dtype=dtype, b=0, quantization=scheme)
    expected, found = dict(trainable_parameters(plain)), dict(trainable_parameters(quantized))
    assert found.keys() == expected.keys()
    assert len(found) == 2 * 2 * len(LAYERS)
    for name, parameter in found.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected[name]), name
    assert report(quantized) == report(plain)


@SCHEMES
def test_quantizing_does_not_touch_the_random_state(folder: Path, scheme: Any) -> None:
    transformer = load_transformer(folder, dtype="fp32")
    before = torch.get_rng_state()
    quantize_transformer(transformer, scheme)
    assert torch.equal(torch.get_rng_state(), before)


@SCHEMES
def test_output_and_gradients_are_those_of_the_dequantised_weights(folder: Path, scheme: Any) -> None:
    quantized, plain = adapted(folder, quantization=scheme), adapted(folder)
    layers = dict(plain.named_modules())
    for name, layer in quantized.named_modules():
        if isinstance(layer, QuantizedLinear):
            layers[name].weight.data = layer.dequantised()
    assert torch.equal(output_of(quantized), output_of(plain))
    expected = gradients_of(plain)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients_of(quantized).items())


@SCHEMES
def test_checkpointing_changes_no_gradient(folder: Path, scheme: Any) -> None:
    kept, recomputed = adapted(folder, quantization=scheme), adapted(folder, quantization=scheme)
    recomputed.enable_gradient_checkpointing()
    recomputed.train()
    expected = gradients_of(kept)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients_of(recomputed).items())


@SCHEMES
def test_the_reference_pass_is_the_quantized_base(folder: Path, scheme: Any) -> None:
    transformer = adapted(folder, quantization=scheme)
    transformer.disable_adapters()
    with torch.no_grad():
        base = output_of(load_transformer(folder, dtype="fp32", quantization=scheme))
        assert torch.equal(output_of(transformer), base)
    transformer.enable_adapters()
    assert all(parameter.requires_grad for _, parameter in trainable_parameters(transformer))


@SCHEMES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_meta_device_has_the_types_and_bytes_of_loaded_weights(folder: Path, scheme: Any, dtype: str) -> None:
    loaded = load_transformer(folder, dtype=dtype, quantization=scheme)
    built = meta_transformer(loaded.config, dtype=dtype, quantization=scheme)
    described = [{n: (p.dtype, p.shape) for n, p in model.named_parameters()} for model in (built, loaded)]
    assert described[0] == described[1]
    for transformer in (built, loaded):
        inject_lora(transformer, rank=RANK, alpha=ALPHA, targets=TARGETS, seed=0)
    assert held_bytes(loaded) == estimate(single(built), ranks=1).weight_bytes


@SCHEMES
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_released_sizes_take_less_than_55_percent_of_bf16(scheme: Any, family: str) -> None:
    config = FAMILIES[family].transformer
    plain = meta_transformer(config, dtype="bf16")
    quantized = meta_transformer(config, dtype="bf16", quantization=scheme)
    assert parameter_bytes(quantized) < 0.55 * parameter_bytes(plain)
    # A byte for two of every weight of a linear layer in a block, and four more for each of its channels.
    d, f = config["num_attention_heads"] * config["attention_head_dim"], config["ffn_dim"]
    saved = config["num_layers"] * (8 * (d * d - 4 * d) + (d * f - 4 * f) + (d * f - 4 * d))
    assert parameter_bytes(plain) - parameter_bytes(quantized) == saved
    assert parameter_count(quantized) == parameter_count(plain) == sum(p.numel() for p in plain.parameters())
    # A block is gathered in 8 bits, and its largest layer stands beside it in bf16 while it computes.
    memory = estimate(single(quantized), ranks=2)
    assert memory.gathered_bytes == parameter_bytes(quantized.blocks[0]) + 2 * d * f


@SCHEMES
def test_errors_and_bytes_are_told_at_the_start(folder: Path, scheme: Any, caplog: pytest.LogCaptureFixture) -> None:
    transformer = load_transformer(folder, dtype="fp32")
    told = quantize_transformer(transformer, scheme)
    assert told.errors.keys() == LAYERS
    assert all(error.layers == 2 for error in told.errors.values())
    plain = load_transformer(folder, dtype="fp32")
    weights = {name: layer.weight for name, layer in plain.named_modules() if isinstance(layer, torch.nn.Linear)}
    for kind, error in told.errors.items():
        pairs = [(transformer.get_submodule(f"blocks.{b}.{kind}"), weights[f"blocks.{b}.{kind}"]) for b in range(2)]
        whole, off = (
            torch.cat([t.detach().flatten() for t in tensors]).norm()
            for tensors in zip(*[(weight, layer.dequantised() - weight) for layer, weight in pairs], strict=True)
        )
        assert error.weight == pytest.approx(float(off / whole), rel=1e-5)
        # Unit normal inputs see every weight alike; the bias makes the output larger, not its error.
        assert 0.3 * error.weight < error.output < 1.3 * error.weight
    assert (told.bytes_before, told.bytes_after) == (parameter_bytes(plain), parameter_bytes(transformer))
    with caplog.at_level(logging.INFO, logger="miles_wan.wan.load"):
        load_transformer(folder, dtype="fp32", quantization=scheme)
    assert told.text in caplog.text
    assert f"base quantized to {scheme}" in told.text
    assert all(f"  {kind} " in told.text for kind in LAYERS)


def test_a_base_is_quantized_once_and_before_its_adapters(folder: Path) -> None:
    for transformer in (load_transformer(folder, dtype="fp32", quantization="int8"), adapted(folder)):
        with pytest.raises(ValueError, match="quantized once, and before it gets adapters"):
            quantize_transformer(transformer, "int8")


def test_weights_that_are_not_finite_are_named(folder: Path, tmp_path: Path) -> None:
    transformer = load_transformer(folder, dtype="fp32")
    with torch.no_grad():
        transformer.blocks[0].attn1.to_q.weight[3, 2] = float("nan")
        transformer.blocks[1].ffn.net[2].weight[0, 0] = float("inf")
    transformer.save_pretrained(tmp_path / "transformer")
    with pytest.raises(InputError) as error:
        load_transformer(tmp_path, dtype="fp32", quantization="fp8")
    assert [fault.split("the weights of ")[1].split()[0] for fault in error.value.faults] == [
        "blocks.0.attn1.to_q",
        "blocks.1.ffn.net.2",
    ]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_checkpoint_in_8_bits_is_refused(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    name = "blocks.1.attn2.to_v.weight"
    transformer = load_transformer(folder, dtype="fp32")
    transformer.save_config(tmp_path / "transformer")
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file(weights | {name: weights[name].to(dtype)}, file, metadata={"format": "pt"})
    with pytest.raises(InputError) as error:
        load_transformer(tmp_path, dtype="fp32")
    assert f"1 weights are stored in 8 bits, first {name}" in error.value.faults[0]
    assert weight_file_faults(tmp_path / "transformer", meta_transformer(transformer.config)) == [*error.value.faults]


def train(folder: Path, quantization: Any, *, steps: int = 80) -> list[float]:
    """Losses of a regression onto a fixed target that rank 4 cannot reach."""
    transformer: WanTransformer3DModel = adapted(folder, quantization=quantization, b=0)
    parameters = [parameter for _, parameter in trainable_parameters(transformer)]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    with torch.no_grad():
        target = torch.randn(output_of(transformer, batch=4).shape, generator=torch.Generator().manual_seed(8))
    losses = []
    for _ in range(steps):
        loss = (output_of(transformer, batch=4) - target).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_adapters_on_a_quantized_base_reach_the_loss_of_a_plain_one_within_5_percent(folder: Path) -> None:
    plain = train(folder, "none")
    assert plain[-1] < 0.8 * plain[0]
    for scheme in ("int8", "fp8"):
        quantized = train(folder, scheme)
        assert quantized != plain
        assert quantized[-1] == pytest.approx(plain[-1], rel=0.05)
