"""Real servers for tests of the parity check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_wan.parity import ParityReport
from miles_wan.rollout.sglang.settings import EngineSettings
from miles_wan.tiny import TinyPaths

SERVER = {"rollout_engine": "sglang", "rollout_tp_size": 1, "rollout_guidance_scale": 3.0}


def settings(tiny_paths: TinyPaths, folder: Path, **changes: Any) -> EngineSettings:
    values = {"dtype": "fp32", "device": "cpu", "start_timeout": 600.0, "request_timeout": 120.0, **changes}
    return EngineSettings(str(tiny_paths.model), "Wan2.2-TI2V-5B-Diffusers", ("0",), folder, **values)


def assert_fails(report: ParityReport, cause: str) -> None:
    told = [(c.name, c.evidence) for c in report.causes]
    assert not report.holds
    assert {name for name, _ in told} == {cause}, told
