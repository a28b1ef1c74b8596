"""A configuration without a fault, for the tests of the check before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_wan.tiny import TinyPaths


@pytest.fixture
def tree(tiny_paths: TinyPaths, tmp_path: Path) -> dict[str, Any]:
    """A configuration without a fault, as a tree that a test may change."""
    reward = {"name": "pickscore", "model": str(tiny_paths.reward), "processor": str(tiny_paths.reward)}
    return {
        "model": {"path": str(tiny_paths.model)},
        "data": {"train": str(tiny_paths.train_jsonl), "eval": str(tiny_paths.eval_jsonl)},
        "rollout": {"width": 32, "height": 32, "num_frames": 5, "prompts_per_rollout": 2, "samples_per_prompt": 2},
        "reward": {"functions": [reward]},
        "eval": {"interval": 1},
        "cluster": {"device": "cpu", "num_gpus": 1},
        "output_dir": str(tmp_path / "runs" / "one"),
    }
