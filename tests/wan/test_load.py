"""A checkpoint whose weights do not fit its configuration is refused: diffusers would fill the gaps with random numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from miles_wan.errors import InputError
from miles_wan.tiny import TinyPaths
from miles_wan.wan.load import load_transformer


def test_missing_weights_are_refused(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_paths.model / "transformer", folder / "transformer")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_layers": 3}))
    with pytest.raises(InputError, match=r"missing keys, e\.g\. blocks\.2"):
        load_transformer(folder, dtype="fp32")


def test_whole_weights_load(tiny_paths: TinyPaths) -> None:
    assert len(load_transformer(tiny_paths.model, dtype="fp32").blocks) == 2
