"""The order in which records are drawn. In: how many there are and a seed. Out: which ones a rollout uses. A pure
function of (seed, rollout id, batch size), so that there is no state to save; it knows no record.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miles_wan.records import derived_seed


@dataclass(frozen=True)
class RecordOrder:
    """Epoch after epoch over ``num_records`` records, each epoch in an order of its own if ``shuffle``.

    Draw number p = rollout_id * n + i lies in epoch p // num_records. A rollout may reach into the next epoch, so it
    can hold a record twice; the two differ in their occurrence and therefore in their noise.
    """

    num_records: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_records < 1:
            raise ValueError(f"num_records is {self.num_records}; there must be at least one record to draw")

    def batch(self, rollout_id: int, n: int) -> list[tuple[int, int]]:
        """The ``n`` draws of rollout ``rollout_id`` (from 0): (record index, times it was drawn before)."""
        first = rollout_id * n
        positions = [divmod(p, self.num_records) for p in range(first, first + n)]
        epochs = {epoch: self.epoch(epoch) for epoch in {epoch for epoch, _ in positions}}
        return [(int(epochs[epoch][place]), epoch) for epoch, place in positions]

    def epoch(self, epoch: int) -> np.ndarray:
        """Record indices [num_records] of one epoch, each once."""
        if not self.shuffle:
            return np.arange(self.num_records)
        seed = derived_seed(self.seed, "order", epoch)
        return np.random.Generator(np.random.PCG64(seed)).permutation(self.num_records)
