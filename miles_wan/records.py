"""The values that travel between the rooms. Plain frozen data over numpy arrays; this file imports no other room.

Arrays are float32 numpy (zero-copy through Ray's object store) unless said otherwise. Shapes: G samples of one prompt,
K kept steps, N denoising steps, C latent channels, F latent frames, T pixel frames, h/w latent and H/W pixel size,
L text tokens, D text width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]


@dataclass(frozen=True)
class PromptRecord:
    """One line of the data set.

    ``record_id`` is stable: a digest of what the line says (prompt, negative prompt, image bytes), not of its position.
    ``image_path`` is absolute; None means text-to-video. ``source`` is ``file:line`` for messages.
    """

    record_id: str
    prompt: str
    image_path: str | None = None
    negative_prompt: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class SamplingSettings:
    """How a video is sampled. ``kind`` is a transition of ``miles_wan.flow``; ``noise_level`` is eta; ``sigmas`` [N + 1]
    is a grid given number by number, None for the closed form with ``flow_shift``; ``guidance_scale_2`` is that of the
    low-noise expert, None for a model without one."""

    width: int
    height: int
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    flow_shift: float
    kind: str = "flow_sde"
    noise_level: float = 0.7
    sigmas: tuple[float, ...] | None = None
    cps_log_prob: str = "density"
    guidance_scale_2: float | None = None


@dataclass(frozen=True)
class RolloutRequest:
    """One record, its G seeds, how to sample, which steps are stochastic (and kept), and who asks.

    ``stochastic_steps`` empty means a deterministic rollout; without ``keep_final`` (the last latent, for forward-process
    training) it keeps no trajectory.
    """

    record: PromptRecord
    seeds: tuple[int, ...]
    sampling: SamplingSettings
    stochastic_steps: tuple[int, ...]
    policy_version: int
    rollout_id: int
    group_index: int
    keep_final: bool = False

    @property
    def keeps_trajectory(self) -> bool:
        """Whether the trainer gets anything of this rollout."""
        return bool(self.stochastic_steps) or self.keep_final


@dataclass(frozen=True)
class Conditioning:
    """What the transformer is conditioned on, stored once per record.

    ``prompt_embeds`` [L, D]; ``negative_prompt_embeds`` [L, D] or None without classifier-free guidance;
    ``condition_latent`` is what a first image gives, None without one: the normalised VAE latent [C, 1, h, w] of the frame
    (TI2V), or mask and latents [4 + C, F, h, w] that are further channels of the input (I2V).
    """

    prompt_embeds: Float32
    negative_prompt_embeds: Float32 | None
    condition_latent: Float32 | None


@dataclass(frozen=True)
class Trajectory:
    """What the trainer needs to re-score one sample.

    ``latents`` [K, 2, C, F, h, w] holds (x_t, x_next) of every kept step; ``steps`` [K] their indices in ``sigmas``
    [N + 1] (terminal 0 included, as the engine used them); ``timesteps`` [K] those of the kept steps, as the engine used
    them: they decide the expert; ``log_probs`` [K] the engine's values, mean over sampled elements; ``has_condition`` says
    that there was a first image (in TI2V latent frame 0 is then given and not sampled). ``seed`` gives all its noise: of a CPU
    generator with this seed the first draw [1, C, F, h, w] is the initial latent, then one for each stochastic step in
    order; ``noise_draws`` [K] are the places of the kept steps among these, None if all stochastic steps are kept.
    ``final_latent`` [C, F, h, w] is x0, if it was asked for.
    """

    latents: Float32
    steps: tuple[int, ...]
    sigmas: Float32
    timesteps: Float32
    log_probs: Float32
    has_condition: bool
    policy_version: int
    seed: int
    final_latent: Float32 | None = None
    noise_draws: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RolloutOutput:
    """What an engine returns for one seed: frames uint8 [T, H, W, 3], the trajectory (None for validation), and the
    conditioning (only for the sample that was asked for it)."""

    seed: int
    frames: UInt8
    trajectory: Trajectory | None
    conditioning: Conditioning | None
    seconds: float


@dataclass(frozen=True)
class Sample:
    """One generated video in the loop. ``frames``, ``trajectory`` and ``conditioning`` are values or handles to values
    (Ray object references): the controller hands them on and never looks inside.

    ``group_index`` is the position of its request in the rollout, ``sample_index`` its position in the group.
    """

    record: PromptRecord
    group_index: int
    sample_index: int
    seed: int
    frames: Any
    trajectory: Any
    conditioning: Any


@dataclass(frozen=True)
class RewardInput:
    """What a reward function sees of one video. This is the signature for a user's own reward:
    ``def my_reward(batch: Sequence[RewardInput]) -> Sequence[float]``.

    ``frames`` uint8 [T, H, W, 3] RGB, ``fps`` frames per second, ``image_path`` of the first frame or None.
    """

    prompt: str
    frames: UInt8
    fps: int
    image_path: str | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """``total`` is the weighted sum that trains; ``parts`` holds every reward by name, validation-only ones included."""

    total: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class TrainSignal:
    """What the scores of a rollout say: ``advantages`` of all its samples, ``kept`` those that are trained on, and metrics
    ``rollout/...`` that count what was left out."""

    advantages: Sequence[float]
    kept: Sequence[bool]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class TrainItem:
    """One sample of a training batch: its trajectory and conditioning (values or handles), its advantage, and its
    ``weight`` in the mean over its optimizer step: 0 for a copy that only fills a rank's batch."""

    trajectory: Any
    conditioning: Any
    advantage: float
    record_id: str
    sample_index: int
    weight: float = 1.0


@dataclass(frozen=True)
class WeightUpdate:
    """Adapter tensors by full name (``blocks.0.attn1.to_q.lora_A.weight``) for one module of the engine.

    ``tensors`` are CPU arrays in the dtype the trainer's forward uses; ``alpha`` and ``rank`` give the scale alpha/rank.
    """

    target_module: str
    tensors: Mapping[str, Any]
    alpha: float
    rank: int
    policy_version: int
    checksum: str


def derived_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that is a function of ``parts`` alone (rule 3 of the architecture): sha256, not ``hash``."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
