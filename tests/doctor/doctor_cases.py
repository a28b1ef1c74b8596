"""What the tests of the check share: calling it, and pretending to have devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_wan import doctor
from miles_wan.config import Config
from miles_wan.doctor import machine
from miles_wan.errors import InputError


def check(tree: dict[str, Any]) -> doctor.Report:
    return doctor.check(Config.model_validate(tree))


def faults_of(tree: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(InputError) as raised:
        check(tree)
    return raised.value.faults


def only_fault(tree: dict[str, Any]) -> str:
    faults = faults_of(tree)
    assert len(faults) == 1, faults
    return faults[0]


def write_lines(path: Path, *lines: Any) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def shard_over_all(tree: dict[str, Any]) -> None:
    """Every device gets a rank and a prompt."""
    devices = tree["cluster"].get("num_gpus", 1)
    tree["training"] = {"dp_size": devices}
    tree["rollout"]["prompts_per_rollout"] = devices


def use_cuda(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, exist: int, each: int = 2**36, **cluster: Any
) -> list[str | None]:
    """Pretend that ``exist`` devices exist; the lists that were asked about are returned."""
    lists: list[str | None] = []

    def ask(environment: dict[str, str]) -> list[int]:
        listed = environment.get("CUDA_VISIBLE_DEVICES")
        lists.append(listed)
        if listed is None:
            return [each] * exist
        numbers = [int(number) for number in listed.split(",") if number]
        seen = next((i for i, number in enumerate(numbers) if number >= exist), len(numbers))  # as CUDA reads it
        return [each] * seen

    monkeypatch.setattr(machine, "cuda_device_bytes", ask)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tree["cluster"] = {"device": "cuda", **cluster}
    shard_over_all(tree)
    return lists
