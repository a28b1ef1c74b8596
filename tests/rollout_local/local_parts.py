"""A model of a tiny checkpoint and the local engine over it."""

from __future__ import annotations

import torch

from miles_wan.rollout.local import LocalEngine
from miles_wan.tiny import TinyPaths
from miles_wan.wan.family import load_family
from miles_wan.wan.model import WanModel, load_model


def model_of(paths: TinyPaths, *, dtype: str = "fp32") -> WanModel:
    return load_model(load_family(paths.model), dtype=dtype)


def local_engine(paths: TinyPaths, model: WanModel) -> LocalEngine:
    return LocalEngine(load_family(paths.model), model, device=torch.device("cpu"))
