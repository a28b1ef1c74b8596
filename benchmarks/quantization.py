"""What 8-bit storage of the frozen base costs and saves: errors by layer type against float32, bytes, and the loss that LoRA
training reaches.

    python benchmarks/quantization.py

Prints the tables of docs/quantization.md. One block at each released width and the tiny transformer, with drawn weights; no
checkpoint is read. About a minute and 6 GB of memory on two cores.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import tyro
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.nn import functional

from miles_wan.tiny.checkpoint import make_transformer
from miles_wan.wan.facts import FAMILIES
from miles_wan.wan.load import meta_transformer
from miles_wan.wan.lora import inject_lora, trainable_parameters
from miles_wan.wan.quantization import Quantization, layer_type, parameter_bytes, quantize_transformer
from miles_wan.wan.quantized_linear import QuantizedLinear

SCHEMES: tuple[Quantization, ...] = ("int8", "fp8")
WIDTHS = {"5B": "wan2.2-ti2v-5b", "A14B": "wan2.2-t2v-a14b"}
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
TEXT_TOKENS, TEXT_WIDTH = 64, 64  # narrower than released: the text embedder is not quantized
SPREAD = 0.5  # heavy-tailed weights: deviation of the logarithm of their size; their kurtosis is 3 exp(4 s^2) = 8.2


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    steps: int = 200
    """Steps of LoRA training on the tiny transformer."""
    seed: int = 0
    """Of weights, inputs and targets."""


def main(arguments: Arguments) -> None:
    logging.disable(logging.WARNING)
    started = time.monotonic()
    print(resident_bytes(), flush=True)
    columns: dict[str, dict[str, dict[str, float]]] = {}
    torch.manual_seed(arguments.seed)
    for name, transformer in cases(arguments.seed):
        columns[name] = errors_of(transformer)
    print("\nRelative errors of outputs against float32\n")
    print(error_table(columns), flush=True)
    print("\nLoRA training on the tiny transformer\n")
    print(training_table(arguments))
    print(f"\n{time.monotonic() - started:.0f} s")


def cases(seed: int) -> Iterator[tuple[str, WanTransformer3DModel]]:
    """One at a time: they are large."""
    yield "tiny", tiny(heavy=False, seed=seed)
    for name, family in WIDTHS.items():
        yield name, one_block(FAMILIES[family].transformer, heavy=False, seed=seed)
    yield "5B, heavy tails", one_block(FAMILIES[WIDTHS["5B"]].transformer, heavy=True, seed=seed)


def resident_bytes() -> str:
    """Bytes of all parameters at released sizes, counted on the meta device."""
    rows = [["transformer", "bf16", *(title for scheme in SCHEMES for title in (scheme, "of bf16"))]]
    for family in FAMILIES.values():
        plain = parameter_bytes(meta_transformer(family.transformer, dtype="bf16"))
        row = [f"{family.name}, each expert" if len(family.experts) > 1 else family.name, f"{plain / 1e9:.3f} GB"]
        for scheme in SCHEMES:
            held = parameter_bytes(meta_transformer(family.transformer, dtype="bf16", quantization=scheme))
            row += [f"{held / 1e9:.3f} GB", f"{held / plain:.1%}"]
        rows.append(row)
    return table(rows)


def tiny(*, heavy: bool, seed: int) -> WanTransformer3DModel:
    """The tiny transformer of ``miles-wan tiny``, its layers drawn as those of the others."""
    transformer = make_transformer()
    draw_weights(transformer, heavy=heavy, seed=seed)
    return transformer.requires_grad_(False).eval()


def one_block(config: Mapping[str, Any], *, heavy: bool, seed: int) -> WanTransformer3DModel:
    """A transformer of a released width and feed-forward width with a single block."""
    small = {"num_layers": 1, "text_dim": TEXT_WIDTH}
    transformer = WanTransformer3DModel(**{**config, **small})
    draw_weights(transformer, heavy=heavy, seed=seed)
    return transformer.requires_grad_(False).eval()


@torch.no_grad()
def draw_weights(transformer: WanTransformer3DModel, *, heavy: bool, seed: int) -> None:
    """Linear layers of the blocks that keep the variance of their input: normal, or normal times log-normal, whose outliers
    widen the steps of their channels."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer in block_layers(transformer):
        layer.weight.normal_(0, layer.in_features**-0.5, generator=generator)
        if heavy:
            # E[exp(s n)^2] = exp(2 s^2)
            size = torch.randn(layer.weight.shape, generator=generator).mul_(SPREAD).sub_(SPREAD**2).exp_()
            layer.weight.mul_(size)


