"""What a person reads: one line per rollout, a heartbeat in long phases, bars on a terminal."""

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from miles_wan.tracking.progress import ProgressReporter, ProgressState, headline, rollout_line

VALUES = {
    "rollout/reward_mean": 0.8123,
    "rollout/reward_std": 0.0421,
    "rollout/dropped_samples": 0,
    "train/approx_kl": 1.2e-4,
    "train/clip_fraction": 0.125,
    "train/log_prob_gap_max": 3.1e-7,
    "time/rollout_total": 48.24,
}


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def reporter(tmp_path: Path, time: Time, caplog: pytest.LogCaptureFixture) -> ProgressReporter:
    caplog.set_level(logging.INFO, "miles_wan")
    return ProgressReporter(tmp_path / "progress.json", total_rollouts=45, step=10, now=time)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=200)


def test_the_line_of_a_rollout_names_reward_kl_clip_parity_time_and_eta() -> None:
    line = rollout_line(ProgressState(total=45, step=12, eta_seconds=1572), VALUES)
    assert line == (
        "rollout 12/45 | reward 0.8123 ± 0.0421 | KL 1.2e-04 | clip 12% | parity 3.1e-07 | 48.2 s | ETA 0:26:12"
    )


def test_the_kl_to_the_reference_is_shown_where_it_is_measured() -> None:
    assert "KL 2.0e-03" in headline(VALUES | {"train/kl": 2e-3})


def test_dropped_videos_and_values_that_are_not_finite_are_seen() -> None:
    line = rollout_line(
        ProgressState(total=2, step=1), VALUES | {"rollout/dropped_samples": 3, "train/approx_kl": None}
    )
    assert "3 videos dropped" in line
    assert "KL not finite" in line


def test_each_rollout_is_one_line_and_the_eta_comes_from_the_rollouts_of_this_session(
    reporter: ProgressReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (11, 12, 13):
        reporter.begin_phase("rollout", total=8, unit="videos")
        for _ in range(8):
            reporter.advance()
        reporter.end_phase()
        time.now += 40
        reporter.finish_rollout(step, VALUES)
    assert [record.getMessage().split(" | ")[0] for record in caplog.records] == [
        "rollout 11/45",
        "rollout 12/45",
        "rollout 13/45",
    ]
    assert reporter.state.eta_seconds == pytest.approx(40 * (45 - 13))


def test_a_validation_line_tells_the_change_since_the_first(
    reporter: ProgressReporter, caplog: pytest.LogCaptureFixture
) -> None:
    reporter.finish_eval(0, {"eval/reward_mean": 0.8, "eval/reward_ci95": 0.01})
    reporter.finish_eval(5, {"eval/reward_mean": 0.825, "eval/reward_ci95": 0.01})
    assert caplog.messages == [
        "validation after 0 | reward 0.8000 ± 0.0100 (95 %)",
        "validation after 5 | reward 0.8250 ± 0.0100 (95 %) | change +0.0250",
    ]


def test_a_long_phase_speaks_once_a_minute(
    reporter: ProgressReporter, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    reporter.begin_phase("rollout", total=64, unit="videos")
    for _ in range(64):
        time.now += 10
        reporter.advance()
    assert len(caplog.messages) == 64 * 10 // 60
    assert caplog.messages[0] == "rollout 11/45 | rollout 6/64 videos"


def test_progress_json_follows_without_a_write_per_video(
    reporter: ProgressReporter, time: Time, tmp_path: Path
) -> None:
    path = tmp_path / "progress.json"
    reporter.begin_phase("rollout", total=1000)
    first = path.stat().st_ino
    for _ in range(100):
        reporter.advance()
    assert path.stat().st_ino == first
    time.now += 1
    reporter.advance()
    assert json.loads(path.read_text()) == {**vars(reporter.state)}
    assert reporter.state.phase_done == 101


def test_on_a_terminal_bars_show_run_and_phase(tmp_path: Path) -> None:
    console = terminal()
    reporter = ProgressReporter(tmp_path / "progress.json", total_rollouts=45, step=11, console=console)
    reporter.begin_phase("rollout", total=8, unit="videos")
    reporter.advance(3)
    reporter.finish_rollout(12, VALUES)
    reporter.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("rollouts", "12/45", "3/8", "videos", "reward 0.8123", "parity 3.1e-07"):
        assert text in shown
