"""Settings are filled in from the checkpoint, and what contradicts it, or itself, is refused with every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_wan.configuration import all_fields, dump_config, recipe_names
from miles_wan.errors import InputError
from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.launch import read_flags
from miles_wan.supervised.settings import plan, read_settings, recipe_path
from miles_wan.wan.facts import FAMILIES
from miles_wan.wan.family import ModelFolder

NEEDED = {"model.path": "m", "data.train": "t"}


def folder(name: str) -> ModelFolder:
    family = FAMILIES[name]
    return ModelFolder(
        path=Path("m"),
        family=family,
        pipeline_class=family.pipeline_classes[0],
        expand_timesteps=family.expand_timesteps,
        boundary_ratio=family.boundary_ratio,
        transformer=family.transformer,
        vae={},
    )


def config(**changes: Any) -> SftConfig:
    return read_settings([], {**NEEDED, **{key.replace("__", "."): value for key, value in changes.items()}})


def faults(**changes: Any) -> str:
    with pytest.raises(InputError) as raised:
        config(**changes)
    return "\n".join(raised.value.faults)


@pytest.mark.parametrize(
    ("name", "size", "frames", "shift", "share"),
    [
        ("wan2.2-ti2v-5b", (1280, 704), 121, 5.0, 0.5),
        ("wan2.2-t2v-a14b", (1280, 720), 81, 12.0, 0.0),
        ("wan2.2-i2v-a14b", (1280, 720), 81, 5.0, 1.0),
    ],
)
def test_what_is_left_out_is_the_models(name: str, size: Any, frames: int, shift: float, share: float) -> None:
    found = plan(config(), folder(name))
    assert found.clip.sizes == (size,)
    assert (found.clip.num_frames, found.shift, found.image_share) == (frames, shift, share)
    assert found.trained == FAMILIES[name].experts


def test_what_the_model_cannot_do_is_refused_together() -> None:
    settings = config(data__buckets=[[100, 100], [832, 480]], data__num_frames=80, data__image_share=0.5)
    with pytest.raises(InputError) as raised:
        plan(settings, folder("wan2.2-t2v-a14b"))
    assert len(raised.value.faults) == 3
    text = "\n".join(raised.value.faults)
    for part in ("data.buckets: 100x100", "77 and 81", "never takes a first image"):
        assert part in text
    single = config(model__train_experts="high", timesteps__high_share=0.5)
    with pytest.raises(InputError, match="there is no expert of high noise"):
        plan(single, folder("wan2.2-ti2v-5b"))
    with pytest.raises(InputError, match=r"high_share is 0\.5, but 1 expert"):
        plan(single, folder("wan2.2-t2v-a14b"))


def test_fields_that_contradict_each_other_are_refused_together() -> None:
    text = faults(
        training__batch_size=7,
        training__dp_size=2,
        training__method="full",
        model__init_adapter="a",
        eval__interval=5,
        eval__timesteps=[0, 2000],
        eval__quantiles=[2.0],
        data__buckets=[[64, 64]],
        data__width=64,
    )
    for part in (
        "batch_size 7",
        "trains no adapter",
        "data.eval is not given",
        "[0.0, 2000.0]",
        "[2.0]",
        "takes the place",
    ):
        assert part in text
    assert "data.framez: no such field; did you mean" in faults(data__framez=3)


@pytest.mark.parametrize("name", recipe_names("sft"))
def test_every_recipe_is_whole(name: str, tmp_path: Path) -> None:
    settings = read_settings([recipe_path(name)], {**NEEDED, "data.eval": "e"})
    path = tmp_path / "config.yaml"
    dump_config(settings, path)
    assert read_settings([path], {}) == settings


def test_torchrun_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--recipe", "tiny", "--model", "m", "--data-jsonl", "t", "--eval-interval", "0", "--timesteps.shift", "3"]
    assert read_flags([*flags, "--num-gpus", "4"]).training.dp_size == 4
    monkeypatch.setenv("WORLD_SIZE", "8")
    settings = read_flags(flags)
    assert (settings.training.dp_size, settings.timesteps.shift) == (8, 3.0)
    with pytest.raises(InputError, match="--framez: no such flag"):
        read_flags([*flags, "--framez", "3"])


def test_an_unknown_recipe_names_those_there_are() -> None:
    with pytest.raises(InputError, match=r"no such recipe; recipes are .*tiny"):
        recipe_path("nothing")
    assert "timesteps.high_share" in all_fields(SftConfig)
