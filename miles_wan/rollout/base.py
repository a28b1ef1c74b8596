"""What a rollout engine is. In: one request and the position of a sample in it, or an adapter. Out: a video with its
trajectory, or a report that the adapter is provably there. It knows no engine, no Ray and no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles_wan.errors import EngineError
from miles_wan.records import Float32, RolloutOutput, RolloutRequest


class EngineMismatchError(EngineError):
    """The engine serves, and not as it was asked to.

    Args:
        message: for a person.
        found, wanted: by name, what the engine does and what it should do: ``sigmas`` (a grid), an option of its start
            (``flow_shift``), or ``hook.NAME`` for a change of ours to the engine (``disabled`` instead of ``active``).
    """

    def __init__(self, message: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        self.found = dict(found)
        self.wanted = dict(wanted)
        super().__init__(message)

    def __reduce__(self) -> tuple[type[EngineMismatchError], tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
        return EngineMismatchError, (str(self), self.found, self.wanted)


def hook_not_in_effect(message: str, *hooks: str) -> EngineMismatchError:
    """What the engine computed shows that one of these hooks does nothing."""
    names = [f"hook.{hook}" for hook in hooks]
    return EngineMismatchError(message, dict.fromkeys(names, "without effect"), dict.fromkeys(names, "active"))


@dataclass(frozen=True)
class EngineInfo:
    """What a started engine says about itself; ``hooks`` maps each of our changes to the engine to its state."""

    url: str
    pid: int
    version: str
    pipeline_config: str
    flow_shift: float
    dtype: str
    tp_size: int
    sp_size: int
    lora_merge_mode: str
    hooks: Mapping[str, str]
    log_path: str
    start_seconds: float


@dataclass(frozen=True)
class WeightPush:
    """An adapter on its way to an engine.

    ``payloads`` are serialized handles to the tensors: one for all workers of the engine, or one per device with its
    ``device_uuids``. ``digests`` maps every tensor name (``blocks.0.attn1.to_q.lora_A.weight``) to the sha256 of dtype,
    shape and bytes; the scale is alpha / rank.
    """

    target_module: str
    payloads: Sequence[str]
    device_uuids: Sequence[str] | None
    digests: Mapping[str, str]
    alpha: int
    rank: int
    nbytes: int
    policy_version: int


@dataclass(frozen=True)
class SyncReport:
    """A push that was verified: tensors whose digest the engine confirmed, layers they belong to, names it did not know."""

    tensors: int
    layer_prefixes: int
    unmapped: int
    bytes: int
    seconds: float
    policy_version: int


@dataclass(frozen=True)
class DebugTensors:
    """What an engine did in every step: [N, C, F, h, w] each, ``stds`` [N]."""

    noises: Float32
    means: Float32
    model_outputs: Float32
    stds: Float32


@dataclass(frozen=True)
class Answer:
    """One sample with what comparisons need; ``states`` maps state index to latent [C, F, h, w], ``log_probs`` [N] holds
    every step, ``sigmas`` [N + 1].
    """

    output: RolloutOutput
    states: Mapping[int, Float32]
    log_probs: Float32
    sigmas: Float32
    debug: DebugTensors | None


class RolloutEngine(Protocol):
    """One engine: it turns requests into videos with the weights it was last given."""

    def start(self) -> EngineInfo:
        """Start, wait until ready and check the engine. Raises EngineError."""

    async def generate(
        self, request: RolloutRequest, sample_indices: Sequence[int], *, return_conditioning: bool = False
    ) -> list[RolloutOutput]:
        """The videos of ``request.seeds[i]`` for every i of ``sample_indices``, in that order; the first with the
        conditioning of their record if asked. Raises EngineError."""

    async def apply_weights(self, push: WeightPush) -> SyncReport:
        """Replace the adapter and prove it. Raises WeightSyncError, EngineError."""

    async def health(self) -> None:
        """Raises EngineError if the engine cannot serve."""

    async def close(self) -> None:
        """End the engine and everything it started."""
