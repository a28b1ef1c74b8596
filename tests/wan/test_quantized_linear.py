"""A quantized layer computes what a plain one with the dequantised weight computes, and its rounding is that of its format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from miles_wan.errors import MilesWanError
from miles_wan.wan.quantized_linear import FORMATS, QuantizedLinear, dequantise, quantize

SCHEMES = pytest.mark.parametrize("scheme", ["int8", "fp8"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def awkward_weight() -> Tensor:
    """[out, in] with channels of very different size, an outlier, zeros alone, and values below float8's normal range."""
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    weight *= torch.tensor([1.0, 1e-3, 1e3, 1.0, 0.0, 1e-30, 1.0])[:, None]
    weight[3, 5] = 100.0
    weight[6] *= torch.logspace(-6, 0, 33)
    return weight


def plain(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(33, 7, bias=bias)
    layer.weight.data = awkward_weight()
    return layer.to(dtype).requires_grad_(False)


def twin(layer: nn.Linear, scheme: str) -> nn.Linear:
    """The plain layer with the weight that the stored one stands for, written out in float32."""
    weight, scale = quantize(layer.weight, scheme)
    other = nn.Linear(33, 7, bias=layer.bias is not None)
    other.weight.data = (weight.float() * scale[:, None]).to(layer.weight.dtype)
    if layer.bias is not None:
        other.bias.data = layer.bias.data
    return other.requires_grad_(False)


def test_int8_errs_by_half_a_step_of_its_channel_at_most() -> None:
    weight = awkward_weight()
    stored, scale = quantize(weight, "int8")
    step = weight.double().abs().amax(1) / 127
    error = (stored.double() * scale.double()[:, None] - weight).abs()
    # Beside half a step there is the rounding of the scale and of the division, 127 steps of 2^-24 each.
    assert bool((error <= step[:, None] * (0.5 + 2 * 127 * 2.0**-24)).all())
    assert int(stored.min()) >= -127  # a grid with -128 would not be symmetric
    assert torch.equal(stored.abs().amax(1) == 127, weight.abs().amax(1) > 1e-37)


def test_fp8_errs_by_a_sixteenth_of_the_value_at_most() -> None:
    weight = awkward_weight()
    stored, scale = quantize(weight, "fp8")
    error = (stored.double() * scale.double()[:, None] - weight).abs()
    # Three bits of mantissa: half a unit in the last place is 2^-4. Below 2^-6 the grid is even, in steps of 2^-9.
    bound = torch.maximum(weight.double().abs() * 2.0**-4, scale.double()[:, None] * 2.0**-10)
    assert bool((error <= bound * (1 + 2.0**-20)).all())
    assert bool((stored[4].float() == 0).all())
    assert bool((stored.float().abs().amax(1)[[0, 1, 2, 3, 6]] == 448).all())


@SCHEMES
def test_weights_on_the_grid_are_kept(scheme: str) -> None:
    stored, scale = quantize(awkward_weight(), scheme)
    again, _ = quantize(dequantise(stored, scale, torch.float32), scheme)
    assert torch.equal(again.float(), stored.float())


@SCHEMES
@DTYPES
def test_the_dequantised_weight_is_the_product_in_float32_rounded_once(scheme: str, dtype: torch.dtype) -> None:
    stored, scale = quantize(awkward_weight(), scheme)
    assert torch.equal(dequantise(stored, scale, dtype), (stored.float() * scale[:, None]).to(dtype))


@SCHEMES
@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(33,), (5, 33), (2, 3, 33)])
def test_forward_and_backward_are_those_of_the_dequantised_layer(
    scheme: str, dtype: torch.dtype, bias: bool, shape: tuple[int, ...]
) -> None:
    layer = plain(dtype, bias=bias)
    quantized, reference = QuantizedLinear(layer, scheme), twin(layer, scheme)
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2)]
    outputs = [module(x.requires_grad_()) for module, x in zip((quantized, reference), inputs, strict=True)]
    assert torch.equal(outputs[0], outputs[1])
    for output in outputs:
        output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(dtype))
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert not torch.equal(outputs[0], functional.linear(inputs[0], layer.weight, layer.bias))


@SCHEMES
def test_only_8_bits_and_scales_are_kept_for_the_backward_pass(scheme: str) -> None:
    quantized = QuantizedLinear(plain(), scheme)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        quantized(torch.randn(3, 33, requires_grad=True))
    assert sorted(str(tensor.dtype) for tensor in kept) == sorted([str(FORMATS[scheme].dtype), "torch.float32"])
    assert sum(tensor.numel() for tensor in kept) == 7 * 33 + 7


@SCHEMES
def test_gradients_under_checkpointing_are_the_same(scheme: str) -> None:
    quantized = QuantizedLinear(plain(), scheme)
    gradients = []
    for run in (quantized, lambda x: checkpoint(quantized, x, use_reentrant=False)):
        x = torch.randn(3, 33, generator=torch.Generator().manual_seed(1)).requires_grad_()
        run(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_weight_without_its_scale_is_not_loaded_even_when_gaps_are_allowed() -> None:
    quantized = QuantizedLinear(plain(), "int8")
    state = quantized.state_dict()
    for name, lacking in (("weight", "weight_scale"), ("weight_scale", "weight")):
        with pytest.raises(RuntimeError, match=f"{name} comes without {lacking}"):
            quantized.load_state_dict({name: state[name]}, strict=False)
    QuantizedLinear(plain(), "int8").load_state_dict(state)


@SCHEMES
def test_weights_of_another_type_are_not_cut_down_to_the_stored_one(scheme: str) -> None:
    quantized = QuantizedLinear(plain(), scheme)
    state = quantized.state_dict() | {"weight": torch.full((7, 33), 0.4)}  # int8 would make zeros of it
    with pytest.raises(RuntimeError, match=r"copying would drop what lies between its values"):
        quantized.load_state_dict(state)


@SCHEMES
def test_a_layer_that_was_cast_or_unfrozen_refuses_to_compute(scheme: str) -> None:
    with pytest.raises(MilesWanError, match="it was cast to another type"):
        QuantizedLinear(plain(), scheme).to(torch.bfloat16)(torch.randn(1, 33).bfloat16())
    unfrozen = QuantizedLinear(plain(), scheme)
    unfrozen.bias.requires_grad_(True)
    with pytest.raises(MilesWanError, match="a quantized base is frozen"):
        unfrozen(torch.randn(1, 33))
