"""``miles-wan sft`` as people start it: a data set with every kind of fault, two ranks, both experts of an A14B; a run that is
killed twice gives the curve of one that is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from clip_files import grey_frames, turn, write_clip, write_sound
from diffusers import WanTransformer3DModel
from toy_clips import write_toy_clips

from miles_wan.tiny import make_tiny
from miles_wan.tracking.names import is_timing
from miles_wan.tracking.sinks import read_metrics

pytestmark = pytest.mark.e2e

STEPS = 4
GOOD = 6
# line after the good ones -> kind, in the training file
BAD = {
    1: "missing_video",
    2: "empty_video",
    3: "unreadable",
    4: "no_video_stream",
    5: "too_few_frames",
    6: "odd_rotation",
    7: "no_caption",
    8: "no_caption",
}
NOTES = {"turned": 1, "variable_frame_rate": 1, "other_language": 1}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    make_tiny(folder / "tiny", family="wan2.2-t2v-a14b", train_records=1, eval_records=1)
    train, _ = write_toy_clips(folder / "clips", train=GOOD, evaluation=2, frames=9)
    with train.open("a") as file:
        for line in bad_lines(folder / "clips") + odd_lines(folder / "clips"):
            file.write(json.dumps(line) + "\n")
    return folder


def bad_lines(folder: Path) -> list[dict[str, str]]:
    """Videos and captions that cannot be trained on, in the order of BAD."""
    (folder / "empty.mp4").touch()
    (folder / "rubbish.mp4").write_bytes(np.random.default_rng(0).bytes(5000))
    write_sound(folder / "sound.mp4")
    write_clip(folder / "short.mp4", grey_frames(range(4)))
    turn(write_clip(folder / "askew.mp4", grey_frames(range(9))), 40)
    write_clip(folder / "good.mp4", grey_frames(range(9)))
    videos = ("absent", "empty", "rubbish", "sound", "short", "askew")
    lines = [{"video_path": f"{name}.mp4", "input": f"a clip called {name}"} for name in videos]
    return [*lines, {"video_path": "good.mp4"}, {"video_path": "good.mp4", "input": " "}]


def odd_lines(folder: Path) -> list[dict[str, str]]:
    """Clips that are unusual and can be trained on."""
    turn(write_clip(folder / "turned.webm.mp4", grey_frames(range(0, 90, 10))), 90)
    times = [0.0, 0.1, 0.2, 0.7, 0.8, 0.9, 1.0, 1.1, 1.9]
    write_clip(folder / "uneven.mp4", grey_frames(range(0, 90, 10)), times=times)
    write_clip(folder / "plain.webm", grey_frames(range(0, 90, 10)))
    return [
        {"video_path": "turned.webm.mp4", "input": "a grey clip on its side"},
        {"video_path": "uneven.mp4", "input": "a grey clip that stutters"},
        {"video_path": "plain.webm", "input": "灰色的视频"},
    ]


def command(world: Path, out: str, *further: str) -> list[str]:
    model = world / "tiny" / "Wan2.2-T2V-A14B-tiny"
    flags = ["--recipe", "tiny", "--model", str(model), "--output-dir", str(world / out), "--num-gpus", "2"]
    flags += ["--data-jsonl", str(world / "clips" / "train.jsonl"), "--num-steps", str(STEPS)]
    flags += ["--eval-data-jsonl", str(world / "clips" / "validation.jsonl"), "--eval-interval", "2"]
    flags += ["--data.cache-dir", str(world / "cache"), "--eval.videos", "1", "--eval.num-inference-steps", "2"]
    flags += ["--checkpoint.interval", "1", "--training.batch-size", "8", "--data.num-frames", "5"]
    return [sys.executable, "-m", "miles_wan.cli", "sft", *flags, *further]


def environment(**further: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **further}


@pytest.fixture(scope="module")
def whole(world: Path) -> Any:
    """The run, with what it said."""
    return subprocess.run(command(world, "whole"), capture_output=True, text=True, env=environment(), timeout=300)


def test_a_run_trains_both_experts_and_leaves_everything_a_person_needs(world: Path, whole: Any) -> None:
    assert whole.returncode == 0, whole.stderr[-3000:]
    out = world / "whole"
    history = read_metrics(out / "metrics.jsonl")
    assert list(history) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        row = history[step]
        assert row["sft/samples/high"] + row["sft/samples/low"] == 8
        assert row["sft/loss"] * 8 == pytest.approx(
            sum(row[f"sft/loss/{name}"] * row[f"sft/samples/{name}"] for name in ("high", "low"))
        )
    for step in (0, 2, 4):
        assert {"validation/loss/high", "validation/loss/low", "validation/loss/t125"} <= history[step].keys()
        assert (out / "videos" / f"step_{step:06d}" / "00.mp4").stat().st_size > 0
    assert history[4]["validation/loss"] < history[0]["validation/loss"]
    for name in ("transformer", "transformer_2"):
        WanTransformer3DModel.from_pretrained(out / "model" / name)
    assert (out / "loss.png").is_file()


def test_every_bad_record_is_named_and_counted_and_none_ends_the_run(world: Path, whole: Any) -> None:
    summary = json.loads((world / "whole" / "summary.json").read_text())
    expected = {kind: list(BAD.values()).count(kind) for kind in BAD.values()}
    assert summary["bad_records"] == {"data.train": expected, "data.eval": {}}
    assert summary["notes"]["data.train"] == NOTES
    assert summary["clips"] == GOOD + 3
    named = [json.loads(line) for line in (world / "whole" / "bad_records.jsonl").read_text().splitlines()]
    places = {int(entry["source"].rsplit(":", 1)[1]) - GOOD: entry["kind"] for entry in named}
    assert places == BAD
    for number in BAD:
        assert f"train.jsonl:{GOOD + number}:" in whole.stderr


@contextmanager
def stopped(world: Path, point: str, *further: str) -> Iterator[subprocess.Popen[bytes]]:
    """The run while it waits at a point, killed at the end."""
    reached = world / f"reached {point.replace('/', ' ')}"
    process = subprocess.Popen(
        command(world, "killed", *further),
        stderr=(world / "killed.log").open("ab"),
        env=environment(MILES_WAN_STOP_AT=point, MILES_WAN_STOP_FILE=str(reached)),
    )
    try:
        deadline = time.monotonic() + 200
        while not reached.exists():
            assert process.poll() is None, (world / "killed.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_killed_twice_gives_the_same_curve(world: Path, whole: Any) -> None:
    assert whole.returncode == 0
    for point, further in (("sft/before_step@1", ()), ("checkpoint/before_commit@3", ("--resume", "latest"))):
        with stopped(world, point, *further) as process:
            ranks = psutil.Process(process.pid).children(recursive=True)
            os.kill(process.pid, signal.SIGKILL)
            gone, left = psutil.wait_procs(ranks, timeout=20)
        assert not left
        assert len(gone) >= 2
    last = subprocess.run(
        command(world, "killed", "--resume", "latest"), capture_output=True, text=True, env=environment(), timeout=300
    )
    assert last.returncode == 0, last.stderr[-3000:]
    assert json.loads((world / "killed" / "summary.json").read_text())["resumed_from"].endswith("step_000002")
    one, other = (read_metrics(world / run / "metrics.jsonl") for run in ("whole", "killed"))
    assert _numbers(other) == _numbers(one)


def _numbers(history: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {step: {k: v for k, v in row.items() if not is_timing(k)} for step, row in history.items()}


def test_faults_of_every_kind_are_told_together_before_anything_starts(world: Path) -> None:
    (world / "none.jsonl").write_text('{"video_path": "absent.mp4", "input": "x"}\n')
    flags = [
        "--data-jsonl",
        str(world / "none.jsonl"),
        "--data.width",
        "33",
        "--eval-data-jsonl",
        str(world / "absent"),
    ]
    ended = subprocess.run(
        command(world, "refused", *flags), capture_output=True, text=True, env=environment(), timeout=120
    )
    assert ended.returncode == 2
    for part in ("absent.mp4 does not exist", "33x32", "no such data file", "3 faults"):
        assert part in ended.stderr, ended.stderr
    assert not (world / "refused").exists()
