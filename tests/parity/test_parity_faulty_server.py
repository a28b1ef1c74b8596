"""The parity check against a real server that has two faults: another flow shift, and log-probs over all frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from parity_scene import Scene, scene
from parity_servers import SERVER, assert_fails, settings

from miles_wan.errors import EngineError
from miles_wan.parity.command import server_side
from miles_wan.parity.comparison import empty_report, refused
from miles_wan.parity.parts import EngineSide, ServerSide
from miles_wan.parity.report import FLOW_SHIFT, MASK
from miles_wan.rollout.sglang import messages
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.rollout.sglang.plugin import DISABLE_VARIABLE
from miles_wan.rollout.sglang.settings import EngineSettings
from miles_wan.tiny import TinyPaths

pytestmark = pytest.mark.e2e

MakeScene = Callable[..., Scene]


@pytest.fixture(scope="module")
def make_scene(tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory) -> MakeScene:
    def make(**changes: Any) -> Scene:
        return scene(tiny_paths, tmp_path_factory.mktemp("server"), **{**SERVER, **changes})

    return make


@dataclass
class Unchecked(SGLangEngine):
    """Serves in spite of what its checks after the start say."""

    options: EngineSettings
    refusals: list[EngineError] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.options)

    def _check_identity(self, identity: Mapping[str, Any]) -> None:
        self.note(lambda: super(Unchecked, self)._check_identity(identity))

    def _check_computation(self) -> None:
        self.note(super()._check_computation)

    def note(self, check: Callable[[], None]) -> None:
        try:
            check()
        except EngineError as error:
            self.refusals.append(error)


@pytest.fixture(scope="module")
def faulty(
    tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory, make_scene: MakeScene
) -> Iterator[tuple[ServerSide, Unchecked]]:
    """A server with flow shift 3 and without the hook that masks the first frame."""
    engine = Unchecked(
        settings(
            tiny_paths,
            tmp_path_factory.mktemp("log"),
            flow_shift=3.0,
            environment=((DISABLE_VARIABLE, "sampled_log_prob"),),
        )
    )
    with server_side(engine, make_scene().config) as side:
        yield side, engine


def test_a_flow_shift_that_nobody_checked_is_named(
    faulty: tuple[EngineSide, Unchecked], make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_SIGMA_TOLERANCE", 1.0)
    report = make_scene(image=False).report(faulty[0])
    assert report.refused is None
    assert_fails(report, FLOW_SHIFT)
    assert "flow shift 3 gives them" in report.causes[0].evidence


def test_log_probs_over_all_frames_are_named(faulty: tuple[EngineSide, Unchecked], make_scene: MakeScene) -> None:
    without_a_mask = make_scene(rollout_flow_shift=3.0)
    report = without_a_mask.report(faulty[0])
    assert report.refused is None
    assert_fails(report, MASK)
    assert "over all frames" in report.causes[0].evidence
    assert len(faulty[1].refusals) == 2
    for refusal in faulty[1].refusals:  # of the identity, of the canary
        assert_fails(refused(empty_report(without_a_mask.config, without_a_mask.requests), refusal), MASK)
