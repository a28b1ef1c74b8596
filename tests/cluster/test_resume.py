"""A run is continued with the settings it was started with; what does not change the curve may change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_wan.cluster.resume import remembered, resume_faults
from miles_wan.config import Config
from miles_wan.records import PromptRecord

NO_WEIGHTS = Path("/no/such/folder")
RECORDS = [PromptRecord(record_id=str(index), prompt=f"p{index}") for index in range(4)]


def settings(
    train: Any = RECORDS[:2], validation: Any = RECORDS[2:], weights: Path = NO_WEIGHTS, **changes: Any
) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t", "eval": "e"}, "eval": {"interval": 5}}
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return remembered(Config.model_validate(tree), train, validation, weights=[weights])


def state(**start: Any) -> dict[str, Any]:
    return {"run": {"finished": 3}, "clock": {}, "settings": settings(**start)}


def faults(now: dict[str, Any], **start: Any) -> list[str]:
    return resume_faults(state(**start), now)


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
        ("cluster__num_gpus", 2),
        ("checkpoint__interval", 1),
        ("eval__interval", 2),
        ("eval__save_videos", 0),
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


@pytest.mark.parametrize(
    "damage",
    [
        {"settings": None},
        {"settings": {}},
        {"settings": [1]},
        {"settings": {"config": {}, "train": "", "eval": "", "weights": ""}},
        {"run": None},
        {"run": {"finished": "x"}},
        {"run": {"finished": -5}},
        {"run": {"no_such_field": 1}},
        {"clock": None},
    ],
)
def test_a_damaged_state_is_a_fault_and_no_traceback(damage: dict[str, Any]) -> None:
    (fault,) = resume_faults({**state(), **damage}, settings())
    assert "state.json of the newest checkpoint is damaged" in fault


def test_other_weights_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(bytes(10_000_000))
    before = settings(weights=tmp_path)
    file.write_bytes(bytes([1]) * 10_000_000)
    assert "weights in model.path" in resume_faults({**state(), "settings": before}, settings(weights=tmp_path))[0]


def test_metadata_is_part_of_the_records() -> None:
    other = [replace(record, metadata={"target": 3}) for record in RECORDS[:2]]
    assert "data.train" in faults(settings(train=other))[0]
    moved = [replace(record, metadata={"image_path": "elsewhere.png"}) for record in RECORDS[:2]]
    assert faults(settings(train=moved)) == []


def test_fewer_rollouts_than_are_finished_are_refused() -> None:
    assert "3 rollouts are finished" in faults(settings(num_rollouts=2))[0]


def test_a_decaying_rate_keeps_its_length() -> None:
    start = {"training__optimizer__schedule": "cosine"}
    assert "cosine schedule over all of them" in faults(settings(num_rollouts=200, **start), **start)[0]
    assert faults(settings(**start), **start) == []


def test_more_ranks_than_the_checkpoint_has_are_refused_fewer_are_not() -> None:
    assert "random state of 1 ranks" in faults(settings(training__dp_size=2))[0]
    assert faults(settings(), training__dp_size=2) == []
