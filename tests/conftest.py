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


@pytest.fixture(scope="session")
def t2v_paths(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    """As ``tiny_paths``, of Wan2.2-T2V-A14B: two experts, records without images."""
    return make_tiny(tmp_path_factory.mktemp("t2v") / "tiny", family="wan2.2-t2v-a14b")


@pytest.fixture(scope="session")
def i2v_paths(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    """As ``tiny_paths``, of Wan2.2-I2V-A14B: two experts, 36 input channels."""
    return make_tiny(tmp_path_factory.mktemp("i2v") / "tiny", family="wan2.2-i2v-a14b")
