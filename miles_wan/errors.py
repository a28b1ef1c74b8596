"""The exceptions of this project. A message names the offending value, where it came from and the remedy.

``InputError`` means that the user can mend it (exit code 2, nothing was started); every other ``MilesWanError`` is a
fault of a run in progress (exit code 1).
"""

from __future__ import annotations

from collections.abc import Sequence


def first_line(error: BaseException) -> str:
    """What a library's error says, for the middle of a message: its first line, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class MilesWanError(Exception):
    """Base of all errors this project raises on purpose."""


class InputError(MilesWanError):
    """Bad input of any kind: data, flags, configuration, model folder. Holds every fault found, not the first one.

    Args:
        faults: one sentence per fault, each naming value, place and remedy.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[str, ...]]]:
        return InputError, (self.faults,)


class EngineError(MilesWanError):
    """The rollout engine did not start, answered wrongly, or died."""


class WeightSyncError(MilesWanError):
    """The engine does not provably hold the weights that were sent."""


class ParityError(MilesWanError):
    """Engine and trainer disagree about the likelihood of the same sample by more than the configured bound."""


class RewardError(MilesWanError):
    """A reward function failed or broke its contract."""


class CheckpointError(MilesWanError):
    """A checkpoint is missing, incomplete or does not fit the run."""
