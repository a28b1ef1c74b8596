"""Named points of a run at which a test can stop it, to kill it there. Does nothing unless MILES_WAN_STOP_AT is set.

``MILES_WAN_STOP_AT=point@rollout`` (for example ``train/before_step@2``) makes the first process that reaches the point
write the file named by MILES_WAN_STOP_FILE and sleep for ever.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def reach(point: str, rollout_id: int) -> None:
    """Stop here for ever if the environment asks for it."""
    if os.environ.get("MILES_WAN_STOP_AT") != f"{point}@{rollout_id}":
        return
    Path(os.environ["MILES_WAN_STOP_FILE"]).write_text(f"{os.getpid()}\n")
    while True:
        time.sleep(3600)
