"""The driver's handles on the actors: engines, reward workers, training ranks and weight sync, as the loop wants them.

They move object references, never videos or trajectories.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ray

from miles_wan.cluster.signal import train_signal
from miles_wan.config import Config
from miles_wan.errors import MilesWanError, first_line
from miles_wan.faults import reach
from miles_wan.records import RewardInput, RolloutRequest, Sample, Score, TrainItem, TrainSignal, derived_seed
from miles_wan.rollout.base import WeightPush
from miles_wan.weight_sync import verify_reports

logger = logging.getLogger(__name__)

_DEATH_SECONDS = 5.0


def gather(references: Sequence[Any]) -> list[Any]:
    """Results of all calls, in order; the first failure is raised at once, also while other ranks still wait for it.

    When a rank dies, a rank that talked to it may fail a moment earlier and without knowing why: the death is raised.
    """
    pending = list(references)
    while pending:
        _, pending = first_of(pending)
    return ray.get(list(references))


def first_of(pending: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Wait for one of these calls: it, and the others. Its failure is raised as ``gather`` does."""
    ready, others = ray.wait(list(pending), num_returns=1)
    try:
        ray.get(ready[0])
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error, MilesWanError) and (death := _death(others)) is not None:
            raise death from error
        raise
    return ready[0], others


@contextmanager
def lost_workers_explained() -> Iterator[None]:
    """Turns Ray's errors about processes that ended into a MilesWanError with the remedy."""
    try:
        yield
    except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        raise MilesWanError(
            f"a worker process of the run ended ({first_line(error)}); --resume latest continues the run"
        ) from error


def _death(pending: Sequence[Any], *, seconds: float = _DEATH_SECONDS) -> Exception | None:
    """The end of an actor that one of these calls is waiting for, if it is known in time."""
    deadline = time.monotonic() + seconds
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            return None
        try:
            ray.get(ready[0])
        except ray.exceptions.RayActorError as death:
            return death
        except Exception:  # another rank that suffers from it
            continue
    return None


class EnginePool:
    """Spreads samples over the engines; yields each as it finishes.

    Args:
        concurrency: calls in flight for each engine.
        samples_per_call: samples of one request in a call; no result depends on it.
    """

    def __init__(self, engines: Sequence[Any], *, concurrency: int, samples_per_call: int) -> None:
        self._engines = engines
        self._concurrency = concurrency
        self._size = samples_per_call

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Sample]:
        """All samples of ``requests`` in any order. A result does not depend on the engine that made it."""
        waiting = calls_of(requests, self._size)
        waiting.reverse()
        free = [engine for _ in range(self._concurrency) for engine in self._engines]  # in turn, so that none is idle
        conditionings: dict[int, Any] = {}
        running: dict[Any, tuple[Any, RolloutRequest, tuple[int, ...], list[Any]]] = {}
        while waiting or running:
            while waiting and free:
                request, indices = waiting.pop()
                engine = free.pop(0)
                call = engine.generate.options(num_returns=2 * len(indices) + 2)
                *results, conditioning, done = call.remote(request, indices)
                conditionings.setdefault(request.group_index, conditioning)
                running[done] = (engine, request, indices, results)
            ready, _ = ray.wait(list(running), num_returns=1)
            engine, request, indices, results = running.pop(ready[0])
            ray.get(ready[0])
            free.append(engine)
            yield from samples_of(request, indices, results, conditionings[request.group_index])


def calls_of(requests: Sequence[RolloutRequest], size: int) -> list[tuple[RolloutRequest, tuple[int, ...]]]:
    """The calls that make all samples of ``requests``: at most ``size`` samples of one request each."""
    return [
        (request, tuple(range(len(request.seeds))[start : start + size]))
        for request in requests
        for start in range(0, len(request.seeds), size)
    ]


def samples_of(
    request: RolloutRequest, indices: Sequence[int], results: Sequence[Any], conditioning: Any
) -> Iterator[Sample]:
    """The samples of one finished call; ``results`` are their frames and then their trajectories."""
    count = len(indices)
    for index, frames, trajectory in zip(indices, results[:count], results[count:], strict=True):
        if request.keeps_trajectory:
            reach("rollout/sample", request.rollout_id)
        yield Sample(
            record=request.record,
            group_index=request.group_index,
            sample_index=index,
            seed=request.seeds[index],
            frames=frames,
            trajectory=trajectory,
            conditioning=conditioning,
        )


