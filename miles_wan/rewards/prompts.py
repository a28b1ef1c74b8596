"""Prompts that are longer than a reward's text encoder reads. In: prompts, and which of them were cut. Out: a count, and
one line in the log. It knows no tokenizer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

# The message quotes so many characters of a prompt.
_QUOTED = 60


class CutPrompts:
    """Counts the different prompts that were cut, and says so once.

    Args:
        reward: the name of the reward, for the message.
        max_tokens: what the text encoder reads of a prompt, start and end token included.
    """

    def __init__(self, reward: str, max_tokens: int) -> None:
        self.reward = reward
        self.max_tokens = max_tokens
        self._seen: set[str] = set()

    @property
    def count(self) -> int:
        """How many different prompts were cut so far."""
        return len(self._seen)

    def note(self, prompts: Sequence[str], cut: Sequence[bool]) -> None:
        """Count the prompts that are marked as cut; the first of all is logged."""
        told = bool(self._seen)
        self._seen.update(prompt for prompt, is_cut in zip(prompts, cut, strict=True) if is_cut)
        if self._seen and not told:
            first = prompts[list(cut).index(True)]
            logger.warning(
                "reward %r reads %d tokens of a prompt: %d of these %d prompts are cut, first %r...; later ones are not named",
                *(self.reward, self.max_tokens, sum(cut), len(prompts), first[:_QUOTED]),
            )
