"""A run killed at any point continues on the same curve, and what it left behind ends by itself.

By default two points are tried; MILES_WAN_ALL_KILL_POINTS=1 (``make test-kills``) tries all of them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from launching import SMALL, Finished, alive, command, run, run_and_kill

from miles_wan.tiny import TinyPaths
from miles_wan.tracking.names import is_timing
from miles_wan.tracking.sinks import read_metrics

pytestmark = pytest.mark.e2e

# Rollout ids count from 0, checkpoints by rollouts finished: all points lie after the checkpoint of rollout 1.
ALWAYS = ["train/before_step@1", "checkpoint/before_shard_1@2"]
FURTHER = [
    "rollout/sample@1",
    "train/micro_batch@1",
    "checkpoint/before_shard_0@2",
    "checkpoint/before_state@2",
    "checkpoint/before_commit@2",
    "checkpoint/after_commit@2",
    "rollout/sample@0",
]
POINTS = ALWAYS + (FURTHER if os.environ.get("MILES_WAN_ALL_KILL_POINTS") else [])


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_run_continues_on_the_same_curve(
    point: str, finished_run: Finished, tiny_paths: TinyPaths, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    left = run_and_kill(command(tiny_paths, folder, *SMALL), folder, point=point)
    killed_at = time.monotonic()
    while alive(left) and time.monotonic() - killed_at < 60:
        time.sleep(0.5)
    assert alive(left) == set(), "processes of the killed run are alive 60 s later"

    resumed = run(command(tiny_paths, folder, *SMALL, "--resume", "latest"), folder)
    assert resumed.code == 0, resumed.output[-6000:]
    whole = read_metrics(finished_run.folder / "metrics.jsonl")
    continued = read_metrics(folder / "metrics.jsonl")
    assert continued.keys() == whole.keys()
    assert [difference for step in whole for difference in _differences(step, whole[step], continued[step])] == []
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["rollout_000002", "rollout_000003"]
    for key in ("videos_scored", "log_prob_pairs_compared", "eval_rewards_before", "eval_rewards_after"):
        assert resumed.summary[key] == pytest.approx(finished_run.summary[key], abs=1e-6)


def _differences(step: int, expected: dict[str, float], got: dict[str, float]) -> list[str]:
    names = {name for name in expected.keys() | got.keys() if "/" in name and not is_timing(name)}
    return [
        f"step {step}, {name}: {got.get(name)} instead of {expected.get(name)}"
        for name in sorted(names)
        if name not in got or name not in expected or abs(got[name] - expected[name]) > 1e-6
    ]
