"""What the tests of the local engine share: a record, requests, and an engine over the tiny transformer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from diffusers import WanTransformer3DModel
from local_parts import local_engine, model_of

from miles_wan.records import PromptRecord, RolloutRequest, SamplingSettings
from miles_wan.rollout.local import LocalEngine
from miles_wan.tiny import TinyPaths
from miles_wan.wan.model import WanModel

MakeRequest = Callable[..., RolloutRequest]


@pytest.fixture(scope="session")
def record(tiny_paths: TinyPaths) -> PromptRecord:
    """The first training record of the toy data set, with its first frame."""
    line = json.loads(tiny_paths.train_jsonl.read_text().splitlines()[0])
    image = tiny_paths.train_jsonl.parent / line["metadata"]["image_path"]
    return PromptRecord(record_id="first", prompt=line["input"], image_path=str(image), source="train.jsonl:1")


@pytest.fixture(scope="session")
def model(tiny_paths: TinyPaths) -> WanModel:
    return model_of(tiny_paths)


@pytest.fixture(scope="session")
def transformer(model: WanModel) -> WanTransformer3DModel:
    return model["transformer"]


@pytest.fixture(scope="session")
def local(tiny_paths: TinyPaths, model: WanModel) -> LocalEngine:
    return local_engine(tiny_paths, model)


@pytest.fixture(scope="session")
def make_request(record: PromptRecord) -> MakeRequest:
    """Requests for 32x32x5 in 6 steps, steps 0, 1 and 3 stochastic. Changes go to the request or to its sampling."""
    sampling = SamplingSettings(
        width=32, height=32, num_frames=5, fps=8, num_inference_steps=6, guidance_scale=3.0, flow_shift=5.0
    )
    standard = RolloutRequest(
        record=record,
        seeds=(7, 8),
        sampling=sampling,
        stochastic_steps=(0, 1, 3),
        policy_version=3,
        rollout_id=0,
        group_index=0,
    )

    def make(*, image: bool = True, **changes: Any) -> RolloutRequest:
        of_request = {key: value for key, value in changes.items() if hasattr(standard, key)}
        of_sampling = {key: value for key, value in changes.items() if key not in of_request}
        request = replace(standard, sampling=replace(sampling, **of_sampling), **of_request)
        return request if image else replace(request, record=replace(request.record, image_path=None))

    return make
