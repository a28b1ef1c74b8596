"""The picture of the curve is drawn from metrics.jsonl at any time of the run."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from miles_wan.tracking.plot import _running_mean, plot_reward_curve
from miles_wan.tracking.sinks import JsonlSink
from miles_wan.tracking.writing import TrackingError

TRAINING, VALIDATION = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)


def metrics_file(folder: Path, *, rollouts: int, evaluate_every: int | None = 5, train: bool = True) -> Path:
    draw = np.random.default_rng(0)
    sink = JsonlSink(folder / "metrics.jsonl")
    for step in range(rollouts + 1):
        values: dict[str, float | None] = {}
        if train and step > 0:
            values |= {"rollout/reward_mean": 0.7 + 0.004 * step + draw.normal(0, 0.01), "rollout/reward_std": 0.03}
        if evaluate_every and step % evaluate_every == 0:
            values |= {"eval/reward_mean": 0.7 + 0.004 * step, "eval/reward_ci95": 0.01}
        sink.write(step, values)
    sink.close()
    return folder / "metrics.jsonl"


def pixels_of(path: Path, colour: tuple[int, int, int]) -> int:
    image = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return int((np.abs(image - np.array(colour)).max(-1) < 3).sum())


def test_training_and_validation_are_both_drawn(tmp_path: Path) -> None:
    picture = plot_reward_curve(metrics_file(tmp_path, rollouts=45), tmp_path / "out" / "reward.png")
    assert min(Image.open(picture).size) > 600
    assert pixels_of(picture, TRAINING) > 500
    assert pixels_of(picture, VALIDATION) > 500


@pytest.mark.parametrize(("train", "evaluate_every"), [(True, None), (False, 5), (True, 5)])
def test_a_run_of_few_rollouts_or_one_kind_of_reward_is_drawn(
    tmp_path: Path, train: bool, evaluate_every: int | None
) -> None:
    metrics = metrics_file(tmp_path, rollouts=2, train=train, evaluate_every=evaluate_every)
    picture = plot_reward_curve(metrics, tmp_path / "reward.png")
    assert (pixels_of(picture, TRAINING) > 50) == train
    assert (pixels_of(picture, VALIDATION) > 50) == bool(evaluate_every)


def test_a_reward_that_was_not_finite_is_left_out(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, reward in ((1, 0.5), (2, None), (3, 0.6)):
        sink.write(step, {"rollout/reward_mean": reward, "rollout/reward_std": None})
    assert plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "reward.png").exists()


def test_a_file_without_rewards_is_refused(tmp_path: Path) -> None:
    metrics = metrics_file(tmp_path, rollouts=1, train=False, evaluate_every=None)
    with pytest.raises(TrackingError, match="no reward yet"):
        plot_reward_curve(metrics, tmp_path / "reward.png")


def test_the_running_mean_looks_back_only() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    expected = [np.mean(values[max(0, end - 3) : end]) for end in range(1, 6)]
    np.testing.assert_allclose(_running_mean(values, 3), expected)


def test_a_wide_spread_over_videos_does_not_flatten_the_curve(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(10):
        sink.write(step, {"rollout/reward_mean": 0.01 * step, "rollout/reward_std": 50.0})
    picture = Image.open(plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "reward.png")).convert("RGB")
    drawn = np.abs(np.asarray(picture).astype(int) - np.array(TRAINING)).max(-1) < 3
    right_half = np.nonzero(drawn[:, 200:].any(1))[0]  # away from the legend
    assert np.ptp(right_half) > picture.height / 4
