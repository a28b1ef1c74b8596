"""The gain is the paired t interval, and summary.json holds what it must."""

import json
import math
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from miles_wan.tracking.summary import REQUIRED_KEYS, mean_ci95, paired_gain, write_summary
from miles_wan.tracking.writing import TrackingError


def rewards(seed: int, count: int = 64) -> list[float]:
    return np.random.default_rng(seed).normal(0.8, 0.1, count).tolist()


def test_the_gain_is_scipys_paired_t_interval() -> None:
    before, after = rewards(0), rewards(1)
    gain = paired_gain(before, after)
    interval = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert gain.mean == pytest.approx((interval.high + interval.low) / 2, abs=1e-12)
    assert gain.ci95 == pytest.approx((interval.high - interval.low) / 2, abs=1e-12)


def test_the_mean_interval_is_scipys_one_sample_t_interval() -> None:
    values = rewards(2, 10)
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean_ci95(values) == pytest.approx(((interval.high + interval.low) / 2, (interval.high - interval.low) / 2))


def test_equal_rewards_before_and_after_give_exactly_zero() -> None:
    assert paired_gain(rewards(3), rewards(3)) == (0.0, 0.0)


def test_pairing_matters() -> None:
    before = rewards(4)
    after = [reward + 0.01 for reward in before]
    assert paired_gain(before, after) == pytest.approx((0.01, 0.0), abs=1e-12)


def test_one_value_has_no_interval() -> None:
    gain = paired_gain([1.0], [3.0])
    assert gain.mean == 2.0
    assert math.isnan(gain.ci95)


@pytest.mark.parametrize(
    ("before", "after"), [([1.0], [1.0, 2.0]), ([], []), ([1.0, math.nan], [1.0, 2.0]), ([1.0, 2.0], [math.inf, 2.0])]
)
def test_rewards_that_cannot_be_paired_are_refused(before: list[float], after: list[float]) -> None:
    with pytest.raises(TrackingError):
        paired_gain(before, after)


def complete() -> dict[str, Any]:
    return {key: index for index, key in enumerate(reversed(REQUIRED_KEYS))}


def test_required_keys_come_first_in_their_order_and_others_by_name(tmp_path: Path) -> None:
    write_summary(tmp_path / "out" / "summary.json", {"zeta": 1, "alpha": 2, **complete()})
    read = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(read) == [*REQUIRED_KEYS, "alpha", "zeta"]
    assert read == {"zeta": 1, "alpha": 2, **complete()}


def test_numpy_numbers_paths_and_nested_values_are_written_and_nan_becomes_null(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = complete() | {
        "seconds_by_phase": {"rollout": np.float32(1.5), "train": np.float64("nan")},
        "rollouts": np.int64(3),
        "resumed_from": None,
        "adapter": Path("/a/b"),
        "eval_rewards": [0.5, np.float64(0.25)],
        "finished": True,
    }
    write_summary(tmp_path / "summary.json", data)
    read = json.loads((tmp_path / "summary.json").read_text())
    assert read["seconds_by_phase"] == {"rollout": 1.5, "train": None}
    assert (read["rollouts"], read["resumed_from"], read["adapter"]) == (3, None, "/a/b")
    assert (read["eval_rewards"], read["finished"]) == ([0.5, 0.25], True)
    assert "seconds_by_phase.train" in caplog.text


def test_missing_keys_are_all_named(tmp_path: Path) -> None:
    data = complete()
    del data["unmapped"], data["resumed_from"]
    with pytest.raises(TrackingError, match="lacks unmapped, resumed_from"):
        write_summary(tmp_path / "summary.json", data)
    assert not (tmp_path / "summary.json").exists()


def test_a_value_without_a_json_form_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"summary key rollouts: \{1, 2\}|summary key rollouts"):
        write_summary(tmp_path / "summary.json", complete() | {"rollouts": {1, 2}})


def test_a_full_disk_leaves_the_old_summary(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, complete())
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(TrackingError, match=r"Cannot write .*summary\.json"):
            write_summary(path, complete() | {"note": "x"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
