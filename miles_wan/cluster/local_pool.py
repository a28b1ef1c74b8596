"""The driver's handles for rollouts by the training ranks themselves: generation and, in place of a weight sync, the word
which weights generate. They move object references, never videos or trajectories.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from miles_wan.cluster.pools import calls_of, first_of, gather, samples_of
from miles_wan.records import RolloutRequest, Sample

logger = logging.getLogger(__name__)


class LocalRollouts:
    """Spreads samples over the training ranks; yields each as it finishes.

    A forward of the sharded transformer needs all ranks: every rank gets equally many calls, in the same order. Where
    they do not divide, the last ones are made twice and the copies thrown away.
    """

    def __init__(self, ranks: Sequence[Any], *, samples_per_call: int) -> None:
        self._ranks = ranks
        self._samples_per_call = samples_per_call

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Sample]:
        """All samples of ``requests`` in any order. A result does not depend on the rank that made it."""
        calls = calls_of(requests, self._samples_per_call)
        conditionings: dict[int, Any] = {}
        running: dict[Any, tuple[RolloutRequest, tuple[int, ...], Any]] = {}
        fillers = [calls[0]] * (-len(calls) % len(self._ranks))
        dealt = [*calls, *fillers]
        for number, rank in enumerate(self._ranks):
            records = [request.record for request, _ in dealt[number :: len(self._ranks)]]
            running[rank.prepare.remote(records, calls[0][0].sampling.guidance_scale)] = (calls[0][0], (), [])
        for number, (request, indices) in enumerate(dealt):
            rank = self._ranks[number % len(self._ranks)]
            *made, conditioning, done = rank.generate.options(num_returns=2 * len(indices) + 2).remote(request, indices)
            if number < len(calls):
                if 0 in indices:
                    conditionings[request.group_index] = conditioning
                running[done] = (request, indices, made)
            else:
                running[done] = (request, (), [])
        while running:
            done, _ = first_of(list(running))
            request, indices, made = running.pop(done)
            if indices:
                yield from samples_of(request, indices, made, conditionings[request.group_index])


class LocalWeights:
    """The ranks hold the weights they generate with: nothing is sent, and all must hold the same."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = ranks

    def push(self, policy_version: int, *, weights: str) -> dict[str, float]:
        """Generate with ``weights`` (``policy`` or ``ema``) from now on. Returns metrics ``sync/...``.

        Raises:
            MilesWanError: the ranks hold different adapters.
        """
        started = time.monotonic()
        names: list[str] = gather([rank.hold.remote(policy_version, weights) for rank in self._ranks])[0]
        return {
            "sync/seconds": time.monotonic() - started,
            "sync/bytes": 0,
            "sync/tensors": len(names),
            "sync/prefixes": len({name.rsplit(".lora_", 1)[0] for name in names}),
            "sync/unmapped": 0,
            "sync/policy_version": policy_version,
        }