class RewardPool:
    """Scores samples in batches whose composition depends on positions alone, never on arrival."""

    def __init__(self, workers: Sequence[Any], *, batch_size: int, fps: int) -> None:
        self._workers = workers
        self._batch_size = batch_size
        self._fps = fps
        self.begin([], validation=False)

    def begin(self, requests: Sequence[RolloutRequest], *, validation: bool) -> None:
        """Fix the batches of the coming samples."""
        keys = [(request.group_index, index) for request in requests for index in range(len(request.seeds))]
        size = self._batch_size
        self._batches = [keys[start : start + size] for start in range(0, len(keys), size)]
        self._batch_of = {key: number for number, batch in enumerate(self._batches) for key in batch}
        self._waiting: dict[int, dict[tuple[int, int], Sample]] = {number: {} for number in range(len(self._batches))}
        self._calls: dict[int, Any] = {}
        self._validation = validation

    def submit(self, sample: Sample) -> None:
        """Take a finished sample; its batch starts when it is full."""
        key = (sample.group_index, sample.sample_index)
        number = self._batch_of[key]
        waiting = self._waiting[number]
        waiting[key] = sample
        if len(waiting) == len(self._batches[number]):
            batch = [self._input(waiting[member]) for member in self._batches[number]]
            worker = self._workers[number % len(self._workers)]
            self._calls[number] = worker.score.remote(batch, self._validation)
            waiting.clear()

    def collect(self) -> tuple[dict[tuple[int, int], Score], float]:
        """Wait for everything submitted. Returns scores by (group_index, sample_index) and the workers' busy seconds."""
        scores: dict[tuple[int, int], Score] = {}
        busy = 0.0
        results = gather(list(self._calls.values()))
        for number, (batch_scores, seconds) in zip(self._calls, results, strict=True):
            scores.update(zip(self._batches[number], batch_scores, strict=True))
            busy += seconds
        self._calls.clear()
        return scores, busy

    def _input(self, sample: Sample) -> RewardInput:
        record = sample.record
        return RewardInput(record.prompt, sample.frames, self._fps, record.image_path, record.metadata)


class TrainerGroup:
    """The FSDP2 ranks as one trainer."""

    def __init__(self, ranks: Sequence[Any], config: Config) -> None:
        self._ranks = ranks
        self._config = config

    def signal(self, scores: Sequence[Score], group_ids: Sequence[int]) -> TrainSignal:
        """Advantages, and which samples are trained on."""
        return train_signal(self._config, scores, group_ids)

    def update(self, items: Sequence[TrainItem], *, rollout_id: int) -> dict[str, float]:
        """One rollout's optimizer steps, at most one for each item."""
        dealt = deal_rollout(self._config, items, rollout_id=rollout_id, ranks=len(self._ranks))
        calls = [actor.update.remote(part, rollout_id) for actor, part in zip(self._ranks, dealt, strict=True)]
        return gather(calls)[0]

    def save_checkpoint(self, directory: str, *, rollout_id: int) -> None:
        """All ranks write into ``directory``."""
        gather([rank.save_checkpoint.remote(directory, rollout_id) for rank in self._ranks])

    def load_checkpoint(self, directory: str) -> None:
        """All ranks read from ``directory``."""
        gather([rank.load_checkpoint.remote(directory) for rank in self._ranks])

    def export(self, directory: str, *, weights: str = "policy") -> None:
        """Write the adapter, or its average (``ema``), in diffusers format."""
        gather([rank.export.remote(directory, weights) for rank in self._ranks])


def deal_rollout(
    config: Config, items: Sequence[TrainItem], *, rollout_id: int, ranks: int
) -> list[list[list[TrainItem]]]:
    """Deal the items of a rollout in a seeded random order to at most so many optimizer steps as there are items."""
    shuffled = list(items)
    random.Random(derived_seed(config.seed, "batch", rollout_id)).shuffle(shuffled)
    return deal(shuffled, steps=min(config.algorithm.optimizer_steps_per_rollout, len(shuffled)), ranks=ranks)


