"""Adapters on their way out of a trainer process. In: named tensors. Out: serialized handles to one flat buffer in shared
memory (or in the memory of a GPU), and a digest of every tensor. It runs in the trainer and knows no server.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, reductions, set_sharing_strategy

from miles_wan.errors import WeightSyncError
from miles_wan.records import WeightUpdate
from miles_wan.rollout.base import WeightPush
from miles_wan.rollout.sglang.weights import adapter_layers


@dataclass
class SharedPayload:
    """One flat buffer with an adapter in it, and a handle for each process that will open it.

    ``texts`` holds one serialized handle per consumer: a handle counts as one holder of the memory, so each is opened
    once. ``device_uuid`` names the GPU of the buffer, None on a CPU. ``digests`` as in ``WeightPush``. The buffer lives
    until ``release``.
    """

    target_module: str
    texts: tuple[str, ...]
    device_uuid: str | None
    nbytes: int
    digests: Mapping[str, str]
    alpha: int
    rank: int
    policy_version: int
    _buffer: Tensor | None = field(repr=False, default=None)

    def as_push(self) -> WeightPush:
        """What an engine needs to open and verify it."""
        return WeightPush(
            target_module=self.target_module,
            payloads=self.texts,
            device_uuids=None if self.device_uuid is None else [self.device_uuid] * len(self.texts),
            digests=self.digests,
            alpha=self.alpha,
            rank=self.rank,
            nbytes=self.nbytes,
            policy_version=self.policy_version,
        )

    def release(self) -> None:
        """Give the buffer back. The consumers must have copied it.

        A handle that nobody opened still counts as a holder: its memory goes when this process ends. Unlinking it here
        would abort a consumer that closes it late.
        """
        self._buffer = None


def serialize_update(update: WeightUpdate, device: torch.device | str, *, consumers: int = 1) -> SharedPayload:
    """Put an adapter into one shared buffer on ``device`` and serialize ``consumers`` handles to it.

    Raises WeightSyncError if the adapter is empty, a pair is incomplete, a shape does not fit the rank, or a value is
    not finite.
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    device, alpha = torch.device(device), _whole_alpha(update.alpha)
    tensors = checked_tensors(update)
    digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    bucket = FlattenedTensorBucket(named_tensors=[(name, tensor.to(device)) for name, tensor in tensors.items()])
    buffer = bucket.get_flattened_tensor()
    content = {update.target_module: {"flattened_tensor": buffer, "metadata": bucket.get_metadata()}}
    if device.type == "cpu":
        texts = _share_on_cpu(content, buffer, consumers=consumers)
    else:
        texts = _share_on_cuda(content, consumers=consumers)
    return SharedPayload(
        target_module=update.target_module,
        texts=texts,
        device_uuid=None if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid),
        nbytes=buffer.numel(),
        digests=digests,
        alpha=alpha,
        rank=update.rank,
        policy_version=update.policy_version,
        _buffer=buffer,
    )


def checked_tensors(update: WeightUpdate) -> dict[str, Tensor]:
    """The tensors of an update as contiguous CPU tensors, in order, after every check. Raises WeightSyncError."""
    tensors = {name: _cpu_tensor(value) for name, value in update.tensors.items()}
    faults = []
    for layer in adapter_layers(tensors):
        a, b = tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != update.rank or b.shape[1] != update.rank:
            faults.append(
                f"{layer}: lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} do not have rank {update.rank}"
            )
        elif 0 in a.shape or 0 in b.shape:
            faults.append(f"{layer}: lora_A {tuple(a.shape)} or lora_B {tuple(b.shape)} is empty, as of a shard")
    faults += [f"{name}: not finite" for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if faults:
        raise WeightSyncError(
            f"{len(faults)} faults in the adapter of {update.target_module}: " + "; ".join(faults[:5])
        )
    return tensors


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of dtype, shape and bytes, as SGLang's checker computes it."""
    digest = hashlib.sha256(str(tensor.dtype).encode())
    digest.update(repr(tuple(tensor.shape)).encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _cpu_tensor(value: Any) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
    return tensor.detach().to("cpu").contiguous()


def _whole_alpha(alpha: float) -> int:
    if int(alpha) != alpha:
        raise WeightSyncError(f"lora_alpha is {alpha}; the engine takes whole numbers only")
    return int(alpha)


def _share_on_cpu(content: Mapping[str, Any], buffer: Tensor, *, consumers: int) -> tuple[str, ...]:
    _start_shared_memory_helper()
    with _sharing_by_file_name():
        buffer.share_memory_()
        return tuple(_serialize(content) for _ in range(consumers))


def _share_on_cuda(content: Mapping[str, Any], *, consumers: int) -> tuple[str, ...]:
    with _devices_by_uuid():
        return tuple(_serialize(content) for _ in range(consumers))


def _serialize(content: Mapping[str, Any]) -> str:
    from sglang.srt.utils import MultiprocessingSerializer

    return str(MultiprocessingSerializer.serialize(content, output_str=True))


@contextmanager
def _sharing_by_file_name() -> Iterator[None]:
    """Unrelated processes cannot hand each other file descriptors, PyTorch's default."""
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    try:
        yield
    finally:
        set_sharing_strategy(before)


@contextmanager
def _devices_by_uuid() -> Iterator[None]:
    """Handles name a GPU by UUID, as SGLang's receiver reads them: numbers differ between processes."""
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    before = reductions.reduce_tensor, reductions.rebuild_cuda_tensor
    monkey_patch_torch_reductions()
    try:
        yield
    finally:
        reductions.reduce_tensor, reductions.rebuild_cuda_tensor = before
        for name in ("_reduce_tensor_original", "_rebuild_cuda_tensor_original"):
            if hasattr(reductions, name):
                delattr(reductions, name)
        reductions.init_reductions()


@cache
def _start_shared_memory_helper() -> None:
    """PyTorch starts a daemon at the first named segment. It would inherit our output and keep a pipe on it open."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        with _sharing_by_file_name():
            torch.zeros(1).share_memory_()
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)
