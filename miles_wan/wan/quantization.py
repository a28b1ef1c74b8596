"""A frozen base in 8 bits. In: a transformer in its compute type. Out: the same transformer with quantized linear layers
inside its blocks, and a report of what that saves and costs. Norms, embedders, modulation, head and biases stay as they
are. It knows no trainer and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional

from miles_wan.errors import InputError
from miles_wan.wan.quantized_linear import SCALE, QuantizedLinear

Quantization = Literal["none", "int8", "fp8"]

PROBES = 16  # inputs per layer from which the output error is told
_NAMED_FAULTS = 5


@dataclass(frozen=True)
class LayerError:
    """Norm of the difference over norm, over all ``layers`` of one type: of the weights, and of the outputs for unit normal
    inputs."""

    layers: int
    weight: float
    output: float


@dataclass(frozen=True)
class QuantizationReport:
    """What quantization did to a transformer: bytes of all its parameters before and after, and errors by layer type
    (``attn1.to_q``) against the weights before. Without errors on the meta device."""

    scheme: str
    bytes_before: int
    bytes_after: int
    errors: Mapping[str, LayerError] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Lines for people."""
        layers = sum(error.layers for error in self.errors.values())
        head = (
            f"base quantized to {self.scheme}: {self.bytes_before / 2**20:.1f} -> {self.bytes_after / 2**20:.1f} MiB "
            f"({self.bytes_after / self.bytes_before:.1%})"
        )
        if not self.errors:
            return head
        rows = [
            f"  {kind:<16} weights {error.weight:.2e}  outputs {error.output:.2e}"
            for kind, error in self.errors.items()
        ]
        return "\n".join([f"{head}; relative errors of {layers} layers, by type:", *rows])


def quantize_transformer(transformer: nn.Module, scheme: str) -> QuantizationReport:
    """Replace every linear layer inside ``blocks`` by a quantized one, in place. Before adapters and before sharding. Works
    on the meta device.

    Raises:
        InputError: weights that are not finite.
        ValueError: the transformer has adapters or is quantized already.
    """
    if any(isinstance(module, BaseTunerLayer | QuantizedLinear) for module in transformer.modules()):
        raise ValueError("a transformer is quantized once, and before it gets adapters")
    before = parameter_bytes(transformer)
    # Names, not modules: each full weight is to be freed before the next one is quantized.
    names = [
        name
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    ]
    sums: dict[str, _Sums] = {}
    broken: list[str] = []
    for name in names:
        plain = transformer.get_submodule(name)
        assert isinstance(plain, nn.Linear)
        quantized = QuantizedLinear(plain, scheme)
        if not plain.weight.is_meta:
            if bool(quantized.weight_scale.isfinite().all()):
                sums.setdefault(layer_type(name), _Sums()).add(plain, quantized)
            else:
                broken.append(name)
        transformer.set_submodule(name, quantized)
    if broken:
        raise InputError(_not_finite(broken))
    errors = {kind: found.error for kind, found in sums.items()}
    return QuantizationReport(scheme, before, parameter_bytes(transformer), errors)


def layer_type(name: str) -> str:
    """``blocks.0.attn1.to_out.0`` -> ``attn1.to_out.0``."""
    return name.split(".", 2)[2]


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of all parameters, scales included."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def parameter_count(module: nn.Module) -> int:
    """Parameters as the model's authors count them: a scale belongs to its weight."""
    return sum(parameter.numel() for name, parameter in module.named_parameters() if not name.endswith(f".{SCALE}"))


def dequantised_bytes(module: nn.Module) -> int:
    """What the largest quantized layer takes for a moment in its compute type; 0 without one."""
    layers = (layer for layer in module.modules() if isinstance(layer, QuantizedLinear))
    return max((layer.weight.numel() * layer.compute_dtype.itemsize for layer in layers), default=0)


@dataclass
class _Sums:
    """Squared norms over the layers of one type."""

    layers: int = 0
    weight: float = 0.0
    weight_error: float = 0.0
    output: float = 0.0
    output_error: float = 0.0

    @torch.no_grad()
    def add(self, plain: nn.Linear, quantized: QuantizedLinear) -> None:
        weight, restored = plain.weight.float(), quantized.dequantised().float()
        bias = None if plain.bias is None else plain.bias.float()
        generator = torch.Generator().manual_seed(self.layers)
        probes = torch.randn(PROBES, plain.in_features, generator=generator).to(weight.device)
        output = functional.linear(probes, weight, bias)
        self.layers += 1
        self.weight += _squared(weight)
        self.weight_error += _squared(restored - weight)
        self.output += _squared(output)
        self.output_error += _squared(functional.linear(probes, restored, bias) - output)

    @property
    def error(self) -> LayerError:
        return LayerError(self.layers, _ratio(self.weight_error, self.weight), _ratio(self.output_error, self.output))


def _squared(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2


def _ratio(error: float, whole: float) -> float:
    return math.sqrt(error / whole) if whole else 0.0


def _not_finite(names: list[str]) -> list[str]:
    faults = [
        f"model.quantization: the weights of {name} are not all finite, so that they have no scale; download them again"
        for name in names[:_NAMED_FAULTS]
    ]
    rest = len(names) - _NAMED_FAULTS
    return [*faults, f"model.quantization: ... and {rest} more layers of this kind"] if rest > 0 else faults
