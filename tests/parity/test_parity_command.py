"""``miles-wan parity`` as a person runs it, with the local engine: text, JSON and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_wan.tiny import TinyPaths


def run(
    *flags: str, folder: Path, program: tuple[str, ...] = ("-m", "miles_wan.cli")
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, "parity", *flags]
    # A width that no terminal has: nothing is cut off.
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)


@pytest.fixture
def flags(tiny_paths: TinyPaths) -> list[str]:
    """No reward model: it needs none."""
    engine = ["--rollout.engine", "local", "--rollout.guidance-scale", "3"]
    return ["--recipe", "tiny_ti2v", "--model", str(tiny_paths.model), "--data", str(tiny_paths.train_jsonl), *engine]


def test_engines_that_agree_give_0_and_a_table(flags: list[str], tmp_path: Path) -> None:
    done = run(*flags, "--records", "3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "6 samples of 3 records; engine fp32, trainer fp32" in done.stdout
    for text in ("step", "log-prob", "sigma grid", "clip_range 0.001", "noise floor", "parity holds"):
        assert text in done.stdout
    assert not list(tmp_path.iterdir())


# The same command in a process whose local engine gives every token of a conditioned video the same timestep.
FAULTY = """
import sys
from parity_faults import ScalarTimesteps
from miles_wan import cli
from miles_wan.rollout.local import engine
right = engine.denoise
engine.denoise = lambda model, *others, **options: right(ScalarTimesteps(model), *others, **options)
cli.main(sys.argv[1:])
"""


def test_an_engine_that_differs_gives_1_and_json_names_the_cause(flags: list[str], tmp_path: Path) -> None:
    done = run(*flags, "--json", "--samples", "1", folder=tmp_path, program=("-c", FAULTY))
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["holds"] is False
    assert report["likely_cause"] == "first-frame mask off"
    assert report["records"] == report["samples"] == 2
    assert next(check["name"] for check in report["checks"] if not check["holds"]) == "model output"
    assert {row["step"] for row in report["rows"]} <= set(range(5))


def test_bad_input_gives_2_and_every_fault(flags: list[str], tmp_path: Path) -> None:
    done = run(*flags, "--records", "0", "--rollout.num-frames", "6", "--data", "nowhere.jsonl", folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    for text in ("--records 0", "nowhere.jsonl", "num_frames"):
        assert text in done.stderr


def test_a_flag_that_does_not_exist_gives_2(flags: list[str], tmp_path: Path) -> None:
    done = run(*flags, "--recods", "2", folder=tmp_path)
    assert done.returncode == 2
    assert "--recods: no such flag" in done.stderr