def block_layers(transformer: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [
        (name, module)
        for name, module in transformer.named_modules()
        if name.startswith("blocks.") and isinstance(module, nn.Linear)
    ]


@torch.no_grad()
def errors_of(transformer: WanTransformer3DModel) -> dict[str, dict[str, float]]:
    """Relative output errors by layer type and scheme, each layer for the inputs that it sees in float32, and of the whole
    transformer. Everything but float32 itself computes in bf16. The transformer is used up."""
    inputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.__setitem__(name, args[0]))
        for name, layer in block_layers(transformer)
    ]
    exact = run(transformer)
    for hook in hooks:
        hook.remove()
    outputs = {name: layer(inputs[name]) for name, layer in block_layers(transformer)}
    cast_to_bf16(transformer)
    layers: dict[str, dict[str, nn.Linear]] = {"bf16": dict(block_layers(transformer))}
    for scheme in SCHEMES:
        layers[scheme] = {name: QuantizedLinear(layer, scheme) for name, layer in layers["bf16"].items()}
    found: dict[str, dict[str, float]] = {}
    for base, by_name in layers.items():
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, layer in by_name.items():
            pairs.setdefault(layer_type(name), []).append((layer(inputs[name].bfloat16()), outputs[name]))
            transformer.set_submodule(name, layer)
        pairs["whole transformer"] = [(run(transformer), exact)]
        for kind, of_kind in pairs.items():
            found.setdefault(kind, {})[base] = relative(of_kind)
    return found


def relative(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Norm of the differences over norm, over all (computed, exact) outputs."""
    error = sum(float((computed.float() - exact).square().sum()) for computed, exact in pairs)
    return (error / sum(float(exact.square().sum()) for _, exact in pairs)) ** 0.5


def cast_to_bf16(transformer: WanTransformer3DModel) -> None:
    """As loading does: some parts stay in float32."""
    stay = WanTransformer3DModel._keep_in_fp32_modules
    for name, parameter in transformer.named_parameters():
        if not any(part in name.split(".") for part in stay):
            parameter.data = parameter.data.bfloat16()


def run(transformer: WanTransformer3DModel) -> Tensor:
    """The output for 2 x 4 x 4 = 32 video tokens a sample."""
    config, generator = transformer.config, torch.Generator().manual_seed(1)
    dtype = transformer.patch_embedding.weight.dtype
    output: Tensor = transformer(
        hidden_states=torch.randn(2, config.in_channels, 2, 8, 8, generator=generator).to(dtype),
        timestep=torch.tensor([900.0, 300.0]),
        encoder_hidden_states=torch.randn(2, TEXT_TOKENS, config.text_dim, generator=generator).to(dtype),
        return_dict=False,
    )[0]
    return output.float()


def error_table(columns: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    schemes = ("bf16", *SCHEMES)
    rows = [["layer", *(f"{model} {scheme}" for model in columns for scheme in schemes)]]
    for kind in next(iter(columns.values())):
        rows.append([kind, *(f"{column[kind][scheme]:.1e}" for column in columns.values() for scheme in schemes)])
    return table(rows)


def training_table(arguments: Arguments) -> str:
    """Losses of adapters of rank 4 on the tiny transformer: a regression onto fixed velocities from fixed noisy latents."""
    torch.set_num_threads(1)  # the matrices are too small for more
    rows = [["base", "first loss", "last loss", "against the plain base"]]
    plain = train("none", arguments)
    for scheme in ("none", *SCHEMES):
        losses = plain if scheme == "none" else train(scheme, arguments)
        rows.append([scheme, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{losses[-1] / plain[-1] - 1:+.2%}"])
    return table(rows)


def train(scheme: str, arguments: Arguments) -> list[float]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(arguments.seed)
        transformer = make_transformer().eval()
    if scheme != "none":
        quantize_transformer(transformer, scheme)
    inject_lora(transformer, rank=4, alpha=8, targets=TARGETS, seed=arguments.seed)
    optimizer = torch.optim.AdamW([parameter for _, parameter in trainable_parameters(transformer)], lr=5e-3)
    losses = []
    with torch.no_grad():
        shape = run(transformer).shape
    target = torch.randn(shape, generator=torch.Generator().manual_seed(arguments.seed + 2))
    for _ in range(arguments.steps):
        loss = functional.mse_loss(run(transformer), target)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    main(tyro.cli(Arguments))
