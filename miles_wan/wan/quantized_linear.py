"""A frozen linear layer with an 8-bit weight. In: a plain ``nn.Linear``. Out: one that computes what the plain layer with
the dequantised weight computes. Adapters, sharding and checkpointing see an ordinary ``nn.Linear`` without gradients. It
knows no transformer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional

from miles_wan.errors import MilesWanError

SCALE = "weight_scale"


@dataclass(frozen=True)
class Format:
    """How a weight is stored: the element type and the largest value that a channel's largest weight is mapped to."""

    dtype: torch.dtype
    largest: float


# int8 without -128, so that the grid is symmetric; float8_e4m3fn has 3 bits of mantissa and ends at 448.
FORMATS: Mapping[str, Format] = {"int8": Format(torch.int8, 127.0), "fp8": Format(torch.float8_e4m3fn, 448.0)}


def quantize(weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Round a weight to 8 bits, symmetrically and by output channel.

    The error of an element is at most half a step, ``scale / 2``, with int8, and at most the larger of ``2**-4`` of the
    element and ``scale * 2**-10`` with fp8.

    Args:
        weight: [out, in], any floating type.
        scheme: a key of ``FORMATS``.

    Returns:
        The stored weight [out, in] in 8 bits and its scale [out] in float32.
    """
    form = FORMATS[scheme]
    weight = weight.float()
    # A channel of zeros has no scale of its own; any positive one gives its zeros back.
    scale = (weight.abs().amax(1) / form.largest).clamp_min(torch.finfo(torch.float32).tiny)
    steps = weight / scale[:, None]
    # The largest one is the end of the range but for the rounding of the division, which this rounding takes back.
    return (steps.round_() if form.dtype == torch.int8 else steps).to(form.dtype), scale


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] that a stored one [out, in] with ``scale`` [out] stands for, rounded once to ``dtype``.

    Raises:
        MilesWanError: one of them is not what ``quantize`` made; a weight without its scale is another weight.
    """
    if scale.dtype != torch.float32 or weight.dtype not in {form.dtype for form in FORMATS.values()}:
        raise MilesWanError(
            f"a quantized weight is {weight.dtype} with a scale in {scale.dtype}: it was cast to another type, which drops "
            "its meaning; load it again with model.quantization and only ever move it between devices"
        )
    # 8-bit values are exact in every compute type, and the product with a float32 scale is computed in float32: in place,
    # so that no float32 copy of the weight is made on the way.
    return weight.to(dtype).mul_(scale[:, None])


class _FrozenProduct(torch.autograd.Function):
    """x W^T + b. It saves the 8-bit weight and the scale, not the weight in the compute type, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return functional.linear(x, dequantise(weight, scale, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        return grad @ dequantise(weight, scale, grad.dtype), None, None, None


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with an 8-bit weight [out, in] and ``weight_scale`` [out] in float32; the bias stays as it was.

    It computes in the type of its input what a plain linear layer with the dequantised weight computes. Weight and scale
    are both parameters, split by rows when sharded. ``compute_dtype`` is the type of the weight before, which peft gives
    to the adapters in place of the stored type.
    """

    def __init__(self, linear: nn.Linear, scheme: str) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would allocate and draw a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = linear.weight.dtype
        weight, scale = quantize(linear.weight.detach(), scheme)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out].

        Raises:
            MilesWanError: gradients are asked of the weight.
        """
        if self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad):
            raise MilesWanError("a quantized base is frozen: train adapters on it, or set model.quantization to none")
        output: Tensor = _FrozenProduct.apply(input, self.weight, self.weight_scale, self.bias)
        return output

    def dequantised(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [out, in] that this layer computes with, by default in ``compute_dtype``; gathers a sharded one (a
        collective)."""
        dtype, weight, scale = dtype or self.compute_dtype, self.weight.detach(), self.weight_scale.detach()
        if not isinstance(weight, DTensor) or not isinstance(scale, DTensor):
            return dequantise(weight, scale, dtype)
        # Each rank its own rows: gloo gathers no float8.
        rows = dequantise(weight.to_local(), scale.to_local(), dtype)
        whole = DTensor.from_local(
            rows, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
        )
        return whole.full_tensor()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weight, scale = (state_dict.get(prefix + name) for name in ("weight", SCALE))
        if (weight is None) != (scale is None):
            given, lacking = ("weight", SCALE) if scale is None else (SCALE, "weight")
            error_msgs.append(f"{prefix}{given} comes without {prefix}{lacking}; a quantized weight needs both")
        elif weight is not None and weight.dtype != self.weight.dtype:
            error_msgs.append(
                f"{prefix}weight is {weight.dtype}, this layer holds {self.weight.dtype}: copying would drop what lies "
                "between its values; load the unquantized weights into an unquantized transformer and quantize that"
            )
        else:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight={self.weight.dtype}, compute_dtype={self.compute_dtype}"


def whole_tensor(parameter: Tensor) -> Tensor:
    """The whole tensor without gradients (a collective for a sharded one)."""
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
