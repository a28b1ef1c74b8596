"""Applies parallelism to a plain transformer from outside: activation checkpointing, then FSDP2 per block and root."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

# The transformer returns a view; we never write into it, which is all this warning is about.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

_FILE = "file://"
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def init_process_group(*, device: torch.device, rank: int, world_size: int, init_method: str) -> None:
    """Join the ranks; collectives on CPU tensors (hashes, checkpoints) run over gloo on either device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if init_method.startswith(_FILE):
        # As a URL, a path with a # or ? would name another file.
        store = dist.FileStore(init_method.removeprefix(_FILE), world_size)
        dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(BACKENDS[device.type], init_method=init_method, rank=rank, world_size=world_size)


def shard_transformer(
    transformer: WanTransformer3DModel, *, device: torch.device, activation_checkpointing: bool
) -> DeviceMesh:
    """Shard every block and the root over all ranks, in place.

    No mixed-precision policy: the base is stored in its compute type and the adapters in float32. A policy's default
    ``cast_forward_inputs`` on the root would round the float32 timestep to bf16.

    Returns:
        The mesh, one axis ``fsdp``.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    if activation_checkpointing:
        transformer.enable_gradient_checkpointing()
    for block in transformer.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(transformer, mesh=mesh)
    return mesh


def count_sharded_blocks(transformer: WanTransformer3DModel) -> int:
    """Transformer blocks that FSDP2 has wrapped."""
    return sum(isinstance(block, FSDPModule) for block in transformer.blocks)


def full_tensor(parameter: Tensor) -> Tensor:
    """The whole tensor on every rank (a collective for sharded ones)."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def all_reduce_scalars(values: Iterable[float], *, op: dist.ReduceOp.RedOpType, device: torch.device) -> list[float]:
    """Reduce float64 scalars over all ranks."""
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op)
    return [float(value) for value in tensor.tolist()]
