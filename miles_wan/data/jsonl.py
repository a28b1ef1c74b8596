"""JSON lines files, read strictly. In: a path. Out: the object of every line, or what is wrong with the line. It knows no
key and no record; a file that cannot be read at all is an InputError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_wan.errors import InputError


@dataclass(frozen=True)
class JsonLine:
    """One line that is not blank: its ``number`` from 1, and its object, or the ``fault`` why there is none."""

    number: int
    value: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None


def read_lines(path: Path, *, example: str) -> list[JsonLine]:
    """Every line of a JSON lines file.

    Args:
        example: a line as it should be, for messages.

    Raises:
        InputError: no such file, not readable, or no lines.
    """
    lines = [_parse(number, text, example=example) for number, text in _numbered(path)]
    if not lines:
        raise InputError([f"{path}: holds no records; write one JSON object per line"])
    return lines


def type_name(value: Any) -> str:
    """The type of a JSON value, as JSON calls it."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def text_faults(text: str, name: str) -> list[str]:
    """A text that cannot be encoded or is cut by a C string would fail in the middle of a run."""
    if "\0" in text:
        return [f"{name} holds a NUL character; remove it"]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return [f"{name} holds half of a surrogate pair at character {error.start}; correct the escape"]
    return []


def resolved_path(written: str, name: str, *, beside: Path, what: str) -> tuple[Path | None, str | None]:
    """(path, None), or (None, fault) of a path as it stands in the file ``beside`` which relative ones start.

    Args:
        name: the key, for the message.
        what: what should be there, such as "image file".
    """
    try:
        resolved = (beside.absolute().parent / Path(written).expanduser()).resolve()
        special = resolved.exists() and not resolved.is_file() and not resolved.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # link loops, unknown users, bytes no path can hold
        return None, f"{name} {written!r} is no usable path ({error}); correct it"
    if special:  # reading a named pipe would wait for ever
        return None, f"{name} {written!r} is no regular file; give {what}"
    return resolved, None


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


def _parse(number: int, text: bytes, *, example: str) -> JsonLine:
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeated_keys)
    except UnicodeDecodeError as error:
        return JsonLine(number, fault=f"is not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        return JsonLine(number, fault=f"is not a JSON object on one line ({error}); correct the line")
    if not isinstance(value, dict):
        return JsonLine(number, fault=f"is a {type_name(value)}, not a JSON object; write {example}")
    return JsonLine(number, value)


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return value
