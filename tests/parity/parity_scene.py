"""Both sides over the tiny checkpoint, for tests of the parity check."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from miles_wan.cluster.requests import RequestPlanner
from miles_wan.config import Config
from miles_wan.configuration import read_config, recipe_paths
from miles_wan.data import load_records
from miles_wan.parity import ParityReport, compare
from miles_wan.parity.command import Prepared, prepare
from miles_wan.parity.inputs import for_parity
from miles_wan.parity.parts import EngineSide, LocalSide
from miles_wan.records import RolloutRequest
from miles_wan.rollout.local import LocalEngine
from miles_wan.tiny import TinyPaths
from miles_wan.wan.family import ModelFolder, load_family
from miles_wan.wan.lora import add_adapters
from miles_wan.wan.model import WanModel, load_model

CPU = torch.device("cpu")


@dataclass
class Scene:
    """A configuration, its requests, and all but the engine."""

    config: Config
    folder: ModelFolder
    prepared: Prepared

    @property
    def requests(self) -> Sequence[RolloutRequest]:
        return self.prepared.requests

    def local_engine(self, called: Callable[[WanModel], Any] = lambda model: model) -> LocalSide:
        """A local engine with a model of its own, so that its weights can be stale; float32, whatever the trainer has, so
        that a bfloat16 trainer differs by its rounding. ``called`` puts a fault between engine and model."""
        model = load_model(self.folder, dtype="fp32")
        trained = self.folder.routing.chosen(self.config.model.train_experts)
        add_adapters(model, self.config.model, names=trained, seed=0)
        return LocalSide(LocalEngine(self.folder, called(model), device=CPU), model)

    def report(self, engine: EngineSide) -> ParityReport:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # several would spend their time waiting for each other, beside a server
        try:
            return compare(
                engine,
                self.prepared.trainer,
                self.requests,
                references=self.prepared.references,
                adapters=self.prepared.adapters,
                config=self.config,
            )
        finally:
            torch.set_num_threads(threads)


def scene(
    paths: TinyPaths,
    folder: Path,
    *,
    recipe: str = "tiny_ti2v",
    image: bool = True,
    records: int = 2,
    samples: int = 2,
    **changes: Any,
) -> Scene:
    """A tiny recipe over ``records`` records with ``samples`` each. ``changes`` are dotted fields with _ for the dot of
    ``rollout_guidance_scale``."""
    data = paths.train_jsonl
    if not image:
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        data = folder / "without_images.jsonl"
        data.write_text("\n".join(json.dumps({"input": line["input"]}) for line in lines))
    overrides = {
        "model.path": str(paths.model),
        "data.train": str(data),
        "rollout.engine": "local",
        **{name.replace("_", ".", 1): value for name, value in changes.items()},
    }
    config = for_parity(read_config(recipe_paths(recipe), overrides), records=records, samples=samples)
    requests = RequestPlanner(config, load_records(data).records, ()).training(0, policy_version=2)
    model = load_family(paths.model)
    return Scene(config, model, prepare(config, model, requests, device=CPU))
