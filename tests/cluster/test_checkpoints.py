"""A checkpoint is complete or it is not there, wherever the run is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_wan.cluster.checkpoints import STATE_FILE, CheckpointStore
from miles_wan.errors import CheckpointError, MilesWanError


def shards(folder: str) -> None:
    for rank in range(2):
        (Path(folder) / f"__{rank}_0.distcp").write_text(f"shard {rank}")


def store(tmp_path: Path, *, keep_last: int = 2) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=keep_last)


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_a_saved_checkpoint_is_the_latest_with_its_state_and_shards(tmp_path):
    kept = store(tmp_path)
    assert kept.latest() is None
    saved = kept.save(10, {"finished": 10, "policy_version": 10}, shards)
    path, state = kept.latest()
    assert path == saved == tmp_path / "checkpoints" / "rollout_000010"
    assert state == {"finished": 10, "policy_version": 10}
    assert sorted(file.name for file in path.iterdir()) == ["__0_0.distcp", "__1_0.distcp", STATE_FILE]
    assert names(tmp_path) == ["rollout_000010"]


def test_only_the_last_ones_are_kept(tmp_path):
    kept = store(tmp_path, keep_last=2)
    for finished in (2, 4, 10, 100):
        kept.save(finished, {"finished": finished}, shards)
        assert kept.latest()[1] == {"finished": finished}
    assert names(tmp_path) == ["rollout_000010", "rollout_000100"]


def test_shards_are_written_before_the_state_and_outside_the_final_folder(tmp_path):
    seen = []

    def watch(folder: str) -> None:
        seen.append((Path(folder).name, [path.name for path in Path(folder).iterdir()], names(tmp_path)))

    store(tmp_path).save(3, {}, watch)
    assert seen == [("partial-rollout_000003", [], ["partial-rollout_000003"])]


def test_an_unfinished_checkpoint_never_loads_and_is_removed(tmp_path):
    kept = store(tmp_path)
    kept.save(1, {"finished": 1}, shards)
    partial = tmp_path / "checkpoints" / "partial-rollout_000002"
    partial.mkdir()
    (partial / STATE_FILE).write_text('{"finished": 2}')  # everything but the commit
    (tmp_path / "checkpoints" / "partial-file").write_text("")
    bare = tmp_path / "checkpoints" / "rollout_000003"
    bare.mkdir()  # no state: not ours, or deleted halfway
    assert kept.latest()[1] == {"finished": 1}
    kept.clean()
    assert names(tmp_path) == ["rollout_000001", "rollout_000003"]
    kept.save(2, {"finished": 2}, shards)
    assert kept.latest()[1] == {"finished": 2}


def full_disk(folder: str) -> None:
    raise OSError(28, "No space left on device")


def state_in_the_way(folder: str) -> None:
    shards(folder)
    (Path(folder) / STATE_FILE).mkdir()  # the shards are there, and the state cannot be written


@pytest.mark.parametrize(
    ("write", "reason"), [(full_disk, "No space left on device"), (state_in_the_way, "Is a directory")]
)
def test_a_write_error_leaves_the_earlier_ones_whole(tmp_path, write, reason):
    kept = store(tmp_path, keep_last=1)
    kept.save(1, {"finished": 1}, shards)
    with pytest.raises(MilesWanError, match=rf"{reason}.*--resume latest"):
        kept.save(2, {"finished": 2}, write)
    path, state = kept.latest()
    assert state == {"finished": 1}
    assert (path / "__1_0.distcp").read_text() == "shard 1"


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    kept = store(tmp_path, keep_last=1)
    kept.save(1, {"finished": 1}, shards)
    remove = shutil.rmtree

    def refuse(path, *rest, **options):
        if Path(path).name == "rollout_000001":
            raise PermissionError(13, "Permission denied")
        remove(path, *rest, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    kept.save(2, {"finished": 2}, shards)
    assert kept.latest()[1] == {"finished": 2}
    assert "rollout_000001 could not be removed" in caplog.text


def test_the_ranks_own_error_passes_through_and_commits_nothing(tmp_path):
    kept = store(tmp_path)

    def fail(_: str) -> None:
        raise CheckpointError("rank 1 could not write")

    with pytest.raises(CheckpointError, match="rank 1 could not write"):
        kept.save(2, {}, fail)
    assert kept.latest() is None


def test_a_state_that_cannot_be_read_is_an_error_that_names_it(tmp_path):
    kept = store(tmp_path)
    path = kept.save(5, {"finished": 5}, shards)
    (path / STATE_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"rollout_000005/state\.json cannot be read .* remove this folder"):
        kept.latest()


KILLED = """
import sys
from pathlib import Path
from miles_wan.cluster.checkpoints import CheckpointStore
from miles_wan.faults import reach

def shards(folder):
    for rank in range(2):
        reach(f"checkpoint/before_shard_{rank}", 2)
        (Path(folder) / f"__{rank}_0.distcp").write_text(f"shard {rank}")

store = CheckpointStore(Path(sys.argv[1]), keep_last=1)
store.save(1, {"finished": 1}, lambda folder: (Path(folder) / "__0_0.distcp").write_text("first"))
store.save(2, {"finished": 2}, shards)
"""


@pytest.mark.parametrize(
    ("point", "finished"),
    [
        ("checkpoint/before_shard_0", 1),
        ("checkpoint/before_shard_1", 1),
        ("checkpoint/before_state", 1),
        ("checkpoint/before_commit", 1),
        ("checkpoint/after_commit", 2),
    ],
)
def test_killed_at_any_moment_the_newest_committed_one_is_whole(tmp_path, point, finished):
    directory, reached = tmp_path / "checkpoints", tmp_path / "reached"
    environment = {
        "MILES_WAN_STOP_AT": f"{point}@2",
        "MILES_WAN_STOP_FILE": str(reached),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(directory)], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not reached.exists():
            assert process.poll() is None, "it ended before the point"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    kept = store(tmp_path, keep_last=1)
    path, state = kept.latest()
    assert state == {"finished": finished} == json.loads((path / STATE_FILE).read_text())
    assert (path / "__0_0.distcp").read_text() == ("first" if finished == 1 else "shard 0")
    kept.clean()
    kept.save(3, {"finished": 3}, shards)
    assert names(tmp_path) == ["rollout_000003"]
