"""The table of metrics is the only source of names, and the docs page is made from it."""

import pytest

from miles_wan.tracking.names import METRICS, is_timing, metric_of, metrics_table_markdown
from miles_wan.tracking.writing import TrackingError


@pytest.mark.parametrize("name", ["rollout/reward_mean", "train/log_prob_gap_max", "sync/bytes", "eval/reward_ci95"])
def test_a_listed_name_is_known(name: str) -> None:
    assert metric_of(name) is METRICS[name]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("rollout/reward/pickscore", "rollout/reward/<part>"),
        ("eval/reward/my_package.rewards:red", "eval/reward/<part>"),
        ("time/rollout", "time/<phase>"),
        ("time/overlap/score", "time/overlap/<work>"),
        ("time/rollout_total", "time/rollout_total"),
    ],
)
def test_a_name_the_run_chooses_matches_its_pattern(name: str, pattern: str) -> None:
    assert metric_of(name) is METRICS[pattern]


@pytest.mark.parametrize(
    "name",
    ["rollout/rewardmean", "loss", "rollout/reward/", "rollout/reward/a/b", "time/two words", "eval/reward/<part>x/"],
)
def test_another_name_is_refused_and_the_message_says_where_to_add_it(name: str) -> None:
    with pytest.raises(TrackingError, match=r"Unknown metric .*METRICS in miles_wan\.tracking\.names"):
        metric_of(name)


def test_clocks_are_the_only_metrics_that_two_equal_runs_may_differ_in() -> None:
    timing = {
        name
        for name in METRICS
        if is_timing(name.replace("<phase>", "x").replace("<work>", "x").replace("<part>", "x"))
    }
    clocks = ("seconds", "per_second", "per_device", "utilisation")
    assert timing == {name for name in METRICS if name.startswith("time/") or name.endswith(clocks)}


def test_every_row_of_the_page_has_the_three_columns() -> None:
    rows = [line for line in metrics_table_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(METRICS)
    assert all(row.replace("\\|", "").count("|") == 4 for row in rows)
