"""One rank, as the launcher starts it: ``python -m miles_wan.supervised CONFIG``. In: the file the launcher wrote and torchrun's
environment. Out: an exit code.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

from miles_wan.supervised.run import run_rank
from miles_wan.supervised.settings import read_settings

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """The kernel ends this rank should its launcher be killed: it would hold the device and the output folder."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(run_rank(read_settings([Path(sys.argv[1])], {})))
