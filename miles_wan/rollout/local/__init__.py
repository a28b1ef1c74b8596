"""The rollout engine inside a training worker: no server, and no second copy of the transformer."""

from miles_wan.rollout.local.engine import LocalEngine

__all__ = ["LocalEngine"]
