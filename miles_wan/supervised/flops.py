"""How much arithmetic a step is, from the lengths of its samples. In: a transformer's configuration, latent shapes. Out: model
floating point operations (a multiplication and an addition count as two); recomputation does not count. Closed forms alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Dense bf16 peak in 10^12 operations per second, from the vendors' data sheets, by a part of the device's name.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "A40": 150.0,
    "4090": 165.0,
    "3090": 71.0,
}


@dataclass(frozen=True)
class Shape:
    """Sequence lengths of a sample: latent ``tokens`` of the video and ``text`` rows that they attend to; ``timesteps`` is how
    many timesteps are embedded (1, or one per token)."""

    tokens: int
    text: int
    timesteps: int = 1


@dataclass(frozen=True)
class Operations:
    """Forward operations of one sample: ``linear`` (layers with weights) and ``attention`` (products of activations)."""

    linear: float
    attention: float

    def training(self, *, full: bool) -> float:
        """Forward and backward. Products of activations cost twice their forward in the backward pass. A layer with weights
        costs once for its input's gradient, and once more for its weights' where these are trained; what adapters add is left
        out."""
        return (3 if full else 2) * self.linear + 3 * self.attention


def forward_operations(transformer: Mapping[str, Any], shape: Shape) -> Operations:
    """One forward of a ``WanTransformer3DModel`` with this configuration.

    Args:
        transformer: its config.json.
        shape: of the sample.
    """
    width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    layers, hidden = transformer["num_layers"], transformer["ffn_dim"]
    patch = 1
    for extent in transformer["patch_size"]:
        patch *= extent
    tokens, text = shape.tokens, shape.text
    block = tokens * (4 * width**2 + 2 * width**2 + 2 * width * hidden) + text * 2 * width**2
    ends = tokens * patch * width * (transformer["in_channels"] + transformer["out_channels"])
    embedders = text * width * (transformer["text_dim"] + width)
    embedders += shape.timesteps * width * (transformer["freq_dim"] + width + 6 * width)
    attention = layers * 4 * width * tokens * (tokens + text)
    return Operations(linear=2.0 * (layers * block + ends + embedders), attention=float(attention))


def known_peak(device_name: str) -> float | None:
    """Peak of a device in 10^12 operations per second; None for one that is not in the table."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)
