"""Metrics survive a kill at any moment and a resumed run continues the same curve; a full disk is one clear message."""

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles_wan.errors import MilesWanError
from miles_wan.tracking.sinks import JsonlSink, TensorBoardSink, read_metrics, truncate_after
from miles_wan.tracking.writing import TrackingError


def write_steps(path: Path, first: int, last: int, *, resume_step: int | None = None, offset: float = 0.0) -> None:
    sink = JsonlSink(path, resume_step=resume_step)
    for step in range(first, last + 1):
        sink.write(step, {"train/loss": step + offset})
    sink.close()


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_is_one_json_object_with_step_time_and_the_metrics(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "new" / "folder" / "metrics.jsonl")
    sink.write(3, {"rollout/reward_mean": 0.25, "rollout/videos": 8, "train/kl": None})
    record = json.loads((tmp_path / "new" / "folder" / "metrics.jsonl").read_text())  # read before close: it is flushed
    assert record.pop("time").endswith("+00:00")
    assert record == {"step": 3, "rollout/reward_mean": 0.25, "rollout/videos": 8, "train/kl": None}
    sink.close()


def test_resume_drops_the_lines_behind_the_checkpoint_and_continues_without_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 7)
    write_steps(path, 5, 9, resume_step=4, offset=100)
    assert steps_of(path) == list(range(10))
    assert [row["train/loss"] for row in read_metrics(path).values()] == [0, 1, 2, 3, 4, 105, 106, 107, 108, 109]


@pytest.mark.parametrize("kept_bytes", [1, 10, 30])
def test_a_line_torn_by_a_kill_is_dropped_at_resume(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 4)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[0][:kept_bytes])
    assert list(read_metrics(path)) == [1, 2, 3, 4]
    write_steps(path, 5, 6, resume_step=4)
    assert steps_of(path) == [1, 2, 3, 4, 5, 6]


def test_a_torn_line_that_happens_to_be_whole_json_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "train/loss": 1.0}\n{"step": 2, "train/loss": 2.0}')
    assert truncate_after(path, 2) == 1
    assert steps_of(path) == [1]


def test_a_process_of_the_killed_run_that_still_writes_does_not_disturb_the_resumed_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    stale = JsonlSink(path)
    stale.write(1, {"train/loss": 1.0})
    resumed = JsonlSink(path, resume_step=1)
    stale.write(2, {"train/loss": -1.0})
    resumed.write(2, {"train/loss": 2.0})
    assert steps_of(path) == [1, 2]
    assert read_metrics(path)[2] == {"train/loss": 2.0}


def test_a_killed_writer_leaves_every_line_it_reported_and_resume_works(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from miles_wan.tracking.sinks import JsonlSink\n"
        "sink = JsonlSink(sys.argv[1])\n"
        "for step in range(10**9):\n"
        "    sink.write(step, {'train/loss': step}); print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        reported = [int(child.stdout.readline()) for _ in range(50)]
        child.send_signal(signal.SIGKILL)
        reported += [int(line) for line in child.stdout.read().split("\n") if line]
    written = list(read_metrics(path))
    assert written[: len(reported)] == reported
    write_steps(path, reported[-1] + 1, reported[-1] + 3, resume_step=reported[-1])
    assert steps_of(path) == list(range(reported[-1] + 4))


def test_a_new_run_keeps_the_metrics_of_an_earlier_one_under_a_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    for offset in (0, 10, 20):
        write_steps(path, 1, 1, offset=offset)
    kept = [
        read_metrics(tmp_path / name)[1]["train/loss"]
        for name in ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    ]
    assert kept == [1, 11, 21]
    assert "metrics.1.jsonl" in caplog.text


def test_resume_without_the_file_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_steps(tmp_path / "metrics.jsonl", 4, 4, resume_step=3)
    assert steps_of(tmp_path / "metrics.jsonl") == [4]
    assert "missing" in caplog.text


def test_lines_of_one_step_are_merged_when_read(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(2, {"train/loss": 1.0})
    sink.write(2, {"eval/reward_mean": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == {2: {"train/loss": 1.0, "eval/reward_mean": 0.5}}


def test_a_full_disk_is_one_message_with_path_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    sink = JsonlSink(path)
    with pytest.raises(
        TrackingError, match=r"metrics\.jsonl: No space left on device\. Free space there.*--resume latest"
    ) as caught:
        sink.write(1, {"train/loss": 1.0})
    assert isinstance(caught.value, MilesWanError)


def test_a_line_the_disk_took_in_part_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"train/loss": 1.0})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(TrackingError, match="ulimit -f"):
            sink.write(2, {"train/loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    sink.write(2, {"train/loss": 2.0})
    assert steps_of(path) == [1, 2]


def test_tensorboard_on_a_full_disk_is_the_same_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # TensorBoard's own thread would print it too
    sink = TensorBoardSink(tmp_path / "tb")
    sink.write(1, {"train/loss": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = next((tmp_path / "tb").iterdir()).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(TrackingError, match=r"Cannot write .*tb: File too large"):
            sink.write(2, {"train/loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for make in (JsonlSink, TensorBoardSink):
        with pytest.raises(TrackingError, match=r"Cannot write .*a folder should be"):
            make(tmp_path / "file" / "metrics")


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def next_second() -> None:
    """Event files are read in the order of their names, which begin with whole seconds: two runs never share one."""
    time.sleep(1 - time.time() % 1 + 0.01)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in range(1, 7):
        first.write(step, {"train/loss": step, "train/kl": None})
    del first  # killed: never closed
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + b"torn record")
    next_second()
    resumed = TensorBoardSink(tmp_path, resume_step=4)
    for step in (5, 6, 7):
        resumed.write(step, {"train/loss": step + 100})
    resumed.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 105), (6, 106), (7, 107)]


def test_a_new_run_in_the_same_folder_hides_the_old_events(tmp_path: Path) -> None:
    for offset, last in ((0, 3), (100, 2)):
        sink = TensorBoardSink(tmp_path)
        for step in range(last + 1):
            sink.write(step, {"train/loss": step + offset})
        sink.close()
        next_second()
    assert scalars(tmp_path, "train/loss") == [(0, 100), (1, 101), (2, 102)]
