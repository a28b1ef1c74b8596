"""How an adapter travels, as pure functions: CUDA IPC between processes on one device, else shared memory of the node.

Devices are named by UUID: indices mean different cards to processes with different CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_wan.errors import InputError


def device_numbers(uuids: Sequence[str], node_uuids: Sequence[str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES entries for devices named by UUID: their positions among all devices of the node.

    The engine reads its list as numbers that NVML and CUDA share, which holds under CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        uuids: the devices of one engine, ``GPU-...``.
        node_uuids: UUIDs of all devices of the node in the order of NVML.

    Raises:
        InputError: a device twice, or one that the node does not have.
    """
    twice = sorted({uuid for uuid in uuids if uuids.count(uuid) > 1})
    absent = [uuid for uuid in uuids if uuid not in node_uuids]
    if twice or absent:
        faults = [f"device {uuid} holds two slots: Ray did not give every slot a device of its own" for uuid in twice]
        faults += [f"device {uuid} is not among those of the node: {', '.join(node_uuids)}" for uuid in absent]
        raise InputError(faults)
    return [str(list(node_uuids).index(uuid)) for uuid in uuids]


def choose_transport(configured: str, *, engine_uuids: Sequence[str], trainer_uuids: Sequence[str]) -> str:
    """``cuda_ipc`` or ``shared_memory``.

    Args:
        configured: ``auto``, ``cuda_ipc`` or ``shared_memory``.
        engine_uuids, trainer_uuids: UUIDs of the devices of all engines and of all training ranks; empty on a CPU.

    Raises:
        InputError: CUDA IPC is asked for and an engine device holds no trainer.
    """
    missing = [uuid for uuid in engine_uuids if uuid not in trainer_uuids]
    possible = bool(engine_uuids) and not missing
    if configured == "cuda_ipc" and not possible:
        raise InputError(
            [f"sync.transport = cuda_ipc, and no trainer holds engine devices {missing or 'on a CPU'}; use auto"]
        )
    return "cuda_ipc" if possible and configured != "shared_memory" else "shared_memory"


def sharing_ranks(transport: str, *, engine_uuids: Sequence[str], trainer_uuids: Sequence[str | None]) -> list[bool]:
    """Which ranks publish over CUDA IPC: those on an engine's device. What nobody opens would never be freed."""
    return [transport == "cuda_ipc" and uuid in engine_uuids for uuid in trainer_uuids]
