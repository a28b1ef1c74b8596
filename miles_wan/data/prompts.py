"""Prompt records from a JSON lines file. In: a path. Out: a validated ``Dataset``, or one InputError with every fault
of the file. It knows no model and no order; the format is described in docs/data-format.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_wan.data.images import CheckedImage, check_images
from miles_wan.data.jsonl import JsonLine, read_lines, resolved_path, text_faults, type_name
from miles_wan.errors import InputError
from miles_wan.records import PromptRecord

logger = logging.getLogger(__name__)

_KEYS = ("input", "metadata", "negative_prompt")
# A warning names so many lines and counts the rest.
_NAMED = 5


@dataclass(frozen=True)
class Dataset:
    """The records of one file in the order of its lines. ``duplicates`` lines said what an earlier line had said
    (same prompt, negative prompt, image bytes and metadata); they are left out."""

    path: Path
    records: tuple[PromptRecord, ...]
    duplicates: int

    def __len__(self) -> int:
        return len(self.records)

    @property
    def has_images(self) -> bool:
        return any(record.image_path is not None for record in self.records)


@dataclass
class _Line:
    """One line while it is checked, with its faults."""

    number: int
    prompt: str = ""
    negative_prompt: str | None = None
    image: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def load_records(path: str | Path) -> Dataset:
    """Read and check a record file; every image is decoded once.

    Duplicate lines are left out with a counted warning. Raises InputError with all faults of the file, each with its
    line: no file, no records, broken JSON, unknown keys, wrong types, empty prompts, missing or unreadable images.
    """
    path = Path(path)
    lines = [_checked(line, path=path) for line in read_lines(path, example='{"input": ...}')]
    images = check_images(line.image for line in lines if line.image is not None)
    for line in lines:
        if line.image is not None and (fault := images[line.image].fault) is not None:
            line.faults.append(fault)
    if faults := [f"{path}:{line.number}: {fault}" for line in lines for fault in line.faults]:
        raise InputError(faults)
    return _without_duplicates(path, [_record(line, images, path=path) for line in lines])


def _checked(read: JsonLine, *, path: Path) -> _Line:
    line, value = _Line(read.number), read.value
    if read.fault is not None:
        line.faults.append(read.fault)
        return line
    line.faults += _faults_of_keys(value)
    line.prompt = _prompt(value, line.faults)
    line.metadata = _metadata(value, line.faults)
    line.negative_prompt = _negative_prompt(value, line.metadata, line.faults)
    line.image = _image(line.metadata, path, line.faults)
    return line


def _faults_of_keys(value: Mapping[str, Any]) -> list[str]:
    unknown = [key for key in value if key not in _KEYS]
    return [
        f"unknown key {key!r}; the keys are {', '.join(_KEYS)}, anything else goes into metadata" for key in unknown
    ]


def _prompt(value: Mapping[str, Any], faults: list[str]) -> str:
    if "input" not in value:
        faults.append('has no input; write the prompt as "input"')
        return ""
    prompt = value["input"]
    if not isinstance(prompt, str):
        faults.append(f"input is a {type_name(prompt)}; the prompt is a string")
        return ""
    if not prompt.strip():
        faults.append("input is empty; write the prompt or remove the line")
    faults += text_faults(prompt, "input")
    return prompt


def _metadata(value: Mapping[str, Any], faults: list[str]) -> Mapping[str, Any]:
    metadata = value.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        faults.append(f"metadata is a {type_name(metadata)}; it is a JSON object")
        return {}
    return metadata


def _negative_prompt(value: Mapping[str, Any], metadata: Mapping[str, Any], faults: list[str]) -> str | None:
    given = [place["negative_prompt"] for place in (value, metadata) if place.get("negative_prompt") is not None]
    if wrong := [prompt for prompt in given if not isinstance(prompt, str)]:
        faults.append(f"negative_prompt is a {type_name(wrong[0])}; it is a string")
        return None
    if len(set(given)) > 1:
        faults.append("negative_prompt differs from metadata.negative_prompt; keep one of them")
    for prompt in given:
        faults += text_faults(prompt, "negative_prompt")
    return given[0] if given else None


def _image(metadata: Mapping[str, Any], path: Path, faults: list[str]) -> Path | None:
    image_path = metadata.get("image_path")
    if image_path is None:
        return None
    if not isinstance(image_path, str) or not image_path:
        what = "empty" if image_path == "" else f"a {type_name(image_path)}"
        faults.append(f"metadata.image_path is {what}; give a path, or leave it out for text-to-video")
        return None
    resolved, fault = resolved_path(image_path, "metadata.image_path", beside=path, what="an image file")
    if fault is not None:
        faults.append(fault)
    return resolved


def _record(line: _Line, images: Mapping[Path, CheckedImage], *, path: Path) -> PromptRecord:
    image_digest = images[line.image].sha256 if line.image is not None else None
    identity = json.dumps([line.prompt, line.negative_prompt, image_digest])
    return PromptRecord(
        record_id=hashlib.sha256(identity.encode()).hexdigest()[:16],
        prompt=line.prompt,
        image_path=str(line.image) if line.image is not None else None,
        negative_prompt=line.negative_prompt,
        metadata=line.metadata,
        source=f"{path}:{line.number}",
    )


def _without_duplicates(path: Path, records: list[PromptRecord]) -> Dataset:
    first: dict[str, PromptRecord] = {}
    repeated: list[str] = []
    for record in records:
        # Two files with the same pixels are one image; other metadata may steer a reward and makes another record.
        others = {key: value for key, value in record.metadata.items() if key != "image_path"}
        said = json.dumps([record.record_id, others], sort_keys=True)
        if said in first:
            repeated.append(f"{record.source} repeats {first[said].source}")
        else:
            first[said] = record
    if repeated:
        more = f" and {len(repeated) - _NAMED} more" if len(repeated) > _NAMED else ""
        named = ", ".join(repeated[:_NAMED])
        logger.warning("%s: %d duplicate records are left out: %s%s", path, len(repeated), named, more)
    return Dataset(path, tuple(first.values()), len(repeated))
