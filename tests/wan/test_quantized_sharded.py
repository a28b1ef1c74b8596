"""Two real FSDP2 ranks over gloo share a quantized base whose rows they cannot halve, and compute what one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from quantized_base import adapted, write_odd_transformer
from quantized_ranks import SCHEMES, step

from miles_wan.wan.merge import merged_weights

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    write_odd_transformer(folder / "model")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("quantized_ranks.py"))]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors[-3000:]
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[Any, Any]]:
    return [torch.load(folder / f"results_{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_ranks_compute_what_one_process_does(
    folder: Path, results: list[dict[Any, Any]], scheme: str, checkpointing: bool
) -> None:
    transformer = adapted(folder / "model", quantization=scheme)
    expected = step(transformer)
    merged = dict(merged_weights(transformer))
    for seen in (result[scheme, checkpointing] for result in results):
        assert torch.equal(seen["output"], expected["output"])
        for name, gradient in seen["gradients"].items():
            torch.testing.assert_close(gradient, expected["gradients"][name], rtol=1e-5, atol=1e-7)
        assert max(float(gradient.abs().max()) for gradient in seen["gradients"].values()) > 1e-3
        # AdamW's first step is the learning rate times the sign of the gradient, so that only tiny gradients could differ.
        for name, tensor in seen["after"].items():
            torch.testing.assert_close(tensor, expected["after"][name], rtol=1e-5, atol=1e-5)
        assert seen["merged"].keys() == merged.keys()
        for name, tensor in seen["merged"].items():
            torch.testing.assert_close(tensor, merged[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_rank_holds_its_rows_in_8_bits(results: list[dict[Any, Any]], scheme: str) -> None:
    first, second = (result[scheme, False] for result in results)
    assert (first["rows"], second["rows"]) == (32, 31)
    assert first["held"] == first["share"] == second["share"]
    assert second["held"] < first["held"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_merged_export_of_two_ranks_is_whole(folder: Path, results: list[dict[Any, Any]], scheme: str) -> None:
    loaded = WanTransformer3DModel.from_pretrained(folder / f"merged-{scheme}-True").state_dict()
    merged = results[0][scheme, True]["merged"]
    assert loaded.keys() == merged.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in merged.items())
