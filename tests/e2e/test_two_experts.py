"""A run of the real launcher on a two-expert model whose frozen base is quantized: server at TP 2, two FSDP ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from launching import ROOT, Finished, command, run
from safetensors.torch import load_file

from miles_wan.tiny import TinyPaths
from miles_wan.tracking.sinks import read_metrics

pytestmark = pytest.mark.e2e

RUN = (
    "--num-rollouts", "2", "--eval.max-records", "2", "--rollout.prompts-per-rollout", "2",
    "--rollout.samples-per-prompt", "4", "--training.micro-batch-size", "2", "--rollout.window-range", "[1, 5]",
    "--model.quantization", "int8",
)  # fmt: skip
LAYERS, BLOCKS = 10, 2  # q, k, v, out of two attentions, two of the feed-forward; blocks of the tiny transformer


@pytest.fixture(scope="module")
def finished(t2v_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("experts") / "run"
    line = command(t2v_paths, folder, *RUN, recipe="tiny_a14b")
    line[1] = str(ROOT / "scripts" / "run_diffusion_grpo_wan22_t2v_a14b.py")
    assert line[0] == sys.executable
    done = run(line, folder)
    assert done.code == 0, done.output[-6000:]
    return done


def test_both_experts_are_synced_counted_and_agree_with_the_engine(finished: Finished) -> None:
    summary = finished.summary
    assert summary["layer_prefixes"] == 2 * LAYERS * BLOCKS
    assert summary["lora_tensors"] == 2 * summary["layer_prefixes"]
    assert summary["unmapped"] == 0
    assert (summary["tp_size"], summary["dp_size"]) == (2, 2)
    assert summary["log_prob_pairs_compared"] == 2 * 2 * 4 * 3
    assert summary["max_log_prob_gap"] <= 1e-5  # of float32; bf16 against the 8 bits would be off by 1e-3
    assert "transformer: 40 tensors, 20 prefixes and transformer_2: 40 tensors, 20 prefixes" in finished.output


def test_what_quantization_costs_is_told_and_the_engine_has_a_checkpoint_of_its_own(finished: Finished) -> None:
    assert finished.output.count("base quantized to int8") >= 2  # each expert
    assert (finished.folder / "engine_checkpoint" / "transformer_2" / "config.json").is_file()


def test_both_were_trained_and_are_exported(finished: Finished) -> None:
    last = read_metrics(finished.folder / "metrics.jsonl")[2]
    assert last["train/pairs/high"] + last["train/pairs/low"] == last["train/log_prob_pairs"]
    for name in ("transformer", "transformer_2"):
        file: Path = finished.folder / "adapter" / name / "pytorch_lora_weights.safetensors"
        moved = {key for key, value in load_file(file).items() if ".lora_B." in key and bool(torch.any(value != 0))}
        assert len(moved) == LAYERS * BLOCKS
