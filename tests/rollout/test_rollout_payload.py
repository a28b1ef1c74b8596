"""Adapters on their way out of a trainer: what is refused, and what another process reads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from miles_wan.errors import WeightSyncError
from miles_wan.records import WeightUpdate
from miles_wan.rollout.sglang.payload import checked_tensors, serialize_update, tensor_digest

A, B = "blocks.0.attn1.to_q.lora_A.weight", "blocks.0.attn1.to_q.lora_B.weight"


def update(tensors: dict[str, Any], *, alpha: float = 8, rank: int = 2) -> WeightUpdate:
    return WeightUpdate(
        target_module="transformer", tensors=tensors, alpha=alpha, rank=rank, policy_version=1, checksum=""
    )


def pair(**changes: Any) -> dict[str, Any]:
    return {A: torch.ones(2, 6), B: torch.ones(4, 2)} | {{"a": A, "b": B}[key]: value for key, value in changes.items()}


def segments(pid: int) -> set[str]:
    """Files of shared memory that PyTorch made for a process."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{pid}_")}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "adapter is empty"),
        ({A: torch.ones(2, 6)}, "only one of lora_A and lora_B"),
        ({**pair(), "blocks.0.attn1.to_q.weight": torch.ones(4, 6)}, "not adapter tensors: blocks.0.attn1.to_q.weight"),
        ({name.replace(".weight", ".default.weight"): value for name, value in pair().items()}, "not adapter tensors"),
        (pair(a=torch.ones(3, 6)), "do not have rank 2"),
        (pair(b=torch.ones(4, 3)), "do not have rank 2"),
        (pair(b=torch.ones(0, 2)), "empty, as of a shard"),
        (pair(a=torch.full((2, 6), float("nan"))), f"{A}: not finite"),
        (pair(b=torch.full((4, 2), float("inf"))), f"{B}: not finite"),
    ],
)
def test_a_broken_adapter_is_refused(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        checked_tensors(update(tensors))


def test_numpy_and_torch_are_the_same_adapter() -> None:
    values = np.arange(12, dtype=np.float32).reshape(6, 2).T  # not contiguous
    tensors = checked_tensors(update(pair(a=values)))
    assert tensor_digest(tensors[A]) == tensor_digest(torch.from_numpy(values.copy()))


def test_a_fractional_alpha_is_refused() -> None:
    before = segments(os.getpid())
    with pytest.raises(WeightSyncError, match=r"lora_alpha is 2\.5"):
        serialize_update(update(pair(), alpha=2.5), "cpu")
    assert segments(os.getpid()) == before


def test_the_digest_is_the_one_the_engine_computes() -> None:
    from sglang.multimodal_gen.runtime.post_training.tensor_update_checker import compute_tensor_sha256

    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.linspace(-1, 1, 12).reshape(3, 4).to(dtype)
        assert tensor_digest(tensor) == compute_tensor_sha256(tensor)
        assert tensor_digest(tensor.T) == compute_tensor_sha256(tensor.T)
    assert tensor_digest(torch.zeros(2, 3)) != tensor_digest(torch.zeros(3, 2))


READER = """
import sys
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from miles_wan.rollout.sglang.payload import tensor_digest
for text in sys.stdin.read().split():
    payload = MultiprocessingSerializer.deserialize(text)["transformer"]
    bucket = FlattenedTensorBucket(flattened_tensor=payload["flattened_tensor"], metadata=payload["metadata"])
    print("digests", *(f"{name}={tensor_digest(tensor)}" for name, tensor in bucket.reconstruct_tensors()))
    del payload, bucket
"""


def read_elsewhere(texts: tuple[str, ...]) -> list[dict[str, str]]:
    """Another process opens each handle, reads and closes it before the next; the digests it saw."""
    command = [sys.executable, "-c", READER]
    result = subprocess.run(command, input="\n".join(texts), text=True, capture_output=True, timeout=300)
    lines = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("digests ")]
    return [dict(item.split("=") for item in line) for line in lines]


def test_every_consumer_reads_the_same_tensors_one_after_the_other() -> None:
    tensors = pair(a=torch.linspace(0, 1, 12).reshape(2, 6), b=torch.linspace(0, 1, 8).reshape(4, 2).bfloat16())
    before = segments(os.getpid())
    payload = serialize_update(update(tensors), "cpu", consumers=3)
    assert len(segments(os.getpid()) - before) == 1
    assert payload.nbytes == 12 * 4 + 8 * 2
    assert read_elsewhere(payload.texts) == [payload.digests] * 3
    payload.release()
    assert segments(os.getpid()) == before


SENDER = """
import sys, torch
from miles_wan.records import WeightUpdate
from miles_wan.rollout.sglang.payload import serialize_update
tensors = {"b.lora_A.weight": torch.ones(2, 6), "b.lora_B.weight": torch.ones(4, 2)}
update = WeightUpdate(target_module="transformer", tensors=tensors, alpha=8, rank=2, policy_version=1, checksum="")
payload = serialize_update(update, "cpu")
print(payload.texts[0], flush=True)
sys.stdin.readline()
"""


def start_sender() -> tuple[subprocess.Popen[str], str]:
    """A process that has shared an adapter and waits for a line; its handle."""
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert sender.stdout is not None
    return sender, next(line for line in sender.stdout if len(line) > 100).strip()


def test_what_nobody_opened_goes_when_the_sender_is_killed() -> None:
    sender, _text = start_sender()
    assert len(segments(sender.pid)) == 1
    sender.kill()
    sender.wait()
    deadline = time.monotonic() + 20
    while segments(sender.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not segments(sender.pid)


def test_a_pipe_on_the_senders_output_closes_with_the_sender() -> None:
    """PyTorch's shared-memory daemon lives as long as a receiver does, and must not hold the sender's output open."""
    from sglang.srt.utils import MultiprocessingSerializer

    sender, text = start_sender()
    received = MultiprocessingSerializer.deserialize(text)
    end(sender)
    reader = threading.Thread(target=sender.stdout.read, daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(timeout=10)
    assert not reader.is_alive()
    del received


def end(sender: subprocess.Popen[str]) -> None:
    assert sender.stdin is not None
    sender.stdin.write("end\n")
    sender.stdin.flush()
    assert sender.wait(timeout=60) == 0
