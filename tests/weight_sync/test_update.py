"""An update is whole or is refused; its checksum covers every bit."""

from __future__ import annotations

import pytest
import torch

from miles_wan.errors import WeightSyncError
from miles_wan.weight_sync import make_update


def pairs(blocks: int = 2, *, rank: int = 4) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    named = []
    for block in range(blocks):
        for layer in ("attn1.to_q", "ffn.net.2"):
            named.append((f"blocks.{block}.{layer}.lora_A.weight", torch.randn(rank, 6, generator=generator)))
            named.append((f"blocks.{block}.{layer}.lora_B.weight", torch.randn(8, rank, generator=generator)))
    return named


def update(named, **changes):
    arguments = {"target_module": "transformer", "alpha": 8, "rank": 4, "policy_version": 3, **changes}
    return make_update(iter(named), **arguments)


def test_an_update_holds_every_tensor_under_its_full_name():
    made = update(pairs())
    assert list(made.tensors) == [name for name, _ in pairs()]
    assert all(torch.equal(made.tensors[name], tensor) for name, tensor in pairs())
    assert (made.target_module, made.alpha, made.rank, made.policy_version) == ("transformer", 8, 4, 3)


def without(name):
    return [pair for pair in pairs() if pair[0] != name]


def changed(name, change):
    return [(n, change(tensor) if n == name else tensor) for n, tensor in pairs()]


def spoiled(tensor, value):
    tensor[0, 0] = value
    return tensor


A = "blocks.1.attn1.to_q.lora_A.weight"
B = "blocks.1.attn1.to_q.lora_B.weight"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([], "the update for transformer is empty"),
        ([*pairs(), pairs()[0]], r"blocks\.0\.attn1\.to_q\.lora_A\.weight is in the update twice: blocks collide"),
        (without(A), r"blocks\.1\.attn1\.to_q lacks its lora_A"),
        (without(B), r"blocks\.1\.attn1\.to_q lacks its lora_B"),
        (pairs(rank=2), r"not of rank 4"),
        (changed(A, lambda t: t[:2].clone()), r"blocks\.1\.attn1\.to_q has A and B of shapes \[\(2, 6\), \(8, 4\)\]"),
        (changed(B, lambda t: t.T.contiguous()), "not of rank 4"),
        (changed(B, lambda t: spoiled(t.clone(), float("nan"))), "1 adapter tensors are not finite, first " + B),
        (changed(A, lambda t: spoiled(t.clone(), float("inf"))), "not finite, first " + A),
        ([*pairs(), ("blocks.0.attn1.to_q.bias", torch.zeros(4))], r"blocks\.0\.attn1\.to_q\.bias lacks its lora_A"),
    ],
)
def test_an_update_that_could_not_be_applied_whole_is_refused(named, message):
    with pytest.raises(WeightSyncError, match=message + ".*nothing was sent"):
        update(named)


def test_the_checksum_changes_with_any_bit_and_with_nothing_else():
    checksum = update(pairs()).checksum
    assert update(reversed(pairs())).checksum == checksum
    assert update(pairs(), policy_version=4).checksum == checksum
    for name, tensor in pairs():
        for place in (0, tensor.numel() - 1):
            bits = tensor.clone()
            bits.view(-1).view(torch.int32)[place] ^= 1  # the lowest bit of the mantissa
            assert update(changed(name, lambda _, bits=bits: bits)).checksum != checksum


def test_the_checksum_covers_the_names():
    renamed = [(name.replace("blocks.1", "blocks.7"), tensor) for name, tensor in pairs()]
    assert update(renamed).checksum != update(pairs()).checksum
