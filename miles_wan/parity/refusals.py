"""What an engine's refusal says about the cause. In: the error with which a start, a push or a rollout ended. Out: causes."""

from __future__ import annotations

import numpy as np

from miles_wan.errors import EngineError, WeightSyncError
from miles_wan.parity.causes import grid_cause
from miles_wan.parity.report import FLOW_SHIFT, MASK, STALE, UNKNOWN, Cause
from miles_wan.rollout.base import EngineMismatchError

_HOOK = "hook."


def refusal_causes(error: EngineError | WeightSyncError) -> list[Cause]:
    """The causes that an error names, at least one."""
    if isinstance(error, WeightSyncError):
        return [Cause(STALE, f"the engine does not hold what was pushed: {error}")]
    if not isinstance(error, EngineMismatchError):
        return [Cause(UNKNOWN, "the engine failed before anything could be compared")]
    return [_cause(name, error) for name in error.found]


def _cause(name: str, error: EngineMismatchError) -> Cause:
    found, wanted = error.found[name], error.wanted[name]
    told = f"{name.removeprefix(_HOOK)} is {found}, not {wanted}"
    if name == "sigmas":
        used, asked = (np.asarray(values, np.float32) for values in (found, wanted))
        return grid_cause(used, asked, "those that were asked for")
    if name == "flow_shift":
        return Cause(FLOW_SHIFT, f"the engine runs with flow shift {found}, configured is {wanted}")
    if name == f"{_HOOK}sampled_log_prob":
        return Cause(MASK, f"the engine counts the given first frame in its log-probs: its hook {told}")
    kind = "hook" if name.startswith(_HOOK) else "option"
    return Cause(UNKNOWN, f"the engine's {kind} {told}")
