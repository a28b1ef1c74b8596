"""Runs of the real launcher whose ranks generate by themselves, in strict deterministic mode: the loop of DiffusionNFT with
its average, twice the same, and once on one rank."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, Finished, command, run
from safetensors.torch import load_file

from miles_wan.tiny import TinyPaths
from miles_wan.tracking.names import is_timing
from miles_wan.tracking.sinks import read_metrics

pytestmark = pytest.mark.e2e

RUN = (
    "--rollout.engine", "local", "--rollout.samples-per-call", "2", "--deterministic", "true",
    "--num-rollouts", "2", "--eval.max-records", "4", "--eval-interval", "1", "--checkpoint.interval", "2",
    "--rollout.prompts-per-rollout", "3", "--rollout.samples-per-prompt", "4", "--rollout.num-inference-steps", "4",
    "--training.micro-batch-size", "4",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Two equal runs on two ranks, and one on one rank."""
    finished = {}
    for name, ranks in (("first", "2"), ("second", "2"), ("one rank", "1")):
        folder = tmp_path_factory.mktemp("local") / "run"
        line = command(tiny_paths, folder, *RUN, "--num-gpus", ranks, recipe="tiny_ti2v,nft")
        finished[name] = run(line, folder)
        assert finished[name].code == 0, finished[name].output[-6000:]
    return finished


def metrics(finished: Finished) -> dict[int, dict[str, Any]]:
    history = read_metrics(finished.folder / "metrics.jsonl")
    return {
        step: {name: value for name, value in row.items() if name != "time" and not is_timing(name)}
        for step, row in history.items()
    }


def digests(folder: Path) -> dict[str, str]:
    """Of the videos, and of the tensors of the adapters (the order of a safetensors file's metadata is random)."""
    found = {}
    for path in sorted([*folder.rglob("*.mp4"), *folder.rglob("*.safetensors")]):
        content = path.read_bytes()
        if path.suffix == ".safetensors":
            content = b"".join(
                name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(load_file(path).items())
            )
        found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def test_two_deterministic_runs_are_equal_to_the_last_bit(runs: dict[str, Finished]) -> None:
    first, second = runs["first"], runs["second"]
    assert metrics(first) == metrics(second)
    found = digests(first.folder)
    assert {Path(name).parts[0] for name in found} == {"adapter", "adapter_ema", "videos"}
    assert found == digests(second.folder)


def test_the_videos_do_not_depend_on_the_number_of_ranks(runs: dict[str, Finished]) -> None:
    two, one = metrics(runs["first"]), metrics(runs["one rank"])
    assert two[0] == one[0]  # validation before training
    generated = [name for name in two[1] if name.startswith("rollout/")]
    assert {name: two[1][name] for name in generated} == {name: one[1][name] for name in generated}
    videos = [
        {name: digest for name, digest in digests(finished.folder).items() if "rollout_000000" in name}
        for finished in (runs["first"], runs["one rank"])
    ]
    assert len(videos[0]) == 4
    assert videos[0] == videos[1]


def test_what_is_summed_over_ranks_agrees_to_float_noise(runs: dict[str, Finished]) -> None:
    two, one = metrics(runs["first"])[2], metrics(runs["one rank"])[2]
    assert two.keys() == one.keys()
    for name, value in two.items():
        assert value == pytest.approx(one[name], rel=1e-3, abs=1e-4), name


def test_the_average_generates_and_is_exported(runs: dict[str, Finished]) -> None:
    finished = runs["first"]
    adapters = digests(finished.folder)
    assert (
        adapters["adapter/pytorch_lora_weights.safetensors"] != adapters["adapter_ema/pytorch_lora_weights.safetensors"]
    )
    last = metrics(finished)[2]
    assert last["train/nft_velocity_change"] > 0  # the policy has left its average
    assert finished.summary["engine"] == "local"
    assert finished.summary["log_prob_pairs_compared"] == 0


def test_no_server_was_started(runs: dict[str, Finished]) -> None:
    assert "sglang" not in runs["first"].output.lower().replace(str(ROOT).lower(), "")
