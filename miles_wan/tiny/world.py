"""The toy world: a tiny Wan2.2-TI2V whose parts have all learnt the moving shapes, so that a run on it means something. In: a
folder, a seed, the sizes of the data set. Out: checkpoint, PickScore, clips and data set, and how good each part is on scenes
that none of them ever saw. The transformer learns in ``miles-wan sft``, as a program of its own: this file knows no training.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from miles_wan.errors import MilesWanError
from miles_wan.tiny import checkpoint, pickscore
from miles_wan.tiny.clips import DIMMING, write_clips
from miles_wan.tiny.dataset import Scene, all_scenes, caption_words, split_scenes
from miles_wan.tiny.trained_pickscore import choice_accuracy, last_frames, train_pickscore
from miles_wan.tiny.trained_text import reading_accuracy, train_text_encoder
from miles_wan.tiny.trained_vae import reconstruction_psnr, train_vae
from miles_wan.wan.facts import family_named

logger = logging.getLogger(__name__)

FAMILY = "wan2.2-ti2v-5b"
REPORT = "world.json"
RECIPE = "toy_world"
# Width 192: a token is the 2 x 2 latents of 48 channels that the released model packs into one, too, and its noise has to pass.
HEADS, FFN_WIDTH, LAYERS = 8, 512, 4
THREADS = 2


@dataclass(frozen=True)
class Steps:
    """How long each part learns, in optimizer steps."""

    text_encoder: int = 400
    vae: int = 500
    pickscore: int = 400
    transformer: int = 400


STEPS = Steps()


def write_world(model: Path, reward: Path, clips: Path, *, seed: int, train_records: int, eval_records: int) -> None:
    """Train text encoder, VAE, PickScore and transformer, one after the other, and write them with their clips.

    Args:
        model: folder of the checkpoint.
        reward: folder of the PickScore.
        clips: folder of the video-caption data.
        seed: of all weights and draws.
        train_records: of the data set of this seed.
        eval_records: of it; what these scenes show is what the parts never see, and what they are measured on.

    Raises:
        MilesWanError: the supervised run failed; what it said is in the message.
    """
    scenes, unseen = world_scenes(seed, train_records=train_records, eval_records=eval_records)
    report: dict[str, Any] = {}
    words = caption_words()
    rng = random.Random(seed)

    started = time.monotonic()
    tokenizer = checkpoint.make_tokenizer(words)
    reader, _ = train_text_encoder(scenes, tokenizer, seed=seed, steps=STEPS.text_encoder)
    report["text_encoder"] = {"read_from_captions": reading_accuracy(reader, tokenizer, unseen)}
    started = _told("text encoder", started, report["text_encoder"])

    vae, losses = train_vae(scenes, seed=seed, steps=STEPS.vae)
    report["vae"] = {"steps": len(losses), "psnr_db": reconstruction_psnr(vae, unseen, seed=seed)}
    started = _told("VAE", started, report["vae"])

    clip_tokenizer = pickscore.make_tokenizer(words)
    judge, losses = train_pickscore(scenes, clip_tokenizer, seed=seed, steps=STEPS.pickscore)
    accuracy = choice_accuracy(judge, clip_tokenizer, unseen, last_frames(unseen, seed=seed))
    report["pickscore"] = {"steps": len(losses), "right_caption": accuracy}
    judge.save_pretrained(reward)
    pickscore.save_processor(reward, clip_tokenizer)
    started = _told("PickScore", started, report["pickscore"])

    train = write_clips(clips, "train", scenes, rng=rng, dimming=DIMMING)
    validation = write_clips(clips, "validation", unseen, rng=rng)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = checkpoint.make_transformer(heads=HEADS, ffn_width=FFN_WIDTH, layers=LAYERS)
    checkpoint.save_checkpoint(
        model,
        family_named(FAMILY),
        tokenizer=tokenizer,
        text_encoder=reader.encoder,
        vae=vae,
        experts=[transformer],
    )
    report["transformer"] = _learn_videos(model, train, validation, seed=seed)
    _told("transformer", started, report["transformer"])
    (model.parent / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def world_scenes(seed: int, *, train_records: int, eval_records: int) -> tuple[list[Scene], list[Scene]]:
    """All scenes but those of the validation records, and those: the same as in the data set of this seed and sizes."""
    _, unseen = split_scenes(random.Random(seed), train_records=train_records, eval_records=eval_records)
    return [scene for scene in all_scenes() if scene not in set(unseen)], unseen


def _learn_videos(model: Path, train: Path, validation: Path, *, seed: int) -> dict[str, Any]:
    """Give the checkpoint in ``model`` the transformer of a supervised run; the run's validation losses."""
    scratch = model.parent / "supervised"
    log = model.parent / "supervised.log"
    command = [
        *(sys.executable, "-m", "miles_wan.cli", "sft", "--recipe", RECIPE, "--model", str(model)),
        *("--data-jsonl", str(train), "--eval-data-jsonl", str(validation), "--seed", str(seed)),
        *("--num-steps", str(STEPS.transformer), "--eval-interval", str(STEPS.transformer)),
        *("--data.cache-dir", str(scratch / "cache"), "--output-dir", str(scratch / "run")),
    ]
    with log.open("wb") as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=_environment(), check=False
        ).returncode
    if code != 0:
        raise MilesWanError(f"the supervised run of the toy world ended with exit code {code}:\n{_tail(log)}")
    shutil.copytree(scratch / "run" / "model" / "transformer", model / "transformer", dirs_exist_ok=True)
    summary = json.loads((scratch / "run" / "summary.json").read_text(encoding="utf-8"))
    shutil.rmtree(scratch)
    log.unlink()
    return {name: summary[name] for name in ("steps", "total_parameters", "validation_before", "validation_after")}


def _environment() -> dict[str, str]:
    """Two threads, whatever the machine has: sums depend on how many share them."""
    return {**os.environ, "OMP_NUM_THREADS": str(THREADS)}


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _told(part: str, started: float, quality: object) -> float:
    """Log how long a part took and how good it is; the time now."""
    now = time.monotonic()
    logger.info("%s: %.0f s, %s", part, now - started, json.dumps(quality))
    return now
