"""The weighted sum of all configured rewards. In: videos with prompts. Out: a ``Score`` for each: the total that trains
and every part by name. It checks the contract on both sides: frames in, finite numbers out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from miles_wan.config import RewardConfig
from miles_wan.errors import InputError, MilesWanError, RewardError
from miles_wan.records import RewardInput, Score
from miles_wan.rewards.frames import check_frames
from miles_wan.rewards.registry import RewardCallable, build

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A message quotes so many characters of a prompt.
_QUOTED = 60


class RewardModel:
    """All rewards of a run on one device. Names are unique (the configuration is checked for that).

    Raises InputError with every fault of the configuration if a reward cannot be built.
    """

    def __init__(self, config: RewardConfig, device: torch.device | str) -> None:
        faults: list[str] = []
        self.weights = {function.name: function.weight for function in config.functions}
        self.functions: dict[str, RewardCallable] = {}
        for function in config.functions:
            try:
                built = build(function, device=torch.device(device), dtype=_DTYPES[config.dtype])
                self.functions[function.name] = built
            except InputError as error:
                faults += error.faults
        if faults:
            raise InputError(faults)

    def score(self, batch: Sequence[RewardInput], *, validation: bool = False) -> list[Score]:
        """One score per video, in order.

        Args:
            batch: videos; each reward sees all of them in one call.
            validation: also measure the rewards of weight 0. They are parts of the score and never of its total.

        Raises:
            RewardError: frames that break the contract, a reward that raises, or an answer that is not one finite
                number per video; it names the reward and the video.
        """
        for item in batch:
            try:
                check_frames(item.frames)
            except RewardError as error:
                raise RewardError(f"{describe(item)}: {error}") from None
        names = [name for name, weight in self.weights.items() if validation or weight != 0]
        parts = {name: _call(name, self.functions[name], batch) for name in names}
        return [self._score({name: parts[name][i] for name in names}) for i in range(len(batch))]

    def _score(self, parts: dict[str, float]) -> Score:
        total = math.fsum(self.weights[name] * part for name, part in parts.items() if self.weights[name] != 0)
        return Score(total=total, parts=parts)


def describe(item: RewardInput) -> str:
    """A video in a message: its prompt, shortened, and its first frame."""
    prompt = item.prompt if len(item.prompt) <= _QUOTED else item.prompt[:_QUOTED] + "..."
    return f"video of {prompt!r}" + (f" with image {item.image_path}" if item.image_path is not None else "")


def _call(name: str, function: RewardCallable, batch: Sequence[RewardInput]) -> list[float]:
    if not batch:
        return []
    try:
        answer = function(batch)
    except MilesWanError:
        raise
    except Exception as error:  # a user's function may raise anything
        logger.exception("reward %r raised", name)  # its lines are what the user looks for
        raise RewardError(
            f"reward {name!r} failed on {len(batch)} videos: {type(error).__name__}: {error}; the traceback is in the log"
        ) from error
    try:
        answer = list(answer)
    except TypeError as error:
        raise RewardError(
            f"reward {name!r} gave {answer!r} for {len(batch)} videos; it must give a list with one number each"
        ) from error
    if len(answer) != len(batch):
        raise RewardError(f"reward {name!r} gave {len(answer)} numbers for {len(batch)} videos; it must give one each")
    return [_number(name, value, item) for value, item in zip(answer, batch, strict=True)]


def _number(name: str, value: object, item: RewardInput) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # numpy and torch scalars are numbers, too
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(f"reward {name!r} gave {value!r} for the {describe(item)}; it must be a number") from error
    if not math.isfinite(number):
        raise RewardError(f"reward {name!r} gave {number} for the {describe(item)}; it must be finite")
    return number
