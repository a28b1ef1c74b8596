"""Builds a ``WeightUpdate`` from a gathered adapter and refuses one that could not be applied whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from miles_wan.errors import WeightSyncError
from miles_wan.records import WeightUpdate
from miles_wan.wan.lora import layer_prefix


def make_update(
    named_tensors: Iterable[tuple[str, Tensor]], *, target_module: str, alpha: int, rank: int, policy_version: int
) -> WeightUpdate:
    """Collect the adapter pairs of one module of the engine.

    Args:
        named_tensors: full names (``blocks.0.attn1.to_q.lora_A.weight``) and whole tensors on the CPU.
        target_module: ``transformer`` or ``transformer_2``.

    Raises:
        WeightSyncError: nothing to send, a name twice, a pair without its other half, a rank that differs from
            ``rank``, or a value that is not finite.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if name in tensors:
            raise WeightSyncError(f"{name} is in the update twice: blocks collide in the export; nothing was sent")
        tensors[name] = tensor.detach().contiguous()
    if not tensors:
        raise WeightSyncError(f"the update for {target_module} is empty: no adapter was found; nothing was sent")
    for prefix in sorted({layer_prefix(name) for name in tensors}):
        halves = [tensors.get(f"{prefix}.lora_{side}.weight") for side in "AB"]
        if halves[0] is None or halves[1] is None:
            raise WeightSyncError(f"{prefix} lacks its lora_{'A' if halves[0] is None else 'B'}; nothing was sent")
        if not halves[0].shape[0] == halves[1].shape[1] == rank:
            shapes = [tuple(half.shape) for half in halves if half is not None]
            raise WeightSyncError(f"{prefix} has A and B of shapes {shapes}, not of rank {rank}; nothing was sent")
    faulty = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if faulty:
        raise WeightSyncError(f"{len(faulty)} adapter tensors are not finite, first {faulty[0]}; nothing was sent")
    return WeightUpdate(
        target_module=target_module,
        tensors=tensors,
        alpha=alpha,
        rank=rank,
        policy_version=policy_version,
        checksum=_checksum(tensors),
    )


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
