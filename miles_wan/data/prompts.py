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
    lines = [_parse(number, text, path=path) for number, text in _numbered(path)]
    if not lines:
        raise InputError([f"{path}: holds no records; write one JSON object per line"])
    images = check_images(line.image for line in lines if line.image is not None)
    for line in lines:
        if line.image is not None and (fault := images[line.image].fault) is not None:
            line.faults.append(fault)
    if faults := [f"{path}:{line.number}: {fault}" for line in lines for fault in line.faults]:
        raise InputError(faults)
    return _without_duplicates(path, [_record(line, images, path=path) for line in lines])


def _numbered(path: Path) -> list[tuple[int, bytes]]:
    """(line number from 1, text) of every line that is not blank."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # reading a named pipe would wait for ever
            raise InputError([f"{path}: is no regular file; give a JSON lines file"])
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError([f"{path}: no such data file; check the path"]) from None
    except OSError as error:
        raise InputError([f"{path}: cannot be read ({error.strerror or error}); give a JSON lines file"]) from error
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _parse(number: int, text: bytes, *, path: Path) -> _Line:
    line = _Line(number)
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeated_keys)
    except UnicodeDecodeError as error:
        line.faults.append(f"is not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8")
        return line
    except (ValueError, RecursionError) as error:
        line.faults.append(f"is not a JSON object on one line ({error}); correct the line")
        return line
    if not isinstance(value, dict):
        line.faults.append(f'is a {_type_name(value)}, not a JSON object; write {{"input": ...}}')
        return line
    line.faults += _faults_of_keys(value)
    line.prompt = _prompt(value, line.faults)
    line.metadata = _metadata(value, line.faults)
    line.negative_prompt = _negative_prompt(value, line.metadata, line.faults)
    line.image = _image(line.metadata, path, line.faults)
    return line


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return value


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
        faults.append(f"input is a {_type_name(prompt)}; the prompt is a string")
        return ""
    if not prompt.strip():
        faults.append("input is empty; write the prompt or remove the line")
    faults += _faults_of_text(prompt, "input")
    return prompt


def _faults_of_text(text: str, name: str) -> list[str]:
    """A text that cannot be encoded or is cut by a C string would fail in the engine, in the middle of a run."""
    if "\0" in text:
        return [f"{name} holds a NUL character; remove it"]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return [f"{name} holds half of a surrogate pair at character {error.start}; correct the escape"]
    return []


def _metadata(value: Mapping[str, Any], faults: list[str]) -> Mapping[str, Any]:
    metadata = value.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        faults.append(f"metadata is a {_type_name(metadata)}; it is a JSON object")
        return {}
    return metadata


def _negative_prompt(value: Mapping[str, Any], metadata: Mapping[str, Any], faults: list[str]) -> str | None:
    given = [place["negative_prompt"] for place in (value, metadata) if place.get("negative_prompt") is not None]
    if wrong := [prompt for prompt in given if not isinstance(prompt, str)]:
        faults.append(f"negative_prompt is a {_type_name(wrong[0])}; it is a string")
        return None
    if len(set(given)) > 1:
        faults.append("negative_prompt differs from metadata.negative_prompt; keep one of them")
    for prompt in given:
        faults += _faults_of_text(prompt, "negative_prompt")
    return given[0] if given else None


def _image(metadata: Mapping[str, Any], path: Path, faults: list[str]) -> Path | None:
    image_path = metadata.get("image_path")
    if image_path is None:
        return None
    if not isinstance(image_path, str) or not image_path:
        what = "empty" if image_path == "" else f"a {_type_name(image_path)}"
        faults.append(f"metadata.image_path is {what}; give a path, or leave it out for text-to-video")
        return None
    try:
        resolved = (path.absolute().parent / Path(image_path).expanduser()).resolve()
        special = resolved.exists() and not resolved.is_file() and not resolved.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # link loops, unknown users, bytes no path can hold
        faults.append(f"metadata.image_path {image_path!r} is no usable path ({error}); correct it")
        return None
    if special:  # reading a named pipe would wait for ever
        faults.append(f"metadata.image_path {image_path!r} is no regular file; give an image file")
        return None
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


def _type_name(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
