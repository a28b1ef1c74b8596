"""Two real FSDP2 ranks over gloo roll out with the adapted transformer they share, each its own record."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_parts import local_engine
from local_ranks import adapted_model, gradient_norm

from miles_wan.tiny import TinyPaths
from miles_wan.wan.family import load_family

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("family", ["tiny", "i2v"])
def test_ranks_make_the_videos_of_the_whole_model(
    request: pytest.FixtureRequest, family: str, make_request: Any, tmp_path: Path
) -> None:
    paths: TinyPaths = request.getfixturevalue(f"{family}_paths")
    if family == "tiny":  # with and without an image: the requests differ, the number of forwards does not
        requests = [make_request(seeds=(1, 2)), make_request(seeds=(3, 4), image=False)]
    else:
        requests = [make_request(seeds=seeds, guidance_scale_2=2.0) for seeds in ((1, 2), (3, 4))]
    torch.save({"model": paths.model, "requests": requests}, tmp_path / "job.pt")
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tests / "local_ranks.py")]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors[-3000:]
    model = adapted_model(load_family(paths.model))
    whole = local_engine(paths, model)
    expected_norm = float(gradient_norm(model))
    for rank, own in enumerate(requests):
        result = torch.load(tmp_path / f"results_{rank}.pt", weights_only=False)
        for output, expected in zip(result["outputs"], whole.generate(own, [0, 1]), strict=True):
            np.testing.assert_allclose(output.trajectory.latents, expected.trajectory.latents, rtol=0, atol=1e-5)
            np.testing.assert_allclose(output.trajectory.log_probs, expected.trajectory.log_probs, rtol=0, atol=1e-6)
            assert np.abs(output.frames.astype(int) - expected.frames).max() <= 1
        # What it rolled out with, it can train: no tensor of the rollout stops a gradient.
        assert float(result["gradient_norm"]) == pytest.approx(expected_norm, rel=1e-5)
