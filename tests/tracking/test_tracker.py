"""The one object of the loop: what is logged is in every sink, shown once, and continued at resume."""

import json
import logging
import math
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles_wan.errors import ParityError
from miles_wan.tracking.names import is_timing
from miles_wan.tracking.sinks import read_metrics
from miles_wan.tracking.tracker import Tracker
from miles_wan.tracking.writing import TrackingError


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "miles_wan")
    return caplog


def rollout(tracker: Tracker, step: int) -> None:
    """One turn of a loop, with numbers that are a function of the step."""
    with tracker.phase("rollout", total=4, unit="videos"):
        tracker.advance(4)
    with tracker.phase("train"):
        pass
    tracker.log(step, {"rollout/reward_mean": 1 / step, "train/approx_kl": step / 10, **tracker.clock.lap()})


def test_a_number_is_in_the_json_line_and_in_tensorboard(tmp_path: Path) -> None:
    with Tracker(tmp_path, total_rollouts=1) as tracker:
        rollout(tracker, 1)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = read_metrics(tmp_path / "metrics.jsonl")[1]
    assert values["rollout/reward_mean"] == 1.0
    assert set(values) == set(events.Tags()["scalars"])
    assert {"time/rollout", "time/train", "time/rollout_total"} <= set(values)


def test_numpy_and_torch_numbers_are_numbers(tmp_path: Path) -> None:
    with Tracker(tmp_path, total_rollouts=1) as tracker:
        tracker.log(1, {"train/loss": torch.tensor(0.5), "train/kl": np.float32(0.25), "rollout/videos": np.int64(8)})
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == {"train/loss": 0.5, "train/kl": 0.25, "rollout/videos": 8}


@pytest.mark.parametrize("value", ["0.5", True, None, [1.0, 2.0], torch.zeros(2)])
def test_what_is_no_number_is_refused_by_name(tmp_path: Path, value: object) -> None:
    with Tracker(tmp_path, total_rollouts=1) as tracker, pytest.raises(TrackingError, match="Metric train/loss"):
        tracker.log(1, {"train/loss": value})


def test_an_unknown_name_is_refused_and_nothing_of_the_line_is_written(tmp_path: Path) -> None:
    with Tracker(tmp_path, total_rollouts=1) as tracker, pytest.raises(TrackingError, match="train/lss"):
        tracker.log(1, {"train/loss": 1.0, "train/lss": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == {}


def test_values_that_are_not_finite_are_null_counted_and_named(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    with Tracker(tmp_path, total_rollouts=1) as tracker:
        tracker.log(1, {"train/loss": math.nan, "train/kl": torch.tensor(math.inf), "train/lr": 0.1})
        assert tracker.non_finite == 2
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["train/loss"], line["train/kl"], line["train/lr"]) == (None, None, 0.1)
    assert line["tracking/non_finite"] == 2
    assert "train/loss=nan" in lines.text


def test_steps_only_go_forward(tmp_path: Path) -> None:
    with Tracker(tmp_path, total_rollouts=5, resume_step=3) as tracker:
        with pytest.raises(TrackingError, match="step 2 came after those of step 3"):
            tracker.log(2, {"train/loss": 1.0})
        tracker.log(3, {"eval/reward_mean": 1.0})


def test_a_killed_and_resumed_run_leaves_the_curve_of_an_uninterrupted_one(tmp_path: Path) -> None:
    for name, spans in (("whole", [(None, 1, 8)]), ("killed", [(None, 1, 6), (4, 5, 8)])):
        for resume_step, first, last in spans:
            tracker = Tracker(tmp_path / name, total_rollouts=8, resume_step=resume_step)
            for step in range(first, last + 1):
                rollout(tracker, step)
            del tracker  # as after a kill: not closed
            with (tmp_path / name / "metrics.jsonl").open("ab") as file:
                file.write(b'{"step": 9, "tr')
    curves = [
        {
            step: {key: value for key, value in values.items() if not is_timing(key)}
            for step, values in read_metrics(tmp_path / name / "metrics.jsonl").items()
        }
        for name in ("whole", "killed")
    ]
    assert curves[0] == curves[1]
    assert list(curves[0]) == list(range(1, 9))
    assert (
        len((tmp_path / "killed" / "metrics.jsonl").read_bytes().splitlines()) == 8 + 1
    )  # the torn line of the last kill


def test_each_rollout_and_validation_is_one_line_and_a_resume_remembers_the_first_validation(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    with Tracker(tmp_path, total_rollouts=2) as tracker:
        tracker.log(0, {"eval/reward_mean": 0.5})
        rollout(tracker, 1)
    with Tracker(tmp_path, total_rollouts=2, resume_step=1) as tracker:
        rollout(tracker, 2)
        tracker.log(2, {"eval/reward_mean": 0.75})
    said = [line for line in lines.messages if line.startswith(("rollout ", "validation "))]
    assert [line.split(" | ")[0] for line in said] == [
        "validation after 0",
        "rollout 1/2",
        "rollout 2/2",
        "validation after 2",
    ]
    assert said[-1].endswith("change +0.2500")


def test_an_output_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(TrackingError, match=r"Cannot write .*metrics\.jsonl"):
        Tracker(tmp_path / "run", total_rollouts=1)


def test_a_disk_that_fills_up_ends_the_run_with_the_first_message_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # TensorBoard's own thread would print it too
    tracker = Tracker(tmp_path, total_rollouts=3)
    rollout(tracker, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(TrackingError, match=r"Cannot write .*metrics\.jsonl: File too large"), tracker:
            rollout(tracker, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [1]


def test_the_error_of_the_run_is_not_hidden_by_one_at_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(tmp_path, total_rollouts=3)

    def refuse() -> None:
        raise TrackingError("disk full")

    monkeypatch.setattr(tracker, "close", refuse)
    with pytest.raises(ParityError), tracker:
        raise ParityError("engine and trainer disagree")
    with pytest.raises(TrackingError, match="disk full"), tracker:
        pass
