"""What the rollout tests share: a record, the tiny transformer in diffusers, and one real server with all hooks."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from miles_wan.cluster import lifeline
from miles_wan.records import PromptRecord
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.rollout.sglang.settings import EngineSettings
from miles_wan.tiny import TinyPaths

RUN_ID = f"tests-{os.getpid()}"
MODEL_ID = "Wan2.2-TI2V-5B-Diffusers"
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session")
def record(tiny_paths: TinyPaths) -> PromptRecord:
    return record_of(tiny_paths)


def record_of(paths: TinyPaths) -> PromptRecord:
    """The first training record of the toy data set, with its first frame if the family takes one."""
    line = json.loads(paths.train_jsonl.read_text().splitlines()[0])
    image = line["metadata"].get("image_path")
    path = None if image is None else str(paths.train_jsonl.parent / image)
    return PromptRecord(record_id="first", prompt=line["input"], image_path=path, source="train.jsonl:1")


@pytest.fixture(scope="session")
def transformer(tiny_paths: TinyPaths) -> WanTransformer3DModel:
    return WanTransformer3DModel.from_pretrained(tiny_paths.model / "transformer", torch_dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Runs coroutines of all tests in one event loop, as an actor would."""
    with asyncio.Runner() as runner:
        yield runner.run


def settings_for(model: Path, log_dir: Path, **changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model_path": str(model),
        "model_id": MODEL_ID,
        "devices": ("0", "1"),
        "tp_size": 2,
        "device": "cpu",
        "dtype": "fp32",
        "log_dir": log_dir,
        "start_timeout": 600.0,
        "request_timeout": 120.0,
    }
    return EngineSettings(**(values | changes))


@pytest.fixture(scope="session")
def engine(tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[SGLangEngine]:
    """A real server: tensor parallel over two workers, float32, all hooks."""
    folder = tmp_path_factory.mktemp("engine")
    engine = SGLangEngine(settings_for(tiny_paths.model, folder, environment=((lifeline.MARKER, RUN_ID),)))
    engine.start()
    yield engine
    run(engine.close())
    lifeline.remove_leftovers(RUN_ID, folder / "none", pids=set())
    assert not list(Path("/dev/shm").glob(f"*{RUN_ID}*"))
