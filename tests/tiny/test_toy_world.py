"""The toy world: every part learns, from the seed alone, and the scenes of validation stay unseen by all of them."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from miles_wan.errors import InputError, MilesWanError
from miles_wan.tiny import TinyPaths, checkpoint, make_tiny, pickscore, world
from miles_wan.tiny.clips import FILMING, NUM_FRAMES
from miles_wan.tiny.dataset import Scene, all_scenes, caption_words, draw_motion, split_scenes
from miles_wan.tiny.trained_pickscore import choice_accuracy, last_frames, train_pickscore
from miles_wan.tiny.trained_text import reading_accuracy, train_text_encoder
from miles_wan.tiny.trained_vae import reconstruction_psnr, train_vae

SIZES = {"train_records": 3, "eval_records": 4}


@pytest.fixture(scope="module")
def short_world(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    return make_short_world(tmp_path_factory.mktemp("world") / "tiny")


def make_short_world(out: Path) -> TinyPaths:
    """A world like the real one, but with a few steps on a few scenes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "STEPS", world.Steps(text_encoder=3, vae=2, pickscore=1, transformer=2))
        patch.setattr(world, "all_scenes", lambda: all_scenes()[:24])
        return make_tiny(out, trained=True, **SIZES)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def captions(path: Path | None) -> set[str]:
    assert path is not None
    return {json.loads(line)["input"] for line in path.read_text().splitlines()}


def scenes_of(seed: int, *, unseen: int = 32) -> tuple[Sequence[Scene], Sequence[Scene]]:
    return split_scenes(random.Random(seed), train_records=len(all_scenes()) - unseen, eval_records=unseen)


def test_the_same_seed_gives_the_same_bytes(short_world: TinyPaths, tmp_path: Path) -> None:
    again = make_short_world(tmp_path / "again")
    first, second = contents(short_world.model.parent), contents(again.model.parent)
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []


def test_a_finished_world_is_kept(short_world: TinyPaths) -> None:
    folder = short_world.model.parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert make_short_world(folder) == short_world
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_transformer_is_the_one_of_the_supervised_run(short_world: TinyPaths) -> None:
    report = json.loads((short_world.model.parent / world.REPORT).read_text())
    assert report["transformer"]["steps"] == 2
    assert report["transformer"]["validation_after"]["all"] < report["transformer"]["validation_before"]["all"]
    torch.manual_seed(0)
    untrained = checkpoint.make_transformer(heads=world.HEADS, ffn_width=world.FFN_WIDTH, layers=world.LAYERS)
    loaded = type(untrained).from_pretrained(short_world.model / "transformer")
    moved = [
        name for name, value in untrained.state_dict().items() if not torch.equal(value, loaded.state_dict()[name])
    ]
    assert len(moved) > len(untrained.state_dict()) / 2
    assert {path.name for path in short_world.model.parent.iterdir()} == {
        *("CLIP-tiny", "PickScore-tiny", "Wan2.2-TI2V-5B-tiny", "clips", "data", "tiny.json", "world.json")
    }


def test_no_part_sees_what_validation_shows(short_world: TinyPaths) -> None:
    validation = captions(short_world.eval_jsonl)
    assert captions(short_world.eval_clips) == validation
    assert not captions(short_world.train_clips) & validation
    scenes, unseen = world.world_scenes(0, train_records=64, eval_records=64)
    assert len(scenes) == 672 - 64
    assert not {scene.caption for scene in scenes} & {scene.caption for scene in unseen}


def test_only_the_family_of_the_toy_world_can_be_trained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"wan2\.2-ti2v-5b only, not for wan2\.2-i2v-a14b"):
        make_tiny(tmp_path / "tiny", trained=True, family="wan2.2-i2v-a14b")


def test_a_trained_and_an_untrained_world_are_not_mixed_up(short_world: TinyPaths) -> None:
    with pytest.raises(InputError, match="was made with trained = True, not False"):
        make_tiny(short_world.model.parent, **SIZES)


def test_a_supervised_run_that_fails_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "RECIPE", "no_such_recipe")
    with pytest.raises(MilesWanError, match=r"exit code 2(.|\n)*no_such_recipe"):
        make_short_world(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_world_that_is_ended_by_sigterm_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "miles_wan.cli", "tiny", "--trained", "--out", str(tmp_path / "tiny")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        for _ in range(600):  # a minute for the first part
            if list(tmp_path.glob(".tiny.*.partial/data/validation.jsonl")):
                break
            time.sleep(0.1)
        assert list(tmp_path.iterdir())
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_the_vae_learns_and_knows_its_latents() -> None:
    scenes, unseen = scenes_of(0)
    before = torch.get_rng_state()
    vae, losses = train_vae(scenes, seed=0, steps=25)
    assert torch.equal(before, torch.get_rng_state())
    grey = math.log10(4 / losses[0]) * 10  # what the first steps' error is in decibels
    assert reconstruction_psnr(vae, unseen, seed=1) > grey + 5
    latents = encode(vae, scenes[:64])
    mean, std = (torch.tensor(vae.config[name]) for name in ("latents_mean", "latents_std"))
    assert torch.allclose(latents.mean(dim=(0, 2, 3, 4)), mean, atol=0.25 * float(std.mean()))
    assert torch.allclose(latents.std(dim=(0, 2, 3, 4)) / std, torch.ones(48), atol=0.3)


def encode(vae: AutoencoderKLWan, scenes: Sequence[Scene]) -> torch.Tensor:
    rng = random.Random(7)
    clips = [
        torch.from_numpy(draw_motion(scene, rng, FILMING).clip(NUM_FRAMES, dimming=rng.random())) for scene in scenes
    ]
    pixels = torch.stack(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    with torch.no_grad():
        return vae.encode(pixels).latent_dist.mode()


def test_the_pickscore_tells_unseen_captions_apart() -> None:
    scenes, unseen = scenes_of(0)
    tokenizer = pickscore.make_tokenizer(caption_words())
    model, _ = train_pickscore(scenes, tokenizer, seed=0, steps=60)
    right = choice_accuracy(model, tokenizer, unseen, last_frames(unseen, seed=1))
    assert float(model.logit_scale.exp()) == pytest.approx(100.0, rel=1e-6)
    assert right["colour"] > 0.5  # of seven: a coin with seven sides gives 0.14
    # With the frames of other scenes the same captions are right by chance only.
    frames = last_frames(unseen, seed=1)
    assert choice_accuracy(model, tokenizer, unseen, [*frames[1:], frames[0]])["colour"] < 0.4


def test_the_text_encoder_tells_unseen_captions_apart() -> None:
    scenes, unseen = scenes_of(0)
    tokenizer = checkpoint.make_tokenizer(caption_words())
    reader, losses = train_text_encoder(scenes, tokenizer, seed=0, steps=world.STEPS.text_encoder)
    assert losses[-1] < losses[0] / 4
    assert min(reading_accuracy(reader, tokenizer, unseen).values()) > 0.9
