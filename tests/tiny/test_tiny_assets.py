"""make_tiny writes the same bytes for the same arguments, all or nothing, and never over somebody else's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_wan.errors import InputError
from miles_wan.tiny import TinyPaths, assets, make_tiny
from miles_wan.tiny.checkpoint import write_checkpoint
from miles_wan.tiny.clip import write_clip
from miles_wan.tiny.dataset import caption_words
from miles_wan.tiny.pickscore import write_pickscore


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_seed_gives_the_same_bytes(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    again = make_tiny(tmp_path / "again")
    assert contents(again.model.parent) == contents(tiny_paths.model.parent)


def test_another_seed_gives_other_weights_and_other_data(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    first, other = contents(tiny_paths.model.parent), contents(make_tiny(tmp_path / "other", seed=1).model.parent)
    assert set(first) == set(other)
    same = {name for name in first if first[name] == other[name]}
    assert not {name for name in same if name.endswith((".safetensors", ".jsonl", ".png"))}


def test_the_random_state_of_the_caller_is_left_alone(tmp_path: Path) -> None:
    import torch

    before = torch.get_rng_state()
    make_tiny(tmp_path / "tiny", train_records=1, eval_records=1)
    assert torch.equal(before, torch.get_rng_state())


def test_the_weights_of_one_part_do_not_depend_on_the_others(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    """A part more must not change what is known of a seed."""
    write_clip(tmp_path / "clip", seed=0)
    assert contents(tmp_path / "clip") == contents(tiny_paths.clip)
    write_pickscore(tmp_path / "pickscore", caption_words(), seed=0)
    assert contents(tmp_path / "pickscore") == contents(tiny_paths.reward)
    write_checkpoint(tmp_path / "model", caption_words(), seed=0)
    assert contents(tmp_path / "model") == contents(tiny_paths.model)


def test_what_is_complete_is_kept(tmp_path: Path) -> None:
    paths = make_tiny(tmp_path / "tiny", train_records=2, eval_records=2)
    before = {path: path.stat().st_mtime_ns for path in paths.model.parent.rglob("*")}
    assert make_tiny(tmp_path / "tiny", train_records=2, eval_records=2) == paths
    assert {path: path.stat().st_mtime_ns for path in paths.model.parent.rglob("*")} == before


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert make_tiny(tmp_path / "tiny", train_records=1, eval_records=1).train_jsonl.is_file()


def test_a_foreign_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not made by miles-wan tiny"):
        make_tiny(tmp_path)
    assert contents(tmp_path) == {"thesis.txt": b"mine"}


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("mine")
    with pytest.raises(InputError, match="tiny"):
        make_tiny(tmp_path / "tiny")
    with pytest.raises(InputError, match="cannot write"):
        make_tiny(tmp_path / "tiny" / "below")


def test_other_arguments_are_refused_all_at_once(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", train_records=2, eval_records=2)
    with pytest.raises(InputError) as caught:
        make_tiny(tmp_path / "tiny", seed=5, train_records=3, eval_records=2)
    assert len(caught.value.faults) == 2
    assert "seed = 0, not 5" in caught.value.faults[0]
    assert "train_records = 2, not 3" in caught.value.faults[1]


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    paths = make_tiny(tmp_path / "tiny", train_records=2, eval_records=2)
    paths.train_jsonl.write_text("")
    (paths.model / "model_index.json").unlink()
    with pytest.raises(InputError) as caught:
        make_tiny(tmp_path / "tiny", train_records=2, eval_records=2)
    assert "model_index.json is missing" in str(caught.value)
    assert "train.jsonl was changed" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"sha256": 3}'])
def test_a_broken_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / assets.MANIFEST).write_text(text)
    with pytest.raises(InputError, match="manifest"):
        make_tiny(tmp_path)


def test_an_interrupted_call_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(assets, "write_dataset", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_tiny(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"train_records": 0}, "train_records is 0"),
        ({"eval_records": -1}, "eval_records is -1"),
        ({"train_records": 10**6}, "only 672 different scenes"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_written(
    tmp_path: Path, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_tiny(tmp_path / "tiny", **sizes)
    assert list(tmp_path.iterdir()) == []
