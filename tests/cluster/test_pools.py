"""The driver's handles on real Ray actors: samples in chunks, and which failure is told."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from miles_wan.cluster.actors import EngineActor
from miles_wan.cluster.pools import EnginePool, gather, lost_workers_explained
from miles_wan.errors import EngineError, MilesWanError
from miles_wan.records import (
    Conditioning,
    PromptRecord,
    RolloutOutput,
    RolloutRequest,
    Sample,
    SamplingSettings,
    Trajectory,
)

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    here = str(Path(__file__).parent)  # the workers import this file's classes
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield
    ray.shutdown()


class Arithmetic:
    """An engine whose videos are a function of the seed; the first pixel tells how many were asked for at once."""

    async def generate(
        self, request: RolloutRequest, sample_indices: Sequence[int], *, return_conditioning: bool = False
    ) -> list[RolloutOutput]:
        await asyncio.sleep(0.05 * (request.seeds[sample_indices[0]] % 3))  # answers overtake each other
        outputs = []
        for index in sample_indices:
            frames = np.full((1, 1, 2, 3), request.seeds[index], np.uint8)
            frames[0, 0, 0, 0] = len(sample_indices)
            outputs.append(RolloutOutput(request.seeds[index], frames, self._trajectory(request, index), None, 0.5))
        if return_conditioning:
            embeds = np.full((2, 2), request.group_index, np.float32)
            outputs[0] = RolloutOutput(**{**vars(outputs[0]), "conditioning": Conditioning(embeds, None, None)})
        return outputs

    def _trajectory(self, request: RolloutRequest, index: int) -> Trajectory | None:
        if not request.keeps_trajectory:
            return None
        return Trajectory(
            latents=np.zeros((0, 2, 1, 1, 1, 1), np.float32),
            steps=(),
            sigmas=np.zeros(2, np.float32),
            timesteps=np.zeros(0, np.float32),
            log_probs=np.zeros(0, np.float32),
            has_condition=False,
            policy_version=0,
            seed=request.seeds[index],
        )


@ray.remote(num_cpus=0)
class ArithmeticActor(EngineActor.__ray_metadata__.modified_class):  # type: ignore[attr-defined, misc]
    """The product's actor around it."""

    def __init__(self) -> None:
        super().__init__(0)
        self._engine = Arithmetic()


@pytest.fixture(scope="module")
def engines() -> list[Any]:
    return [ArithmeticActor.options(max_concurrency=8).remote() for _ in range(2)]


def requests(**changes: Any) -> list[RolloutRequest]:
    sampling = SamplingSettings(
        width=2, height=1, num_frames=1, fps=8, num_inference_steps=1, guidance_scale=1.0, flow_shift=5.0
    )
    return [
        RolloutRequest(
            **{
                "record": PromptRecord(record_id=f"record{group}", prompt="a bird"),
                "seeds": tuple(range(10 * group, 10 * group + 5)),
                "sampling": sampling,
                "stochastic_steps": (0,),
                "policy_version": 0,
                "rollout_id": 0,
                "group_index": group,
                **changes,
            }
        )
        for group in range(3)
    ]


def by_position(samples: Iterator[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: (sample.group_index, sample.sample_index))


@pytest.mark.parametrize(("size", "chunks"), [(1, [1] * 5), (2, [2, 2, 2, 2, 1]), (3, [3, 3, 3, 2, 2]), (8, [5] * 5)])
def test_samples_do_not_depend_on_how_many_a_call_takes(engines: list[Any], size: int, chunks: list[int]) -> None:
    samples = by_position(EnginePool(engines, concurrency=2, samples_per_call=size).generate(requests()))
    assert [(sample.group_index, sample.sample_index) for sample in samples] == [
        (g, i) for g in range(3) for i in range(5)
    ]
    for sample in samples:
        frames, trajectory, conditioning = ray.get([sample.frames, sample.trajectory, sample.conditioning])
        assert sample.seed == 10 * sample.group_index + sample.sample_index == trajectory.seed
        assert (frames[0, 0, 1] == sample.seed).all()
        assert frames[0, 0, 0, 0] == chunks[sample.sample_index]
        assert (conditioning.prompt_embeds == sample.group_index).all()


def test_conditioning_is_kept_where_the_trainer_gets_something(engines: list[Any]) -> None:
    pool = EnginePool(engines, concurrency=2, samples_per_call=2)
    forward = by_position(pool.generate(requests(stochastic_steps=(), keep_final=True)))
    assert ray.get(forward[1].conditioning) is not None
    validation = by_position(pool.generate(requests(stochastic_steps=())))
    assert ray.get([validation[1].trajectory, validation[1].conditioning]) == [None, None]


@ray.remote(num_cpus=0)
class Rank:
    def fail(self, seconds: float) -> None:
        time.sleep(seconds)
        raise RuntimeError("Connection closed by peer")

    def refuse(self) -> None:
        raise EngineError("the engine died")

    def die(self, seconds: float) -> None:
        time.sleep(seconds)
        os._exit(1)

    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return "waited"


@pytest.fixture
def ranks() -> Iterator[list[Any]]:
    ranks = [Rank.remote() for _ in range(3)]
    gather([rank.wait.remote(0) for rank in ranks])
    yield ranks
    for rank in ranks:
        ray.kill(rank)


def test_results_come_in_the_order_of_the_calls(ranks: list[Any]) -> None:
    assert gather([ranks[0].wait.remote(0.3), ray.put(2), ranks[1].wait.remote(0)]) == ["waited", 2, "waited"]


def test_the_death_of_a_rank_is_told_and_not_what_others_suffer(ranks: list[Any]) -> None:
    calls = [ranks[0].fail.remote(0), ranks[1].fail.remote(0.3), ranks[2].die.remote(0.8)]
    told = pytest.raises(
        MilesWanError, match=r"a worker process of the run ended \(.*--resume latest continues the run"
    )
    with told, lost_workers_explained():
        gather(calls)


def test_without_a_death_the_first_failure_is_told(ranks: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"), lost_workers_explained():
        gather([ranks[0].fail.remote(0), ranks[1].wait.remote(0.5)])


def test_a_failure_that_explains_itself_is_told_at_once(ranks: list[Any]) -> None:
    started = time.monotonic()
    with pytest.raises(EngineError, match="the engine died"):
        gather([ranks[0].wait.remote(60), ranks[1].refuse.remote()])
    assert time.monotonic() - started < 3
