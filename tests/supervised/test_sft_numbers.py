"""Operations are those that a library counts; validation averages per timestep and per expert; curves become a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from scipy import stats
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from miles_wan.records import derived_seed
from miles_wan.supervised.config import TIMESTEPS, SupervisedEvalConfig
from miles_wan.supervised.draws import Draw
from miles_wan.supervised.flops import Shape, forward_operations, known_peak
from miles_wan.supervised.summary import loss_gain
from miles_wan.supervised.validation import validation_draws, validation_metrics, validation_timesteps
from miles_wan.tiny.checkpoint import make_transformer
from miles_wan.tracking.loss_plot import plot_loss_curves
from miles_wan.tracking.writing import TrackingError
from miles_wan.wan.experts import Experts
from miles_wan.wan.facts import family_named

TWO = Experts(("transformer", "transformer_2"), 0.875)


@pytest.mark.parametrize(("family", "per_token"), [("wan2.2-ti2v-5b", True), ("wan2.2-i2v-a14b", False)])
def test_the_operations_of_a_forward_and_a_backward_are_those_torch_counts(family: str, per_token: bool) -> None:
    facts = family_named(family)
    transformer = make_transformer(facts)
    tokens, text = 3 * 2 * 4, 10
    shape = Shape(tokens=tokens, text=text, timesteps=tokens if per_token else 1)
    inputs = {
        "hidden_states": torch.randn(1, facts.in_channels, 3, 4, 8, requires_grad=True),
        "timestep": torch.full((1, tokens), 500.0) if per_token else torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, text, 32, requires_grad=True),
    }
    expected = forward_operations(transformer.config, shape)
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):
        output = transformer(**inputs).sample
    assert forward.get_total_flops() == expected.linear + expected.attention
    with FlopCounterMode(display=False) as backward, sdpa_kernel(SDPBackend.MATH):
        output.sum().backward()
    whole = forward.get_total_flops() + backward.get_total_flops()
    # the timestep needs no gradient, which spares one product of its first layer
    spared = 2 * shape.timesteps * transformer.config.freq_dim * 48
    assert whole == expected.training(full=True) - spared


def test_adapters_spare_the_gradients_of_the_frozen_weights() -> None:
    operations = forward_operations(make_transformer().config, Shape(tokens=24, text=10))
    assert operations.training(full=True) - operations.training(full=False) == operations.linear


def test_the_peak_is_that_of_the_device() -> None:
    assert known_peak("NVIDIA H200") == known_peak("NVIDIA H100 80GB HBM3") == 989.0
    assert known_peak("NVIDIA A100-SXM4-80GB") == 312.0
    assert known_peak("something else") is None


def test_validation_covers_the_fields_timesteps_and_both_experts() -> None:
    settings = SupervisedEvalConfig(quantiles=(0.0, 0.5, 1.0))
    found = validation_timesteps(settings, TWO, TWO.names)
    # high: 875 .. 1000, low: 0 .. 875; nobody draws 0, and 1000 and 875 belong to the next one
    assert found == sorted({*TIMESTEPS, 875.0, 938.0, 999.0, 1.0, 438.0, 874.0})
    only_high = validation_timesteps(settings, TWO, ("transformer",))
    assert only_high == [875.0, 938.0, 999.0]
    one = Experts(("transformer",), None)
    assert validation_timesteps(SupervisedEvalConfig(timesteps=(), quantiles=(0.25,)), one, one.names) == [250.0]


def test_validation_draws_are_always_the_same() -> None:
    draws = validation_draws(4, [100.0, 900.0], seed=7, experts=TWO, image_share=0.5)
    assert draws == validation_draws(4, [100.0, 900.0], seed=7, experts=TWO, image_share=0.5)
    assert [draw.position for draw in draws] == list(range(8))
    assert [draw.expert for draw in draws[:2]] == ["transformer_2", "transformer"]
    assert len({draw.noise_seed for draw in draws}) == 8
    assert draws[0].noise_seed == derived_seed(7, "validation", 0, "100.0")
    assert [draw.with_image for draw in draws] == [False, False, True, True, False, False, True, True]
    assert all(draw.with_text for draw in draws)


def losses_of(draws: list[Draw]) -> list[float]:
    return [draw.clip + draw.timestep / 1000 for draw in draws]


def test_validation_is_averaged_per_timestep_and_per_expert_over_clips() -> None:
    draws = validation_draws(3, [100.0, 300.0, 900.0], seed=0, experts=TWO, image_share=0.0)
    metrics = validation_metrics(draws, losses_of(draws), TWO)
    # per clip 0, 1, 2 plus the mean timestep; Student's interval over three clips, whose std is 1
    half = float(stats.t.ppf(0.975, 2)) / math.sqrt(3)
    for name, mean in {"": 1 + 1.3 / 3, "/t100": 1.1, "/t900": 1.9, "/high": 1.9, "/low": 1.2}.items():
        assert metrics[f"validation/loss{name}"] == pytest.approx(mean)
        assert metrics[f"validation/loss_ci95{name}"] == pytest.approx(half)


def test_the_change_of_a_run_is_paired_over_clips() -> None:
    draws = validation_draws(3, [100.0, 900.0], seed=0, experts=TWO, image_share=0.0)
    before = losses_of(draws)
    after = [loss - (0.5 if draw.expert == "transformer" else 0.2) for draw, loss in zip(draws, before, strict=True)]
    fields = loss_gain(draws, before, after, TWO)
    for part, change in {"high": -0.5, "low": -0.2, "all": -0.35}.items():
        assert fields["validation_change"][part]["mean"] == pytest.approx(change)
        assert fields["validation_change"][part]["ci95"] == pytest.approx(0, abs=1e-12)
    assert loss_gain(draws, None, None, TWO)["validation_change"] is None


def test_curves_become_a_picture(tmp_path: Path) -> None:
    rows = [
        {"step": step, "sft/loss/high": 1 / step, "sft/loss/low": 2 / step, "validation/loss/low": 2 / step}
        for step in range(1, 40)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with Image.open(plot_loss_curves(tmp_path / "metrics.jsonl", tmp_path / "loss.png")) as picture:
        assert picture.width > 1000
    (tmp_path / "empty.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(TrackingError, match="no loss yet"):
        plot_loss_curves(tmp_path / "empty.jsonl", tmp_path / "none.png")
