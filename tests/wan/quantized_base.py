"""What the tests of a quantized base share: a small transformer with odd widths, its inputs, adapters and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from miles_wan.training.sharding import full_tensor
from miles_wan.wan.load import load_transformer
from miles_wan.wan.lora import inject_lora, trainable_parameters

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
RANK, ALPHA = 4, 6


def write_odd_transformer(folder: Path) -> Path:
    """Two blocks of width 36 with 63 feed-forward rows, which two ranks cannot halve."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = WanTransformer3DModel(
            num_attention_heads=3,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=8,
            freq_dim=16,
            ffn_dim=63,
            num_layers=2,
            rope_max_seq_len=64,
        )
    transformer.save_pretrained(folder / "transformer")
    return folder


def adapted(folder: Path, *, quantization: Any = "none", dtype: str = "fp32", b: float = 0.3) -> WanTransformer3DModel:
    """The transformer of ``folder``, quantized, then adapted; B is ``b`` times normal noise."""
    transformer = load_transformer(folder, dtype=dtype, quantization=quantization)
    inject_lora(transformer, rank=RANK, alpha=ALPHA, targets=TARGETS, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(transformer):
            if "lora_B" in name:
                parameter.copy_(b * torch.randn(parameter.shape, generator=generator))
    return transformer


def inputs_of(transformer: nn.Module, *, batch: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    config, generator = transformer.config, torch.Generator().manual_seed(4)
    return {
        "hidden_states": torch.randn(batch, config.in_channels, 2, 4, 4, generator=generator).to(dtype),
        "timestep": torch.linspace(900, 300, batch),
        "encoder_hidden_states": torch.randn(batch, 6, config.text_dim, generator=generator).to(dtype),
        "return_dict": False,
    }


def output_of(transformer: nn.Module, **changes: Any) -> Tensor:
    output: Tensor = transformer(**inputs_of(transformer, **changes))[0]
    return output


def gradients_of(transformer: nn.Module) -> dict[str, Tensor]:
    """Whole gradients of every adapter tensor of a loss (a collective when sharded)."""
    output_of(transformer).square().mean().backward()
    return {name: full_tensor(parameter.grad) for name, parameter in trainable_parameters(transformer)}
