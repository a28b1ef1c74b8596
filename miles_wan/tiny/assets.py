"""The tiny assets together. In: a folder, a seed, sizes, whether the models have learnt anything. Out: checkpoint, reward models
and data set under it, with a manifest; the folder appears at once and complete, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_wan.errors import InputError
from miles_wan.tiny import clips, world
from miles_wan.tiny.checkpoint import DEFAULT_FAMILY, write_checkpoint
from miles_wan.tiny.clip import write_clip
from miles_wan.tiny.dataset import Filming, caption_words, check_sizes, write_dataset
from miles_wan.tiny.pickscore import write_pickscore
from miles_wan.wan.facts import family_named

logger = logging.getLogger(__name__)

MANIFEST = "tiny.json"
# Raised when the same seed no longer gives the same files.
FORMAT = 4


@dataclass(frozen=True)
class TinyPaths:
    """Where things lie: the video model, the models of the rewards pickscore and clip, two data files of prompts, and, of a
    trained world, two data files of clips."""

    model: Path
    reward: Path
    clip: Path
    train_jsonl: Path
    eval_jsonl: Path
    train_clips: Path | None = None
    eval_clips: Path | None = None


def make_tiny(
    out: Path,
    *,
    seed: int = 0,
    train_records: int = 64,
    eval_records: int = 64,
    family: str = DEFAULT_FAMILY,
    trained: bool = False,
) -> TinyPaths:
    """Write a tiny Wan2.2 checkpoint, a tiny PickScore, a tiny CLIP and a toy data set into ``out``.

    The same arguments give the same bytes. What is already there, complete and from the same arguments, is kept.

    Args:
        out: a folder that is absent, empty, or made by this function with these arguments.
        seed: of all weights and of the data.
        train_records: number of training records.
        eval_records: number of validation records; none of them is a training record.
        family: the released model that the checkpoint is a tiny one of.
        trained: let video model and PickScore learn the moving shapes first (minutes instead of seconds); the records of
            validation stay unseen.

    Returns:
        The paths, below ``out``.

    Raises:
        InputError: ``out`` holds anything else or cannot be written, a size is impossible, the family is unknown or has no
            trained world.
        MilesWanError: the supervised run of a trained world failed.
    """
    out = Path(out)
    check_sizes(train_records=train_records, eval_records=eval_records)
    engine_model_id = family_named(family).engine_model_id
    if trained and family != world.FAMILY:
        raise InputError(
            [f"--trained: the toy world is made for {world.FAMILY} only, not for {family}; leave one out."]
        )
    wanted: dict[str, Any] = {"format": FORMAT, "seed": seed, "family": family, "trained": trained}
    wanted |= {"train_records": train_records, "eval_records": eval_records}
    if _is_done(out, wanted):
        logger.info("%s is complete and is kept", out)
        return _paths(out, engine_model_id, trained=trained)
    try:
        _write(out, wanted)
    except OSError as error:
        raise InputError([f"cannot write {out}: {error}; choose a folder that can be written with --out."]) from error
    return _paths(out, engine_model_id, trained=trained)


def _paths(out: Path, engine_model_id: str, *, trained: bool) -> TinyPaths:
    return TinyPaths(
        model=out / engine_model_id.replace("-Diffusers", "-tiny"),
        reward=out / "PickScore-tiny",
        clip=out / "CLIP-tiny",
        train_jsonl=out / "data" / "train.jsonl",
        eval_jsonl=out / "data" / "validation.jsonl",
        train_clips=out / "clips" / "train.jsonl" if trained else None,
        eval_clips=out / "clips" / "validation.jsonl" if trained else None,
    )


def _write(out: Path, wanted: dict[str, Any]) -> None:
    """Write beside ``out``, then rename: an interrupted call leaves ``out`` as it was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        _write_parts(staging, wanted)
        staging.rename(out)
    except OSError:
        # Somebody else may have made the same folder meanwhile: then theirs is as good.
        if not _is_done(out, wanted):
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_parts(folder: Path, wanted: dict[str, Any]) -> None:
    family, seed, trained = str(wanted["family"]), wanted["seed"], bool(wanted["trained"])
    sizes = {name: wanted[name] for name in ("train_records", "eval_records")}
    paths = _paths(folder, family_named(family).engine_model_id, trained=trained)
    words = caption_words()
    write_dataset(
        paths.train_jsonl.parent,
        seed=seed,
        with_images=family_named(family).image_conditioning != "none",
        filming=clips.FILMING if trained else Filming(),
        **sizes,
    )
    write_clip(paths.clip, seed=seed)
    if trained:
        world.write_world(paths.model, paths.reward, folder / "clips", seed=seed, **sizes)
    else:
        write_checkpoint(paths.model, words, seed=seed, family=family)
        write_pickscore(paths.reward, words, seed=seed)
    manifest = {"made_by": "miles-wan tiny", **wanted, "sha256": _digests(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _is_done(out: Path, wanted: dict[str, Any]) -> bool:
    """True: ``out`` is what would be written. False: there is nothing there. Anything else is an ``InputError``."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    remedy = "choose another folder with --out, or delete this one."
    if not (out / MANIFEST).is_file():
        raise InputError([f"{out} is not empty and was not made by miles-wan tiny; {remedy}"])
    manifest = _read_manifest(out / MANIFEST, remedy=remedy)
    faults = [
        f"{out} was made with {name} = {manifest.get(name)}, not {value}; {remedy}"
        for name, value in wanted.items()
        if manifest.get(name) != value
    ]
    faults = faults or [f"{out}: {fault}; {remedy}" for fault in _damage(out, manifest["sha256"])]
    if faults:
        raise InputError(faults)
    return True


def _read_manifest(path: Path, *, remedy: str) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError([f"{path} is not a readable manifest ({error}); {remedy}"]) from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("sha256"), dict):
        raise InputError([f"{path} is not a manifest of miles-wan tiny; {remedy}"])
    return manifest


def _damage(out: Path, expected: dict[str, str]) -> list[str]:
    found = _digests(out)
    missing = [f"{name} is missing" for name in expected if name not in found]
    changed = [f"{name} was changed" for name in expected if name in found and found[name] != expected[name]]
    return missing + changed


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
