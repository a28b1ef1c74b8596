"""A file is replaced as a whole or not at all."""

import os
from pathlib import Path

import pytest

from miles_wan.tracking.writing import TrackingError, replacing, write_failure


def test_a_reader_of_the_old_file_keeps_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with path.open() as reader:
        with replacing(path) as temporary:
            temporary.write_text("new and longer")
            assert path.read_text() == "old"
        assert reader.read() == "old"
    assert path.read_text() == "new and longer"


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyError("the writer's own fault")

    with pytest.raises(KeyError, match="own fault"):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_missing_folders_are_made(tmp_path: Path) -> None:
    with replacing(tmp_path / "a" / "b" / "c.txt", durable=False) as temporary:
        temporary.write_text("x")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "x"


def test_the_message_of_a_refused_write_has_path_cause_and_remedy() -> None:
    error = write_failure(Path("/data/run/metrics.jsonl"), OSError(28, "No space left on device"))
    assert isinstance(error, TrackingError)
    assert str(error) == (
        "Cannot write /data/run/metrics.jsonl: No space left on device. Free space there, then continue with "
        "--resume latest; what was written before is intact."
    )