def deal(items: Sequence[TrainItem], *, steps: int, ranks: int) -> list[list[list[TrainItem]]]:
    """Deal ``items`` in their order to optimizer steps and ranks: [rank][step] lists.

    All ranks of a step get equally many, since their forwards are collectives: copies of weight 0 fill up, and the
    weight of the others makes up for them in the mean.
    """
    bounds = [round(step * len(items) / steps) for step in range(steps + 1)]
    dealt: list[list[list[TrainItem]]] = [[] for _ in range(ranks)]
    for start, end in pairwise(bounds):
        own = items[start:end]
        share = -(-len(own) // ranks)
        missing = share * ranks - len(own)
        if missing:
            weighted = [replace(item, weight=share * ranks / len(own)) for item in own]
            own = [*weighted, *[replace(own[0], weight=0.0)] * missing]
        for rank in range(ranks):
            dealt[rank].append(list(own[rank * share : (rank + 1) * share]))
    return dealt


class WeightSync:
    """Moves the adapter from the training ranks into every engine and proves that it arrived.

    Args:
        workers_per_engine: processes of one engine; each opens a handle of its own.
        sharing: over CUDA IPC, whether a rank is on an engine's device and publishes.
    """

    def __init__(
        self,
        ranks: Sequence[Any],
        engines: Sequence[Any],
        *,
        workers_per_engine: int,
        transport: str,
        sharing: Sequence[bool],
    ) -> None:
        self._ranks = ranks
        self._engines = engines
        self._workers = workers_per_engine
        self._transport = transport
        self._sharing = sharing

    def push(self, policy_version: int, *, weights: str) -> dict[str, float]:
        """Publish, apply, verify, release. Returns metrics ``sync/...``.

        Args:
            weights: ``policy``, or ``ema`` for the average of the adapter.

        Raises:
            WeightSyncError: an engine does not provably hold what was sent.
        """
        started = time.monotonic()
        calls = [
            rank.publish.remote(policy_version, self._transport, consumers, weights)
            for rank, consumers in zip(self._ranks, self._consumers(), strict=True)
        ]
        published: list[list[WeightPush]] = [pushes for pushes in gather(calls) if pushes]
        sent = published[0]
        for number in range(len(sent)):
            self._apply([pushes[number] for pushes in published], policy_version=policy_version)
        gather([rank.release.remote() for rank in self._ranks])
        tensors = sum(len(push.digests) for push in sent)
        prefixes = sum(_layers(push) for push in sent)
        nbytes = sum(push.nbytes for push in sent)
        seconds = time.monotonic() - started
        logger.info(
            "weight sync: version %d (%s), %s, 0 unmapped, %d bytes, %.2f s, %s to %d engines, verified",
            policy_version, weights,
            " and ".join(f"{push.target_module}: {len(push.digests)} tensors, {_layers(push)} prefixes" for push in sent),
            nbytes, seconds, self._transport, len(self._engines),
        )  # fmt: skip
        return {
            "sync/seconds": seconds,
            "sync/bytes": nbytes,
            "sync/tensors": tensors,
            "sync/prefixes": prefixes,
            "sync/unmapped": 0,  # anything else was an error
            "sync/policy_version": policy_version,
        }

    def _apply(self, published: Sequence[WeightPush], *, policy_version: int) -> None:
        """One module's adapter, as published by each sharing rank, into every engine."""
        pushes = [self._for_engine(index, published) for index in range(len(self._engines))]
        reports = gather(
            [engine.apply_weights.remote(push) for engine, push in zip(self._engines, pushes, strict=True)]
        )
        sent = published[0]
        verify_reports(reports, tensors=len(sent.digests), layer_prefixes=_layers(sent), policy_version=policy_version)

    def _consumers(self) -> list[int]:
        """Handles that each rank makes: over CUDA IPC one for the engine worker on its device, if any; else rank 0 makes
        all."""
        if self._transport == "cuda_ipc":
            return [int(shares) for shares in self._sharing]
        return [len(self._engines) * self._workers, *[0] * (len(self._ranks) - 1)]

    def _for_engine(self, index: int, published: Sequence[WeightPush]) -> WeightPush:
        """The push with the handles that engine ``index`` may open."""
        if self._transport == "cuda_ipc":
            return replace(
                published[0],
                payloads=[payload for push in published for payload in push.payloads],
                device_uuids=[uuid for push in published for uuid in push.device_uuids or ()],
            )
        own = slice(index * self._workers, (index + 1) * self._workers)
        return replace(published[0], payloads=published[0].payloads[own])


def _layers(push: WeightPush) -> int:
    return len({name.rsplit(".lora_", 1)[0] for name in push.digests})
