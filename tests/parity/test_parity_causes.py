"""The parity check over the local engine: it holds where nothing is wrong, and names what is wrong where something is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parity_faults import (
    DeafTo,
    OtherLogProb,
    OtherPrompt,
    OtherRecord,
    OtherSampling,
    ScalarTimesteps,
    ShuffledConditions,
    ShuffledSamples,
    changed,
    over_all_noise,
    over_all_states,
)
from parity_scene import Scene, scene

from miles_wan.errors import EngineError, WeightSyncError
from miles_wan.parity import ParityReport
from miles_wan.parity.parts import EngineSide
from miles_wan.parity.report import CONDITIONS, FLOW_SHIFT, LAW, MASK, NOISE_LEVEL, STALE, UNKNOWN
from miles_wan.rollout.base import EngineMismatchError
from miles_wan.tiny import TinyPaths

Fault = Callable[[EngineSide, Scene], EngineSide]


@pytest.fixture(scope="module")
def fp32(tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene(tiny_paths, tmp_path_factory.mktemp("fp32"), rollout_guidance_scale=3.0)


@pytest.fixture(scope="module")
def bf16(tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene(
        tiny_paths,
        tmp_path_factory.mktemp("bf16"),
        rollout_guidance_scale=3.0,
        model_dtype="bf16",
        rollout_dtype="bf16",
        algorithm_max_log_prob_gap=0.05,
    )


def assert_fails(report: ParityReport, cause: str) -> None:
    told = [(c.name, c.evidence) for c in report.causes]
    assert not report.holds
    assert report.likely_cause == cause, told
    assert {name for name, _ in told} == {cause}, told


@pytest.mark.parametrize("sampler_kind", ["flow_sde", "cps", "dance_sde", "flow_grpo_wan"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("image", [True, False])
def test_an_engine_without_fault_passes(
    tiny_paths: TinyPaths, tmp_path: Path, image: bool, guidance: float, sampler_kind: str
) -> None:
    healthy = scene(tiny_paths, tmp_path, image=image, rollout_guidance_scale=guidance, rollout_sampler=sampler_kind)
    report = healthy.report(healthy.local_engine())
    assert report.holds, [(check.name, check.value) for check in report.checks if not check.holds]
    assert report.causes == []
    assert report.noise_floor < 1e-5
    assert sum(row.pairs for row in report.rows) == 2 * 2 * 3
    assert any("first-frame mask was not checked" in warning for warning in report.warnings) is not image


def test_bfloat16_passes_with_a_noise_floor_of_its_own(bf16: Scene) -> None:
    report = bf16.report(bf16.local_engine())
    assert report.holds, [(check.name, check.value) for check in report.checks if not check.holds]
    assert report.precision == "engine bf16, trainer bf16"
    assert 1e-3 < max(row.model_output for row in report.rows) < 0.03  # eps of bfloat16 is 8e-3
    assert 1e-6 < report.noise_floor < 1e-2


def test_a_squared_error_log_prob_passes(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    healthy = scene(tiny_paths, tmp_path, rollout_sampler="cps", rollout_cps_log_prob="squared_error")
    assert healthy.report(healthy.local_engine()).holds


def test_a_listed_grid_passes(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    healthy = scene(tiny_paths, tmp_path, rollout_sigmas=[1.0, 0.95, 0.8, 0.6, 0.3, 0.1, 0.0])
    assert healthy.report(healthy.local_engine()).holds


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "flow shift": (lambda e, s: OtherSampling(e, flow_shift=3.0), FLOW_SHIFT, "flow shift 3 gives them"),
    "noise level": (lambda e, s: OtherSampling(e, noise_level=0.5), NOISE_LEVEL, "noise level 0.5 fits"),
    "law": (lambda e, s: OtherSampling(e, kind="cps", noise_level=0.6), LAW, "cps with noise level 0.6 fits"),
    "other record": (lambda e, s: OtherRecord(e, s.requests), CONDITIONS, "it is that of"),
    "shuffled conditions": (lambda e, s: ShuffledConditions(e, s.requests), CONDITIONS, "it is that of"),
    "other prompt": (lambda e, s: OtherPrompt(e, s.requests), CONDITIONS, "the prompt of"),
    "no push": (lambda e, s: DeafTo(e, 1, 2), STALE, "the base without an adapter leaves"),
    "no second push": (lambda e, s: DeafTo(e, 2), STALE, "the adapter pushed before leaves"),
    "mask, noise": (lambda e, s: OtherLogProb(e, over_all_noise), MASK, "its noise give them"),
    "mask, states": (lambda e, s: OtherLogProb(e, over_all_states), MASK, "its stored next states give them"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_and_is_named(fp32: Scene, name: str) -> None:
    fault, cause, evidence = FAULTS[name]
    report = fp32.report(fault(fp32.local_engine(), fp32))
    assert_fails(report, cause)
    assert evidence in report.causes[0].evidence


# What a prompt changes in the tiny model is less than the rounding of bfloat16.
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "other prompt"])
def test_a_fault_is_named_in_bfloat16_too(bf16: Scene, name: str) -> None:
    fault, cause, _ = FAULTS[name]
    assert_fails(bf16.report(fault(bf16.local_engine(), bf16)), cause)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_timestep_for_all_tokens_is_the_mask(request: pytest.FixtureRequest, precision: str) -> None:
    faulty = request.getfixturevalue(precision)
    report = faulty.report(faulty.local_engine(ScalarTimesteps))
    assert_fails(report, MASK)
    assert "one timestep for all tokens" in report.causes[0].evidence


def test_conditions_shuffled_between_samples_fail(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    shuffled = scene(tiny_paths, tmp_path, samples=4, rollout_samples_per_call=4)
    assert_fails(shuffled.report(ShuffledSamples(shuffled.local_engine(), shuffled.requests)), CONDITIONS)


def test_among_three_records_the_right_one_is_named(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    three = scene(tiny_paths, tmp_path, records=3)
    report = three.report(OtherRecord(three.local_engine(), three.requests))
    assert_fails(report, CONDITIONS)
    sources = [request.record.source for request in three.requests]
    for own, other in zip(sources, [*sources[1:], sources[0]], strict=True):
        assert f"came back with {own}" in report.causes[0].evidence
        assert f"it is that of {other}" in report.causes[0].evidence


def test_the_noise_level_of_each_law_is_found(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    for kind in ("cps", "dance_sde"):
        faulty = scene(tiny_paths, tmp_path, rollout_sampler=kind)
        report = faulty.report(OtherSampling(faulty.local_engine(), noise_level=0.35))
        assert_fails(report, NOISE_LEVEL)
        assert "noise level 0.35 fits" in report.causes[0].evidence


def test_a_grid_of_no_shift_is_said_to_be_one(fp32: Scene) -> None:
    grid = (1.0, 0.9, 0.8, 0.7, 0.6, 0.1, 0.0)
    report = fp32.report(OtherSampling(fp32.local_engine(), sigmas=grid))
    assert_fails(report, UNKNOWN)
    assert "no flow shift gives them" in report.causes[0].evidence


def test_an_unknown_fault_names_the_first_quantity_to_differ(fp32: Scene) -> None:
    class Moved:
        """Computes with adapters that nobody pushed."""

        def __init__(self, engine: EngineSide) -> None:
            self.engine = engine
            self.rollout = engine.rollout

        def push(self, adapter: Any, *, policy_version: int) -> None:
            self.engine.push(changed(adapter, lambda _, tensor: tensor * 1.5), policy_version=policy_version)

    report = fp32.report(Moved(fp32.local_engine()))
    assert_fails(report, UNKNOWN)
    assert "model outputs of 4 of 4 samples differ" in report.causes[0].evidence
    assert "engine fp32, trainer fp32" in report.causes[0].evidence
    assert next(check.name for check in report.checks if not check.holds) == "model output"


def test_a_clip_range_below_the_noise_floor_is_a_warning(bf16: Scene) -> None:
    algorithm = bf16.config.algorithm.model_copy(update={"clip_range": 1e-9})
    narrow = replace(bf16, config=bf16.config.model_copy(update={"algorithm": algorithm}))
    report = narrow.report(narrow.local_engine())
    assert report.holds
    assert any("clipping acts on numeric noise" in warning for warning in report.warnings)


def test_dppo_is_judged_by_its_threshold(bf16: Scene) -> None:
    algorithm = bf16.config.algorithm.model_copy(update={"loss": "dppo", "kl_threshold": 1e-12})
    dppo = replace(bf16, config=bf16.config.model_copy(update={"algorithm": algorithm}))
    report = dppo.report(dppo.local_engine())
    assert report.clip == {"kl_threshold": 1e-12}
    assert any("the threshold acts on numeric noise" in warning for warning in report.warnings)


class Refusing:
    def __init__(self, *, on_push: Exception | None = None, on_rollout: Exception | None = None) -> None:
        self.errors = on_push, on_rollout

    def push(self, *_: Any, **__: Any) -> None:
        if self.errors[0] is not None:
            raise self.errors[0]

    def rollout(self, *_: Any) -> list[Any]:
        raise self.errors[1] or AssertionError


def test_a_refusal_becomes_a_report(fp32: Scene) -> None:
    refused = fp32.report(Refusing(on_push=WeightSyncError("the engine updated 3 layers of 20")))
    assert_fails(refused, STALE)
    assert refused.refused == "the engine updated 3 layers of 20"
    hook = EngineMismatchError("...", {"hook.sampled_log_prob": "disabled"}, {"hook.sampled_log_prob": "active"})
    assert_fails(fp32.report(Refusing(on_rollout=hook)), MASK)
    assert_fails(fp32.report(Refusing(on_rollout=EngineError("the engine died"))), UNKNOWN)
