"""The parity check of models with two experts over the local engine: it holds where nothing is wrong, and names what is wrong
with routing, guidance, one expert's weights, or the images of I2V."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity_faults import (
    DeafToModule,
    OtherBoundary,
    OtherImage,
    OtherPrompt,
    OtherRecord,
    OtherSampling,
    ShuffledConditions,
    SwappedExperts,
)
from parity_scene import Scene, scene
from parity_servers import assert_fails
from rich.console import Console

from miles_wan.parity.display import show
from miles_wan.parity.parts import EngineSide
from miles_wan.parity.report import CONDITIONS, EXPERT, GUIDANCE, STALE

FAMILIES = ("t2v", "i2v")
GUIDED = {"rollout_guidance_scale": 4.0, "rollout_guidance_scale_2": 3.0, "rollout_window_size": 4}
Fault = Callable[[Scene], EngineSide]


@pytest.fixture(scope="module")
def scenes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scene]:
    made: dict[str, Scene] = {}

    def of(family: str) -> Scene:
        if family not in made:
            paths = request.getfixturevalue(f"{family}_paths")
            made[family] = scene(paths, tmp_path_factory.mktemp(family), recipe="tiny_a14b", **GUIDED)
        return made[family]

    return of


@pytest.mark.parametrize("changes", [{}, {"rollout_guidance_scale": 1.0, "rollout_guidance_scale_2": 1.0}])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_without_fault_passes(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    paths = request.getfixturevalue(f"{family}_paths")
    healthy = scene(paths, tmp_path, recipe="tiny_a14b", **(GUIDED | changes))
    report = healthy.report(healthy.local_engine())
    assert report.holds, ([(check.name, check.value) for check in report.checks if not check.holds], report.causes)
    assert report.noise_floor < 1e-5
    assert report.warnings == []
    assert [row.expert for row in report.rows] == ["high", "high", *["high" if family == "t2v" else "low"], "low"]
    with Console(width=80, record=True) as console:
        show(report, console)
    shown = console.export_text()
    assert "0 high" in shown
    assert "3 low" in shown
    assert "…" not in shown  # nothing is cut off


def test_bfloat16_passes(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    precision = {"model_dtype": "bf16", "rollout_dtype": "bf16", "algorithm_max_log_prob_gap": 0.05}
    rounded = scene(request.getfixturevalue("i2v_paths"), tmp_path, recipe="tiny_a14b", **(GUIDED | precision))
    report = rounded.report(rounded.local_engine())
    assert report.holds, ([(check.name, check.value) for check in report.checks if not check.holds], report.causes)


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "guidance of the low-noise expert": (
        lambda s: OtherSampling(s.local_engine(), guidance_scale_2=4.0),
        GUIDANCE,
        "guidance scale 4 of the low expert, not 3,",
    ),
    "guidance of the high-noise expert": (
        lambda s: OtherSampling(s.local_engine(), guidance_scale=3.0),
        GUIDANCE,
        "guidance scale 3 of the high expert, not 4,",
    ),
    "a lower boundary": (lambda s: s.local_engine(lambda model: OtherBoundary(model, 0.7)), EXPERT, "(transformer)"),
    "a higher boundary": (
        lambda s: s.local_engine(lambda model: OtherBoundary(model, 0.96)),
        EXPERT,
        "(transformer_2)",
    ),
    "one push of the low-noise expert": (
        lambda s: DeafToModule(s.local_engine(), "transformer_2"),
        STALE,
        "the adapter pushed before leaves",
    ),
    "one push of the high-noise expert": (
        lambda s: DeafToModule(s.local_engine(), "transformer"),
        STALE,
        "the adapter pushed before leaves",
    ),
    "other record": (lambda s: OtherRecord(s.local_engine(), s.requests), CONDITIONS, "it is that of"),
    "shuffled conditions": (lambda s: ShuffledConditions(s.local_engine(), s.requests), CONDITIONS, "it is that of"),
    "other prompt": (lambda s: OtherPrompt(s.local_engine(), s.requests), CONDITIONS, "the prompt of"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_fails_and_is_named(scenes: Callable[[str], Scene], family: str, name: str) -> None:
    fault, cause, evidence = FAULTS[name]
    report = scenes(family).report(fault(scenes(family)))
    assert_fails(report, cause)
    assert evidence in report.causes[0].evidence


def test_another_image_than_the_engine_says_is_named(scenes: Callable[[str], Scene]) -> None:
    """I2V: the image is in no state, so that nothing but the model's output shows it."""
    faulty = scenes("i2v")
    report = faulty.report(OtherImage(faulty.local_engine(), faulty.requests))
    assert_fails(report, CONDITIONS)
    assert "the first frame of" in report.causes[0].evidence


def test_swapped_experts_fail(scenes: Callable[[str], Scene]) -> None:
    faulty = scenes("t2v")
    report = faulty.report(faulty.local_engine(SwappedExperts))
    assert not report.holds
    assert next(check.name for check in report.checks if not check.holds) == "model output"


def test_an_expert_without_kept_steps_is_told(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    settings = {"rollout_window_size": 2, "rollout_window_range": [0, 2], "model_train_experts": "high"}
    early = scene(request.getfixturevalue("t2v_paths"), tmp_path, recipe="tiny_a14b", **settings)
    report = early.report(early.local_engine())
    assert report.holds
    assert report.warnings == ["no kept step belongs to the expert of low noise (transformer_2): it was not checked"]
