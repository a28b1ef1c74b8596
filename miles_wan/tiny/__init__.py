"""Tiny Wan2.2, PickScore and CLIP checkpoints and a toy data set, for the demo, the tests and new users. In: a folder and a
seed. Out: folders in the released formats. It knows nothing of rollouts or training.
"""

from miles_wan.tiny.assets import TinyPaths, make_tiny

__all__ = ["TinyPaths", "make_tiny"]
