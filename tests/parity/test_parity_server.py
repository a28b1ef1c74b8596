"""The parity check against a real server as it should be, and with faults put around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from parity_faults import DeafTo, OtherRecord, OtherSampling, ShuffledConditions, changed, without_effect
from parity_scene import Scene, scene
from parity_servers import SERVER, assert_fails, settings

from miles_wan.parity.command import server_side
from miles_wan.parity.parts import ServerSide
from miles_wan.parity.report import CONDITIONS, FLOW_SHIFT, NOISE_LEVEL, STALE
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.tiny import TinyPaths

pytestmark = pytest.mark.e2e

MakeScene = Callable[..., Scene]


@pytest.fixture(scope="module")
def make_scene(tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory) -> MakeScene:
    def make(**changes: Any) -> Scene:
        return scene(tiny_paths, tmp_path_factory.mktemp("server"), **{**SERVER, **changes})

    return make


@pytest.fixture(scope="module")
def standard(make_scene: MakeScene) -> Scene:
    return make_scene()


@pytest.fixture(scope="module")
def server(tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory, standard: Scene) -> Iterator[ServerSide]:
    engine = SGLangEngine(settings(tiny_paths, tmp_path_factory.mktemp("log")))
    with server_side(engine, standard.config) as side:
        yield side


@pytest.mark.parametrize(
    "changes",
    [{}, {"rollout_guidance_scale": 1.0, "rollout_samples_per_call": 2}, {"image": False}, {"rollout_sampler": "cps"}],
)
def test_the_server_and_the_trainer_agree(server: ServerSide, make_scene: MakeScene, changes: dict[str, Any]) -> None:
    report = make_scene(**changes).report(server)
    assert report.holds, (report.refused, report.causes, report.checks)
    assert report.noise_floor < 1e-5
    assert max(row.model_output for row in report.rows) < 1e-4


def test_another_noise_level_is_named(server: ServerSide, standard: Scene) -> None:
    report = standard.report(OtherSampling(server, noise_level=0.5))
    assert_fails(report, NOISE_LEVEL)
    assert "noise level 0.5 fits" in report.causes[0].evidence


@pytest.mark.parametrize("fault", [OtherRecord, ShuffledConditions])
def test_swapped_conditions_are_named(server: ServerSide, standard: Scene, fault: type[OtherRecord]) -> None:
    assert_fails(standard.report(fault(server, standard.requests)), CONDITIONS)


def test_a_push_that_was_left_out_is_named(server: ServerSide, standard: Scene) -> None:
    report = standard.report(DeafTo(server, 2))
    assert_fails(report, STALE)
    assert "the adapter pushed before leaves" in report.causes[0].evidence
    server.push(changed(standard.prepared.adapters[0], without_effect), policy_version=0)
    report = standard.report(DeafTo(server, 1, 2))
    assert_fails(report, STALE)
    assert "the base without an adapter leaves" in report.causes[0].evidence


def test_a_push_that_the_server_refuses_is_stale(server: ServerSide, standard: Scene) -> None:
    class Renamed(DeafTo):
        def push(self, adapter: Any, *, policy_version: int) -> None:
            [(module, own)] = adapter.items()
            renamed = {name.replace("blocks.0", "blocks.7"): tensor for name, tensor in own.items()}
            super().push({module: renamed}, policy_version=9)

    report = standard.report(Renamed(server))
    assert_fails(report, STALE)
    assert report.refused == "sent 20 layers, the engine updated 10 and did not know 10"


def test_a_flow_shift_that_the_engine_check_sees_is_named(server: ServerSide, make_scene: MakeScene) -> None:
    report = make_scene(rollout_flow_shift=3.0).report(server)
    assert report.refused is not None
    assert_fails(report, FLOW_SHIFT)
    assert "flow shift 5 gives them" in report.causes[0].evidence
