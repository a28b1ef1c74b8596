"""Several rewards make one score; a user's own reward is called by the documented signature and held to its contract."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_wan.config import RewardConfig, RewardFunction
from miles_wan.errors import InputError, RewardError
from miles_wan.records import RewardInput
from miles_wan.rewards.composite import RewardModel
from miles_wan.rewards.registry import build, user_function
from miles_wan.tiny import TinyPaths

USER_MODULE = """
import numpy as np
import torch

calls = []
NUMBER = 3

def brightness(batch):
    calls.append(len(batch))
    return [float(item.frames.mean()) / 255 for item in batch]

def length(batch): return np.array([len(item.frames) for item in batch])
def tensor(batch): return torch.tensor([0.5] * len(batch))
def target(batch): return [item.metadata["target"] + item.fps + len(item.image_path or "") for item in batch]
def short(batch): return [0.0] * (len(batch) - 1)
def nan(batch): return [0.0] * (len(batch) - 1) + [float("nan")]
def infinite(batch): return [float("-inf")] * len(batch)
def text(batch): return ["good"] * len(batch)
def nothing(batch): return None
def raises(batch): raise KeyError("target")
async def later(batch): return [0.0] * len(batch)
def two(batch, other): return [0.0] * len(batch)
class Scorer: pass
"""


@pytest.fixture(scope="module", autouse=True)
def user_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Modules a user might write, importable for the tests of this file."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_rewards.py").write_text(USER_MODULE)
    (folder / "my_broken_rewards.py").write_text("1 / 0\n")
    (folder / "my_needy_rewards.py").write_text("import a_library_nobody_has\n")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    for name in ("my_rewards", "my_broken_rewards", "my_needy_rewards"):
        sys.modules.pop(name, None)


def videos(count: int = 3) -> list[RewardInput]:
    return [
        RewardInput(
            prompt=f"prompt {index}",
            frames=np.full((5, 32, 32, 3), 51 * index, dtype=np.uint8),
            fps=24,
            image_path="/a.png" if index else None,
            metadata={"target": index},
        )
        for index in range(count)
    ]


def model(**weights: float) -> RewardModel:
    functions = tuple(RewardFunction(name=f"my_rewards:{name}", weight=weight) for name, weight in weights.items())
    return RewardModel(RewardConfig(functions=functions), "cpu")


def test_the_total_is_the_weighted_sum_and_every_part_is_kept() -> None:
    scores = model(brightness=2.0, length=-0.5).score(videos())
    for index, score in enumerate(scores):
        brightness = 51 * index / 255
        assert score.parts == pytest.approx({"my_rewards:brightness": brightness, "my_rewards:length": 5})
        assert score.total == pytest.approx(2 * brightness - 0.5 * 5)


def test_weight_0_is_measured_at_validation_only_and_never_trains() -> None:
    import my_rewards

    rewards = model(length=1.0, brightness=0.0)
    my_rewards.calls.clear()
    training = rewards.score(videos())
    assert my_rewards.calls == []
    validation = rewards.score(videos(), validation=True)
    assert my_rewards.calls == [3]
    assert [set(score.parts) for score in training] == [{"my_rewards:length"}] * 3
    assert [set(score.parts) for score in validation] == [{"my_rewards:length", "my_rewards:brightness"}] * 3
    assert [score.total for score in training] == [score.total for score in validation] == [5.0] * 3


def test_a_reward_sees_fps_image_path_and_metadata_and_may_answer_with_arrays_or_tensors() -> None:
    scores = model(target=1.0, tensor=1.0).score(videos())
    assert [score.total for score in scores] == [0 + 24 + 0 + 0.5, 1 + 24 + 6 + 0.5, 2 + 24 + 6 + 0.5]


def test_pickscore_and_a_users_reward_together(tiny_paths: TinyPaths) -> None:
    pickscore = RewardFunction(name="pickscore", model=str(tiny_paths.reward), processor=str(tiny_paths.reward))
    own = RewardFunction(name="my_rewards:brightness", weight=0.25)
    both = RewardModel(RewardConfig(functions=(pickscore, own)), "cpu").score(videos())
    alone = build(pickscore, device=torch.device("cpu"), dtype=torch.float32)(videos())
    expected = [score + 0.25 * 51 * index / 255 for index, score in enumerate(alone)]
    assert [score.total for score in both] == pytest.approx(expected, abs=1e-6)


def test_an_empty_batch_has_no_scores() -> None:
    assert model(brightness=1.0).score([]) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short", ["gave 2 numbers for 3 videos"]),
        ("nan", ["gave nan", "'prompt 2'", "/a.png", "finite"]),
        ("infinite", ["gave -inf", "'prompt 0'"]),
        ("text", ["gave 'good'", "must be a number"]),
        ("nothing", ["gave None for 3 videos", "a list with one number each"]),
        ("raises", ["KeyError", "target"]),
    ],
)
def test_a_reward_that_breaks_its_contract_is_named(name: str, words: list[str]) -> None:
    with pytest.raises(RewardError) as raised:
        model(**{name: 1.0}).score(videos())
    assert f"my_rewards:{name}" in str(raised.value)
    assert all(word in str(raised.value) for word in words)


def test_the_traceback_of_a_users_reward_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RewardError):
        model(raises=1.0).score(videos())
    assert 'raise KeyError("target")' in caplog.text


def test_frames_of_another_layout_reach_no_reward() -> None:
    import my_rewards

    item = RewardInput("p", np.zeros((5, 3, 32, 32), dtype=np.uint8), 24, "/b.png", {})
    my_rewards.calls.clear()
    with pytest.raises(RewardError, match=r"'p' with image /b\.png.*\[T, C, H, W\]"):
        model(brightness=1.0).score([*videos(), item])
    assert my_rewards.calls == []


def test_totals_are_finite_numbers() -> None:
    assert all(math.isfinite(score.total) for score in model(brightness=1.0).score(videos()))


# --- names


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pikscore", ["not built in (clip, pickscore)", "package.module:function"]),
        ("no_such_module:f", ["no module 'no_such_module'", "PYTHONPATH"]),
        ("my_rewards.inner:f", ["my_rewards"]),
        ("my_rewards:absent", ["has no 'absent'", "my_rewards.py"]),
        ("my_rewards:NUMBER", ["is a int", "function"]),
        ("my_rewards:Scorer", ["is a class", "function"]),
        ("my_rewards:later", ["is an async function", "def f(batch)"]),
        ("my_rewards:two", ["cannot be called with one batch", "other"]),
        ("my_rewards:", ["package.module:function"]),
        (":f", ["package.module:function"]),
        ("my_broken_rewards:f", ["importing my_broken_rewards failed", "ZeroDivisionError"]),
        ("my_needy_rewards:f", ["itself imports 'a_library_nobody_has'"]),
    ],
)
def test_a_name_that_leads_nowhere_is_a_clear_fault(name: str, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        user_function(name)
    (fault,) = raised.value.faults
    assert repr(name) in fault
    assert all(word in fault for word in words)


def test_all_rewards_that_cannot_be_built_are_told_together(tmp_path: Path) -> None:
    functions = (
        RewardFunction(name="pickscore", model=str(tmp_path), processor=str(tmp_path)),
        RewardFunction(name="my_rewards:absent"),
        RewardFunction(name="my_rewards:brightness"),
    )
    with pytest.raises(InputError) as raised:
        RewardModel(RewardConfig(functions=functions), "cpu")
    assert len(raised.value.faults) == 2
