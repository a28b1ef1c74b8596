"""How an adapter travels, as pure functions: CUDA IPC between processes on one device, else shared memory of the node.

Devices are named by UUID: indices mean different cards to processes with different CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_wan.errors import InputError


def physical_devices(indices: Sequence[int], visible: str | None) -> list[str]:
    """Entries of CUDA_VISIBLE_DEVICES for process-local device indices.

    Args:
        indices: device indices as a process counts them, from 0.
        visible: the process's CUDA_VISIBLE_DEVICES (``4,5,6,7`` or UUIDs); None when unset: indices are physical.

    Raises:
        InputError: an index beyond the list.
    """
    if visible is None:
        return [str(index) for index in indices]
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    beyond = [index for index in indices if not 0 <= index < len(entries)]
    if beyond:
        raise InputError([f"device index {index} is not in CUDA_VISIBLE_DEVICES={visible!r}" for index in beyond])
    return [entries[index] for index in indices]


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
