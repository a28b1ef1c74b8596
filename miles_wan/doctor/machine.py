"""Checks the machine: devices, their memory, and the shared memory that samples wait in. It takes no device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from miles_wan.combinations import pairs_per_sample
from miles_wan.config import Config
from miles_wan.wan.family import WanFamily

GIB = 2**30
_SHARED_MEMORY = Path("/dev/shm")
_DEVICE_BYTES = "import torch; n = torch.cuda.device_count(); print([torch.cuda.get_device_properties(i).total_memory for i in range(n)])"


def training_memory(config: Config, faults: list[str], warnings: list[str]) -> int | None:
    """Bytes of memory that one training rank may use; None where there is no device for it."""
    cluster = config.cluster
    if cluster.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        if cluster.num_gpus > cores:
            warnings.append(
                f"cluster.num_gpus: {cluster.num_gpus} worker slots share {cores} CPU core(s); it will be slow"
            )
        return int(psutil.virtual_memory().total) // config.training.dp_size
    environment = dict(os.environ)
    if cluster.cuda_visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = cluster.cuda_visible_devices
    found = cuda_device_bytes(environment)
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    place = "this machine has" if listed is None else f"with CUDA_VISIBLE_DEVICES={listed} this machine shows"
    wanted = len(listed.split(",")) if cluster.cuda_visible_devices is not None and listed else cluster.num_gpus
    if not found:
        faults.append(f"cluster.device: cuda, but {place} no CUDA device; choose --device cpu or check the driver")
    elif max(wanted, cluster.num_gpus) > len(found):
        faults.append(
            f"cluster.num_gpus: {cluster.num_gpus} asked for, but {place} {len(found)} CUDA device(s); lower --num-gpus"
        )
    return min(found) if found else None


def cuda_device_bytes(environment: Mapping[str, str]) -> list[int]:
    """Memory of each device that a process with this environment sees. Asked in a process of its own: the device list is
    read once per process, and this process must not take a device."""
    command = [sys.executable, "-c", _DEVICE_BYTES]
    answer = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=300, check=False)
    last = answer.stdout.strip().splitlines()[-1:]
    return [int(size) for size in json.loads(last[0])] if answer.returncode == 0 and last else []


def memory_warnings(config: Config, family: WanFamily) -> list[str]:
    """Finished samples of a rollout wait in the object store, which lives in /dev/shm and spills to disk when full."""
    rollout = config.rollout
    if not _SHARED_MEMORY.is_dir():
        return [f"{_SHARED_MEMORY} does not exist: samples will pass through the disk, which is slow"]
    channels, frames, height, width = family.latent_shape(rollout.num_frames, rollout.height, rollout.width)
    states = 1 if config.algorithm.loss == "nft" else 2 * pairs_per_sample(config)
    kept = 4 * states * channels * frames * height * width
    sample = 3 * rollout.num_frames * rollout.height * rollout.width + kept
    needed = sample * rollout.prompts_per_rollout * rollout.samples_per_prompt
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if needed <= free:
        return []
    return [
        f"{_SHARED_MEMORY} has {free / GIB:.1f} GiB free, the samples of one rollout take {needed / GIB:.1f} GiB: the rest "
        "spills to disk, which is slow; enlarge it (docker: --shm-size) or lower rollout.prompts_per_rollout"
    ]
