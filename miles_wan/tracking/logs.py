"""The log format of every process: one logger ``miles_wan`` with time, role and level.

In: a role (driver, trainer-0, engine-0, reward-0). Out: lines on stderr, through rich where a person watches. It knows no
other module of the project; every module logs with ``logging.getLogger(__name__)``.
"""

from __future__ import annotations

import logging
import sys
from functools import cache

from rich.console import Console
from rich.logging import RichHandler

LOGGER_NAME = "miles_wan"


@cache
def console() -> Console:
    """The one console of this process, on stderr: live bars and log lines must share it, or they garble each other."""
    return Console(stderr=True)


def is_watched() -> bool:
    """Whether a person watches: stdout and stderr are a terminal. A job's log file is none, even with colours forced on."""
    return sys.stdout.isatty() and console().file.isatty()


def configure_logging(role: str, *, level: int | str = logging.INFO) -> logging.Logger:
    """Set up the project's logger in this process. A second call replaces the first.

    Args:
        role: who speaks, as it stands in each line.
        level: least level that is shown.
    """
    logger = logging.getLogger(LOGGER_NAME)
    for handler in list(logger.handlers):
        if handler.get_name() == LOGGER_NAME:
            logger.removeHandler(handler)
    handler = _rich_handler(role) if is_watched() else _plain_handler(role)
    handler.set_name(LOGGER_NAME)
    logger.addHandler(handler)
    logger.setLevel(level)
    # SGLang and Ray put handlers on the root logger of their processes; each line would come twice.
    logger.propagate = False
    return logger


def _plain_handler(role: str) -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {_literal(role)} %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    return handler


def _rich_handler(role: str) -> logging.Handler:
    handler = RichHandler(console=console(), show_path=False, log_time_format="%Y-%m-%d %H:%M:%S")
    handler.setFormatter(logging.Formatter(f"{_literal(role)} %(message)s"))
    return handler


def _literal(role: str) -> str:
    return role.replace("%", "%%")
