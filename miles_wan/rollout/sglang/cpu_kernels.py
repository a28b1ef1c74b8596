"""Two fused norm kernels that SGLang calls on a CPU and does not ship, in plain PyTorch. In and out: tensors. Computed in
float32 and cast back to the input's dtype, as the GPU kernels do. Defined only where they are missing.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

_NAMESPACE = "sgl_kernel"
_NORM = "fused_norm_scale_shift_cpu"
_RESIDUAL_NORM = "fused_scale_residual_norm_scale_shift_cpu"
_SCHEMAS = {
    _NORM: f"{_NORM}(Tensor x, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str norm_type, float eps)"
    " -> Tensor",
    _RESIDUAL_NORM: f"{_RESIDUAL_NORM}(Tensor residual, Tensor x, Tensor? gate, Tensor? weight, Tensor? bias,"
    " Tensor scale, Tensor shift, str norm_type, float eps) -> (Tensor, Tensor)",
}
_libraries: list[torch.library.Library] = []  # a library that is collected takes its kernels with it


def _normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm_type: str, eps: float) -> Tensor:
    shape = (x.shape[-1],)
    weight = None if weight is None else weight.float()
    if norm_type == "layer":
        return functional.layer_norm(x, shape, weight, None if bias is None else bias.float(), eps)
    if norm_type == "rms":
        return functional.rms_norm(x, shape, weight, eps)
    raise ValueError(f"norm_type {norm_type!r} is neither 'layer' nor 'rms'")


def fused_norm_scale_shift(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor, shift: Tensor, norm_type: str, eps: float
) -> Tensor:
    """norm(x) * (1 + scale) + shift; ``x`` [..., C], scale and shift broadcast to it."""
    normalized = _normalized(x.float(), weight, bias, norm_type, eps)
    return (normalized * (1 + scale.float()) + shift.float()).to(x.dtype)


def fused_scale_residual_norm_scale_shift(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    norm_type: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """y = residual + gate * x (gate None: 1); returns (norm(y) * (1 + scale) + shift, y)."""
    update = x.float() if gate is None else x.float() * gate.float()
    total = residual.float() + update
    normalized = _normalized(total, weight, bias, norm_type, eps)
    return (normalized * (1 + scale.float()) + shift.float()).to(x.dtype), total.to(x.dtype)


_IMPLEMENTATIONS = {_NORM: fused_norm_scale_shift, _RESIDUAL_NORM: fused_scale_residual_norm_scale_shift}


@cache
def define_missing_kernels() -> tuple[str, ...]:
    """Define what ``torch.ops.sgl_kernel`` lacks, once per process; returns the names that were added."""
    missing = tuple(name for name in _SCHEMAS if not hasattr(getattr(torch.ops, _NAMESPACE), name))
    for name in missing:
        library = torch.library.Library(_NAMESPACE, "FRAGMENT")
        library.define(_SCHEMAS[name])
        library.impl(name, _IMPLEMENTATIONS[name], "CPU")
        _libraries.append(library)
    return missing
