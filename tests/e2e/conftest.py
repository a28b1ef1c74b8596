"""One finished run that several tests read."""

from __future__ import annotations

import pytest
from launching import SMALL, Finished, command, run

from miles_wan.tiny import TinyPaths


@pytest.fixture(scope="session")
def finished_run(tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Three rollouts of two optimizer steps with KL, validation and a checkpoint after each."""
    folder = tmp_path_factory.mktemp("e2e") / "whole"
    return run(command(tiny_paths, folder, *SMALL), folder)
