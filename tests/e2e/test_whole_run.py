"""A run of the real launcher, SGLang (TP 2), two FSDP2 ranks and PickScore on the tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from launching import SMALL, Finished, command, run

from miles_wan.tiny import TinyPaths
from miles_wan.tracking.sinks import read_metrics
from miles_wan.tracking.summary import REQUIRED_KEYS

pytestmark = pytest.mark.e2e


def test_the_run_ends_with_exit_code_0_and_a_whole_summary(finished_run: Finished) -> None:
    assert finished_run.code == 0, finished_run.output[-6000:]
    assert [key for key in REQUIRED_KEYS if key not in finished_run.summary] == []
    assert finished_run.summary["rollouts"] == 3
    assert finished_run.summary["resumed_from"] is None


def test_engine_and_trainer_agree_on_every_kept_step(finished_run: Finished) -> None:
    summary = finished_run.summary
    assert summary["tp_size"] == summary["dp_size"] == 2
    assert summary["log_prob_pairs_compared"] == 3 * 2 * 4 * 3  # rollouts x prompts x samples x kept steps
    assert 0 < summary["max_log_prob_gap"] <= 1e-5
    assert summary["max_ratio_minus_one_before_update"] <= 1e-5


def test_every_adapter_tensor_reaches_the_engine(finished_run: Finished) -> None:
    summary = finished_run.summary
    # 2 blocks x (2 attentions x 4 projections + 2 feed-forward layers) x (A, B)
    assert (summary["lora_tensors"], summary["layer_prefixes"], summary["unmapped"]) == (40, 20, 0)
    assert summary["fsdp_blocks"] == 2


def test_every_video_is_scored_and_none_is_dropped(finished_run: Finished) -> None:
    summary = finished_run.summary
    assert summary["videos_scored"] == 3 * 8 + 4 * 4  # three rollouts, four validations of four records
    assert summary["dropped_samples"] == 0


def test_named_phases_account_for_the_wall_time(finished_run: Finished) -> None:
    summary = finished_run.summary
    assert "other" not in summary["seconds_by_phase"]
    assert 0.9 * summary["seconds"] <= sum(summary["seconds_by_phase"].values()) <= summary["seconds"] * 1.001


def test_validation_runs_before_training_and_at_every_interval(finished_run: Finished) -> None:
    history = read_metrics(finished_run.folder / "metrics.jsonl")
    assert [step for step, row in history.items() if "eval/reward_mean" in row] == [0, 1, 2, 3]
    assert len(list((finished_run.folder / "videos" / "rollout_000003").glob("*.mp4"))) == 4
    assert history[3]["train/kl"] > 0


def test_the_newest_checkpoints_are_kept_and_nothing_half_written(finished_run: Finished) -> None:
    names = sorted(path.name for path in (finished_run.folder / "checkpoints").iterdir())
    assert names == ["rollout_000002", "rollout_000003"]


def test_a_person_finds_curve_metrics_and_board(finished_run: Finished) -> None:
    assert (finished_run.folder / "reward.png").stat().st_size > 10_000
    assert list((finished_run.folder / "tensorboard").glob("events.*"))
    assert "weight sync: version 3 (policy), transformer: 40 tensors, 20 prefixes, 0 unmapped" in finished_run.output


def test_the_exported_adapter_loads_with_diffusers_and_changes_the_model(
    finished_run: Finished, tiny_paths: TinyPaths
) -> None:
    """Rank 4 and alpha 8 differ, so a loader that loses alpha would be caught by the engine's own last weights."""
    from safetensors.torch import load_file

    pipeline = WanPipeline.from_pretrained(tiny_paths.model)
    inputs = {
        "hidden_states": torch.randn(1, 48, 2, 2, 2, generator=torch.Generator().manual_seed(0)),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(1)),
        "return_dict": False,
    }
    with torch.no_grad():
        base = pipeline.transformer(**inputs)[0]
        weights = load_file(finished_run.folder / "adapter" / "pytorch_lora_weights.safetensors")
        merged = _merged(pipeline.transformer, weights, scale=8 / 4)(**inputs)[0]
        pipeline.load_lora_weights(str(finished_run.folder / "adapter"), weight_name="pytorch_lora_weights.safetensors")
        adapted = pipeline.transformer(**inputs)[0]
    assert float((adapted - base).abs().max()) > 1e-3
    assert float((adapted - merged).abs().max()) <= 1e-5


def _merged(transformer: torch.nn.Module, weights: dict[str, torch.Tensor], *, scale: float) -> torch.nn.Module:
    """A copy of the plain transformer with W + scale B A, worked out here."""
    import copy

    merged = copy.deepcopy(transformer)
    for name, a in weights.items():
        if name.endswith("lora_A.weight"):
            layer = merged.get_submodule(name.removeprefix("transformer.").removesuffix(".lora_A.weight"))
            layer.weight += scale * weights[name.replace("lora_A", "lora_B")] @ a
    return merged


def test_learning_rate_0_changes_no_validation_number(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    folder = tmp_path / "rate0"
    finished = run(command(tiny_paths, folder, *SMALL, "--training.optimizer.lr", "0", "--num-rollouts", "2"), folder)
    assert finished.code == 0, finished.output[-6000:]
    assert finished.summary["eval_rewards_after"] == finished.summary["eval_rewards_before"]
    assert finished.summary["eval_gain_mean"] == 0


def test_a_second_run_in_the_same_folder_is_refused(finished_run: Finished, tiny_paths: TinyPaths) -> None:
    before = (finished_run.folder / "metrics.jsonl").read_text()
    again = run(command(tiny_paths, finished_run.folder, *SMALL), finished_run.folder)
    assert again.code == 2
    assert "--resume latest" in again.output
    assert (finished_run.folder / "metrics.jsonl").read_text() == before


def test_metrics_are_documented(finished_run: Finished) -> None:
    lines = (finished_run.folder / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["step"] == index for index, line in enumerate(lines))
