"""What every test may use: the tiny assets, made once, and no model hub."""

from __future__ import annotations

import os
from pathlib import Path

# Before any library reads them: nothing in the tests may reach for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from miles_wan.tiny import TinyPaths, make_tiny


@pytest.fixture(scope="session")
def tiny_paths(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    """The tiny checkpoint, the tiny PickScore and the toy data set of seed 0. Read only."""
    folder: Path = tmp_path_factory.mktemp("assets") / "tiny"
    return make_tiny(folder)
