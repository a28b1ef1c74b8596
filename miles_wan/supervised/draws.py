"""What a step trains on, and who computes it. In: step number and settings. Out: one draw per sample of the batch (clip,
timestep, expert, noise), and every rank's micro-batches. Pure functions of the seed, so that every rank knows the whole batch
and nothing depends on how many there are; they know no tensor of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from miles_wan.data.order import RecordOrder
from miles_wan.flow.timesteps import draw_timesteps
from miles_wan.records import derived_seed
from miles_wan.supervised.config import SftConfig
from miles_wan.wan.experts import Experts

Size = tuple[int, int]


@dataclass(frozen=True)
class Draw:
    """One sample: its ``position`` in the batch, the index of its ``clip``, ``timestep`` in [0, 1000] with the ``expert`` that
    owns it, the seed of its noise, whether its first frame is given, and whether its caption is."""

    position: int
    clip: int
    timestep: float
    expert: str
    noise_seed: int
    with_image: bool
    with_text: bool


@dataclass(frozen=True)
class MicroBatch:
    """Draws of one expert and one size that pass the model together. ``size`` is 0 for a filler, whose draw counts for
    nothing: all ranks run equally many forwards of each expert."""

    draws: tuple[Draw, ...]
    size: int


class TrainingDraws:
    """The batches of a run.

    Args:
        num_clips: training clips.
        experts: of the checkpoint; ``trained`` are those whose timesteps are drawn.
        shift: time shift of the draws.
        image_share: share of the samples whose first frame is given.
    """

    def __init__(
        self,
        config: SftConfig,
        num_clips: int,
        *,
        experts: Experts,
        trained: Sequence[str],
        shift: float,
        image_share: float,
    ) -> None:
        self._config = config
        self._order = RecordOrder(num_clips, config.seed, config.data.shuffle)
        self._experts = experts
        self._trained = tuple(trained)
        self._shift = shift
        self._image_share = image_share

    def batch(self, step: int) -> list[Draw]:
        """The samples of optimizer step ``step`` (from 0): sampled, shifted, then routed."""
        config = self._config
        size = config.training.batch_size
        timesteps = self._timesteps(step, size).tolist()
        images, texts = self._uniform("image", step, size), self._uniform("text", step, size)
        return [
            Draw(
                position=position,
                clip=clip,
                timestep=timesteps[position],
                expert=self._experts.of(timesteps[position]),
                noise_seed=derived_seed(config.seed, "noise", step, position),
                with_image=images[position] < self._image_share,
                with_text=texts[position] >= config.data.text_dropout,
            )
            for position, (clip, _) in enumerate(self._order.batch(step, size))
        ]

    def epoch(self, step: int) -> int:
        """The pass over the data, from 0, that step ``step`` begins in."""
        return self._order.batch(step, self._config.training.batch_size)[0][1]

    def _timesteps(self, step: int, size: int) -> torch.Tensor:
        settings = self._config.timesteps
        generator = torch.Generator().manual_seed(derived_seed(self._config.seed, "timesteps", step))
        high_share, cut = settings.high_share, None
        if len(self._experts.names) == 2:
            first = self._experts.names[0]
            cut = self._experts.ranges()[first][0]
            if len(self._trained) == 1:
                high_share = float(self._trained[0] == first)
        return draw_timesteps(
            size,
            law=settings.law,
            shift=self._shift,
            mean=settings.mean,
            std=settings.std,
            cut=cut,
            high_share=high_share,
            generator=generator,
        )

    def _uniform(self, what: str, step: int, size: int) -> list[float]:
        generator = torch.Generator().manual_seed(derived_seed(self._config.seed, what, step))
        values: list[float] = torch.rand(size, generator=generator, dtype=torch.float64).tolist()
        return values


def micro_batches(
    draws: Sequence[Draw], sizes: Sequence[Size], *, experts: Experts, rank: int, ranks: int, micro_batch_size: int
) -> dict[str, list[MicroBatch]]:
    """What one rank computes of a batch, by expert in the order that all ranks follow. An expert without any draw is left out
    everywhere; a rank that has fewer micro-batches of an expert than another fills up.

    Args:
        sizes: video size of every clip; a micro-batch has one size.
    """
    planned: dict[str, list[MicroBatch]] = {}
    dealt = 0
    for expert in experts.names:
        own = sorted((draw for draw in draws if draw.expert == expert), key=lambda d: (sizes[d.clip], d.position))
        if not own:
            continue
        # Dealt on from expert to expert, so that the ranks have equally much to do.
        hands = [own[(other - dealt) % ranks :: ranks] for other in range(ranks)]
        dealt += len(own)
        batches = [_stacked(hand, sizes, micro_batch_size) for hand in hands]
        filler = MicroBatch((own[0],), 0)
        most = max(len(of_rank) for of_rank in batches)
        planned[expert] = batches[rank] + [filler] * (most - len(batches[rank]))
    return planned


def _stacked(draws: Sequence[Draw], sizes: Sequence[Size], micro_batch_size: int) -> list[MicroBatch]:
    """Micro-batches of neighbours of one size."""
    by_size: dict[Size, list[Draw]] = {}
    for draw in draws:
        by_size.setdefault(sizes[draw.clip], []).append(draw)
    return [
        MicroBatch(tuple(chosen), len(chosen))
        for own in by_size.values()
        for start in range(0, len(own), micro_batch_size)
        if (chosen := own[start : start + micro_batch_size])
    ]


def counts(draws: Sequence[Draw], experts: Experts) -> Mapping[str, int]:
    """Draws of each expert."""
    return {name: sum(draw.expert == name for draw in draws) for name in experts.names}
