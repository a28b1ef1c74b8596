"""A run is continued with the settings it was started with; what does not change the curve may change."""

from __future__ import annotations

from typing import Any

import pytest

from miles_wan.cluster.resume import remembered, resume_faults
from miles_wan.config import Config
from miles_wan.records import PromptRecord

RECORDS = [PromptRecord(record_id=str(index), prompt=f"p{index}") for index in range(4)]


def settings(train: Any = RECORDS[:2], validation: Any = RECORDS[2:], **changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t", "eval": "e"}, "eval": {"interval": 5}}
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return remembered(Config.model_validate(tree), train, validation)


def faults(now: dict[str, Any], **start: Any) -> list[str]:
    return resume_faults({"settings": settings(**start)}, now)


@pytest.mark.parametrize(
    ("key", "value", "was"),
    [
        ("training__optimizer__lr", 5e-5, "0.0001"),
        ("training__optimizer__betas", (0.8, 0.999), "[0.9, 0.999]"),
        ("model__lora_alpha", 4, "8"),
        ("seed", 1, "0"),
        ("rollout__prompts_per_rollout", 4, "8"),
        ("rollout__flow_shift", 3.0, "5.0"),
        ("reward__dtype", "bf16", "'fp32'"),
        ("data__shuffle", False, "True"),
    ],
)
def test_what_changes_the_curve_is_refused_with_both_values(key: str, value: Any, was: str) -> None:
    (fault,) = faults(settings(**{key: value}))
    assert fault.startswith(f"--resume: {key.replace('__', '.')} is ")
    assert f"the run was started with {was}" in fault


def test_all_that_changed_is_told_together() -> None:
    assert len(faults(settings(seed=1, rollout__window_size=1))) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output_dir", "elsewhere"),
        ("num_rollouts", 200),
        ("model__path", "moved"),
        ("data__train", "moved"),
        ("rollout__tp_size", 2),
        ("training__dp_size", 2),
        ("cluster__num_gpus", 2),
        ("checkpoint__interval", 1),
        ("eval__interval", 2),
        ("eval__save_videos", 0),
        ("reward__functions", [{"name": "pickscore", "model": "moved"}]),
    ],
)
def test_where_things_lie_and_run_may_change(key: str, value: Any) -> None:
    assert faults(settings(**{key: value})) == []


def test_another_reward_is_refused() -> None:
    assert "reward.functions.0.name" in "".join(faults(settings(reward__functions=[{"name": "mine:f"}])))


def test_other_records_are_refused() -> None:
    assert "data.train" in faults(settings(train=RECORDS[1:3]))[0]
    assert "data.train" in faults(settings(train=RECORDS[1::-1]))[0]  # their order decides what is drawn
    assert "validated records" in faults(settings(validation=RECORDS[3:]))[0]


def test_validation_that_was_off_cannot_be_compared_later() -> None:
    assert "eval.interval was 0" in faults(settings(), eval__interval=0)[0]
    assert faults(settings(eval__interval=0, validation=()), eval__interval=5) == []  # turning it off is fine


def test_a_checkpoint_without_settings_is_refused() -> None:
    assert "does not say with which settings" in resume_faults({"run": {}}, settings())[0]
