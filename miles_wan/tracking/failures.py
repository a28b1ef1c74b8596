"""How an error of this project ends a command: what a person reads, and the exit code. In: an error. Out: text on stderr."""

from __future__ import annotations

import logging

from rich.console import Console

from miles_wan.errors import InputError, MilesWanError

logger = logging.getLogger(__name__)

# Who has more faults than this mends the generator of the file, not its lines.
_SHOWN = 200


def show_failure(error: MilesWanError) -> int:
    """Print ``error`` and return the exit code: 2 for bad input, with every fault on a line, else 1."""
    cause = _cause(error)
    if not isinstance(cause, InputError):
        logger.error("the run failed: %s", cause)
        return 1
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    count = len(cause.faults)
    console.print(f"{count} fault{'s' if count > 1 else ''} in the input; nothing was trained:", style="bold red")
    for fault in cause.faults[:_SHOWN]:
        console.print(f"  - {fault}", markup=False)
    if count > _SHOWN:
        console.print(f"  ... and {count - _SHOWN} more", markup=False)
    return 2


def _cause(error: MilesWanError) -> BaseException:
    """The error as it was raised: Ray wraps those of actors and puts a traceback into the message."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error
