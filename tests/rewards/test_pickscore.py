"""PickScore is what its reference implementation computes, over frames spread evenly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPModel, CLIPProcessor

from miles_wan.config import RewardFunction
from miles_wan.errors import InputError, RewardError
from miles_wan.records import RewardInput, UInt8
from miles_wan.rewards.frames import uniform_frames
from miles_wan.rewards.pickscore import PickScoreReward, from_config
from miles_wan.tiny import TinyPaths

CPU = torch.device("cpu")
LONG = "a red circle moves right " * 40  # far more than 77 tokens


@pytest.fixture(scope="module")
def model(tiny_paths: TinyPaths) -> CLIPModel:
    return CLIPModel.from_pretrained(tiny_paths.reward).eval()


@pytest.fixture(scope="module")
def processor(tiny_paths: TinyPaths) -> CLIPProcessor:
    return CLIPProcessor.from_pretrained(tiny_paths.reward)


@pytest.fixture(scope="module")
def reward(model: CLIPModel, processor: CLIPProcessor) -> PickScoreReward:
    return PickScoreReward(model, processor, num_frames=4, device=CPU, dtype=torch.float32)


def video(prompt: str, *, frames: int = 9, height: int = 32, width: int = 32, seed: int = 0) -> RewardInput:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return RewardInput(prompt=prompt, frames=pixels, fps=24, image_path=None, metadata={})


def reference(model: CLIPModel, processor: CLIPProcessor, item: RewardInput, chosen: Sequence[int]) -> float:
    """One video as the authors' own example scores it: PIL images, CLIP's logits_per_text; over 26 as Flow-GRPO."""
    images = [Image.fromarray(item.frames[index]) for index in chosen]
    image_inputs = processor.image_processor(images=images, return_tensors="pt")
    text_inputs = processor.tokenizer(item.prompt, padding=True, truncation=True, max_length=77, return_tensors="pt")
    with torch.no_grad():
        logits = model(**image_inputs, **text_inputs).logits_per_text
    return (logits[0] / 26).mean().item()


def test_scores_are_those_of_the_reference(model: CLIPModel, processor: CLIPProcessor, reward: PickScoreReward) -> None:
    batch = [
        video("a red circle moves right on a blue background", seed=1),
        video(LONG, seed=2),
        video("ünïcode ☃ and words no tokenizer knows", height=48, width=96, seed=3),
        video("a", frames=5, seed=4),
    ]
    chosen = [[0, 3, 5, 8], [0, 3, 5, 8], [0, 3, 5, 8], [0, 1, 3, 4]]  # linspace(0, T - 1, 4), rounded
    expected = [reference(model, processor, item, frames) for item, frames in zip(batch, chosen, strict=True)]
    assert reward(batch) == pytest.approx(expected, abs=1e-5)
    assert np.ptp(expected) > 0.01  # or the comparison would say nothing


def test_a_video_scores_the_same_alone_and_in_a_batch(reward: PickScoreReward) -> None:
    batch = [video("a red circle", seed=5), video(LONG, seed=6), video("a", frames=1, seed=7)]
    assert reward(batch) == pytest.approx([reward([item])[0] for item in batch], abs=1e-5)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_a_short_video_is_scored_on_all_its_frames(
    model: CLIPModel, processor: CLIPProcessor, reward: PickScoreReward, frames: int
) -> None:
    item = video("a red circle", frames=frames)
    assert reward([item]) == pytest.approx([reference(model, processor, item, range(frames))], abs=1e-5)


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [(9, 1, [0]), (9, 2, [0, 8]), (9, 3, [0, 4, 8]), (121, 4, [0, 40, 80, 120]), (5, 9, [0, 1, 2, 3, 4]), (1, 4, [0])],
)
def test_frames_are_spread_evenly(total: int, count: int, expected: list[int]) -> None:
    frames = np.arange(total, dtype=np.uint8).reshape(total, 1, 1, 1)
    assert uniform_frames(frames, count).flatten().tolist() == expected


def test_never_one_frame_twice() -> None:
    for total in range(1, 40):
        frames = np.arange(total, dtype=np.uint8).reshape(total, 1, 1, 1)
        for count in range(1, 45):
            chosen = uniform_frames(frames, count).flatten().tolist()
            assert len(set(chosen)) == len(chosen) == min(count, total)


def test_text_beyond_77_tokens_does_not_count(reward: PickScoreReward) -> None:
    first, second = reward([video(LONG), video(LONG + "and ends otherwise")])
    assert first == pytest.approx(second, abs=1e-6)


def test_prompts_that_are_cut_are_counted_and_told_once(
    model: CLIPModel, processor: CLIPProcessor, caplog: pytest.LogCaptureFixture
) -> None:
    reward = PickScoreReward(model, processor, num_frames=1, device=CPU, dtype=torch.float32)
    reward([video("red " * 75)])  # with start and end: 77 tokens
    assert (reward.cut_prompts.count, caplog.messages) == (0, [])
    reward([video("red " * 75), video("red " * 76)])
    reward([video(LONG), video("red " * 76)])
    assert reward.cut_prompts.count == 2
    (message,) = caplog.messages
    assert "reward 'pickscore' reads 77 tokens of a prompt: 1 of these 2 prompts are cut, first 'red red" in message


def test_read_only_frames_are_fine(reward: PickScoreReward, recwarn: pytest.WarningsRecorder) -> None:
    item = video("a red circle")
    item.frames.setflags(write=False)  # as they come out of an object store
    reward([item])
    assert not [warning for warning in recwarn if "writable" in str(warning.message)]


def test_an_empty_batch_has_no_scores(reward: PickScoreReward) -> None:
    assert reward([]) == []


def test_bf16_is_close_to_fp32(tiny_paths: TinyPaths, reward: PickScoreReward) -> None:
    function = RewardFunction(name="pickscore", model=str(tiny_paths.reward), processor=str(tiny_paths.reward))
    half = from_config(function, device=CPU, dtype=torch.bfloat16)
    batch = [video("a red circle", seed=8), video("a blue square", seed=9)]
    # 8 bits of mantissa on a cosine that is multiplied by 100 / 26
    assert half(batch) == pytest.approx(reward(batch), abs=2**-8 * 100 / 26 * 4)


def test_bf16_keeps_the_scale_of_the_scores(tiny_paths: TinyPaths) -> None:
    """ln 100 in bf16 is 4.59375, and its exponential 98.9: every score would be 1.1 % too low."""
    function = RewardFunction(name="pickscore", model=str(tiny_paths.reward), processor=str(tiny_paths.reward))
    stored = load_file(tiny_paths.reward / "model.safetensors")["logit_scale"]
    half = from_config(function, device=CPU, dtype=torch.bfloat16)
    assert half.scale == pytest.approx(math.exp(stored.item()) / 26, rel=1e-6)
    assert math.exp(stored.bfloat16().item()) / 26 != pytest.approx(half.scale, rel=1e-3)


# --- the contract for frames


def frames(*shape: int, dtype: type = np.uint8) -> UInt8:
    return np.zeros(shape, dtype=dtype)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (frames(9, 3, 32, 40), "[9, 3, 32, 40], which looks like [T, C, H, W]"),
        (frames(3, 9, 32, 40), "which looks like [C, T, H, W]"),
        (frames(32, 40, 3), "which has 3 axes, not 4"),
        (frames(1, 9, 32, 40, 3), "which has 5 axes, not 4"),
        (frames(9, 32, 40, 4), "which has 4 colour channel(s)"),
        (frames(9, 32, 40, 1), "which has 1 colour channel(s)"),
        (frames(9, 32, 40, 3, dtype=np.float32), "float32 [9, 32, 40, 3], not uint8"),
        (frames(9, 32, 40, 3, dtype=np.int64), "int64 [9, 32, 40, 3], not uint8"),
        (frames(0, 32, 40, 3), "which holds no pixel"),
        (frames(9, 32, 0, 3), "which holds no pixel"),
        (torch.zeros(9, 32, 40, 3, dtype=torch.uint8), "torch.Tensor, not a numpy array"),
        ([frames(32, 40, 3)], "builtins.list, not a numpy array"),
    ],
)
def test_any_other_layout_is_an_error_that_names_it(reward: PickScoreReward, given: UInt8, words: str) -> None:
    item = RewardInput(prompt="a", frames=given, fps=24, image_path=None, metadata={})
    with pytest.raises(RewardError) as raised:
        reward([video("a"), item])
    assert words in str(raised.value)
    assert "uint8 [T, H, W, 3]" in str(raised.value)


# --- loading


@pytest.mark.parametrize("field", ["model", "processor"])
def test_what_does_not_load_is_named(tiny_paths: TinyPaths, tmp_path: Path, field: str) -> None:
    sources = {"model": str(tiny_paths.reward), "processor": str(tiny_paths.reward), field: str(tmp_path / "absent")}
    with pytest.raises(InputError) as raised:
        from_config(RewardFunction(name="pickscore", **sources), device=CPU, dtype=torch.float32)
    assert f"{field} {tmp_path / 'absent'} does not load" in str(raised.value)


def test_a_model_with_weights_missing_is_refused_not_filled_with_noise(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    model = CLIPModel.from_pretrained(tiny_paths.reward)
    weights = {name: value for name, value in model.state_dict().items() if "text_projection" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    function = RewardFunction(name="pickscore", model=str(tmp_path), processor=str(tiny_paths.reward))
    with pytest.raises(InputError, match=r"lacks 1 weights, first text_projection\.weight"):
        from_config(function, device=CPU, dtype=torch.float32)
