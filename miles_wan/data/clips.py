"""Video-caption records from a JSON lines file. In: a path. Out: the records that can be trained on so far, and every other
one by name; a file in another format is an InputError. It opens no video and knows no model; docs/supervised.md has the
format.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_wan.data.images import CheckedImage, check_images
from miles_wan.data.jsonl import JsonLine, read_lines, resolved_path, text_faults, type_name
from miles_wan.errors import InputError

_KEYS = ("video_path", "input", "metadata")
_EXAMPLE = '{"video_path": ..., "input": ...}'

# Why a record cannot be trained on, and what is worth knowing of one that can. Metrics and summaries count them by these.
BAD_KINDS: Mapping[str, str] = {
    "no_caption": "captions missing or empty",
    "bad_caption": "captions that no encoder takes",
    "no_video_path": "lines without a video",
    "missing_video": "videos that do not exist or are no files",
    "empty_video": "videos of zero bytes",
    "bad_image": "first frames that cannot be read",
    "unreadable": "videos that cannot be decoded",
    "no_video_stream": "files without a video stream",
    "odd_rotation": "videos turned by something else than quarter turns",
    "too_few_frames": "videos with too few frames",
}
NOTE_KINDS: Mapping[str, str] = {
    "duplicate": "lines that repeat an earlier one (left out)",
    "other_language": "captions in another script than most (kept)",
    "turned": "videos turned upright by their rotation",
    "variable_frame_rate": "videos of variable frame rate, taken by their time stamps",
    "repeated_frames": "videos slower than data.fps, whose frames repeat",
    "enlarged": "videos smaller than the working size",
}


@dataclass(frozen=True)
class ClipRecord:
    """One clip: ``caption``, absolute ``video_path``, and the given first frame if it is another picture than the video's
    own. ``image_sha256`` is of its bytes. ``source`` is the place in the data file."""

    caption: str
    video_path: str
    source: str
    image_path: str | None = None
    image_sha256: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """Something about one record: its ``source``, the ``kind`` (of BAD_KINDS or NOTE_KINDS) and a sentence."""

    source: str
    kind: str
    text: str


@dataclass(frozen=True)
class ClipSet:
    """The records of one file in the order of its lines. ``bad`` names every line left out, ``notes`` what is worth knowing
    of the others."""

    path: Path
    records: tuple[ClipRecord, ...]
    bad: tuple[Finding, ...]
    notes: tuple[Finding, ...]

    def __len__(self) -> int:
        return len(self.records)


def load_clips(path: str | Path) -> ClipSet:
    """Read a file of clips and check all that is cheap: lines, captions, first frames, and whether the videos exist.

    Raises:
        InputError: the file cannot be read or is not in the format (each line named), or none of its records can be used
            (the fault of each).
    """
    path = Path(path)
    lines = [_checked(line, path=path) for line in read_lines(path, example=_EXAMPLE)]
    if faults := [f"{path}:{line.number}: {fault}" for line in lines for fault in line.faults]:
        raise InputError(faults)
    images = check_images(line.image for line in lines if line.image is not None)
    for line in lines:
        if line.image is not None and (fault := images[line.image].fault) is not None:
            line.bad.append(("bad_image", fault))
    bad = tuple(Finding(f"{path}:{line.number}", kind, text) for line in lines for kind, text in line.bad)
    records = [_record(line, images, path=path) for line in lines if not line.bad]
    if not records:
        raise InputError([f"{finding.source}: {finding.text}" for finding in bad])
    kept, repeated = _without_duplicates(records)
    return ClipSet(path, tuple(kept), bad, (*repeated, *_foreign(kept)))


def summarised(findings: Sequence[Finding], *, named: int = 5) -> list[str]:
    """One sentence per kind: how many, and the first few by name."""
    sentences = []
    for kind, count in Counter(finding.kind for finding in findings).items():
        meaning = {**BAD_KINDS, **NOTE_KINDS}[kind]
        first = [f"{finding.source}: {finding.text}" for finding in findings if finding.kind == kind][:named]
        more = f"; and {count - named} more" if count > named else ""
        sentences.append(f"{kind}: {count} {meaning}: {'; '.join(first)}{more}")
    return sentences


def counted(findings: Sequence[Finding]) -> dict[str, int]:
    """Kind -> how many records."""
    return dict(Counter(finding.kind for finding in findings))


@dataclass
class _Line:
    """One line while it is checked: ``faults`` of its form, and ``bad`` (kind, sentence) of what it names."""

    number: int
    caption: str = ""
    video: Path | None = None
    image: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)


def _checked(read: JsonLine, *, path: Path) -> _Line:
    line, value = _Line(read.number), read.value
    if read.fault is not None:
        line.faults.append(read.fault)
        return line
    line.faults += [
        f"unknown key {key!r}; the keys are {', '.join(_KEYS)}, anything else goes into metadata"
        for key in value
        if key not in _KEYS
    ]
    metadata = value.get("metadata")
    if isinstance(metadata, dict):
        line.metadata = metadata
    elif metadata is not None:
        line.faults.append(f"metadata is a {type_name(metadata)}; it is a JSON object")
    _check_caption(line, value)
    _check_video(line, value, path=path)
    line.image = _image(line, path=path)
    return line


def _check_caption(line: _Line, value: Mapping[str, Any]) -> None:
    caption = value.get("input")
    if caption is None:
        line.bad.append(("no_caption", 'has no input; write the caption as "input"'))
    elif not isinstance(caption, str):
        line.faults.append(f"input is a {type_name(caption)}; the caption is a string")
    elif not caption.strip():
        line.bad.append(("no_caption", "input is empty; write the caption or remove the line"))
    else:
        line.caption = caption
        line.bad += [("bad_caption", fault) for fault in text_faults(caption, "input")]


def _check_video(line: _Line, value: Mapping[str, Any], *, path: Path) -> None:
    written = value.get("video_path")
    if written is None or written == "":
        line.bad.append(("no_video_path", "has no video_path; give the path of an mp4 or webm file"))
        return
    if not isinstance(written, str):
        line.faults.append(f"video_path is a {type_name(written)}; it is a path")
        return
    line.video, fault = resolved_path(written, "video_path", beside=path, what="a video file")
    if line.video is None:
        line.bad.append(("missing_video", str(fault)))
        return
    try:
        if not line.video.is_file():
            what = "is a folder" if line.video.is_dir() else "does not exist"
            line.bad.append(
                ("missing_video", f"video {line.video} {what}; relative paths start at the folder of the data file")
            )
        elif line.video.stat().st_size == 0:
            line.bad.append(("empty_video", f"video {line.video} has zero bytes; fetch it again"))
    except OSError as error:
        line.bad.append(
            ("missing_video", f"video {line.video} cannot be read ({error.strerror}); check path and rights")
        )


def _image(line: _Line, *, path: Path) -> Path | None:
    written = line.metadata.get("image_path")
    if written is None:
        return None
    if not isinstance(written, str) or not written:
        line.faults.append(
            "metadata.image_path is no path; give one, or leave it out to use the video's own first frame"
        )
        return None
    image, fault = resolved_path(written, "metadata.image_path", beside=path, what="an image file")
    if fault is not None:
        line.bad.append(("bad_image", fault))
    return image


def _record(line: _Line, images: Mapping[Path, CheckedImage], *, path: Path) -> ClipRecord:
    return ClipRecord(
        caption=line.caption,
        video_path=str(line.video),
        source=f"{path}:{line.number}",
        image_path=None if line.image is None else str(line.image),
        image_sha256=None if line.image is None else images[line.image].sha256,
        metadata=line.metadata,
    )


def _without_duplicates(records: Sequence[ClipRecord]) -> tuple[list[ClipRecord], list[Finding]]:
    first: dict[str, ClipRecord] = {}
    repeated = []
    for record in records:
        said = json.dumps([record.caption, record.video_path, record.image_sha256, record.metadata], sort_keys=True)
        if said in first:
            repeated.append(Finding(record.source, "duplicate", f"repeats {first[said].source}"))
        else:
            first[said] = record
    return list(first.values()), repeated


def _foreign(records: Sequence[ClipRecord]) -> list[Finding]:
    """Records whose caption is written in another script than those of most. Languages of one script are not told apart."""
    scripts = [script_of(record.caption) for record in records]
    usual = Counter(script for script in scripts if script is not None).most_common(1)
    return [
        Finding(record.source, "other_language", f"is written in {script}, most captions in {usual[0][0]}")
        for record, script in zip(records, scripts, strict=True)
        if script is not None and script != usual[0][0]
    ]


def script_of(text: str) -> str | None:
    """The script of most letters of ``text``, by its Unicode name (LATIN, CJK, CYRILLIC, ...); None without letters."""
    letters = (unicodedata.name(character, "UNKNOWN").split()[0] for character in text if character.isalpha())
    found = Counter(letters).most_common(1)
    return found[0][0].removesuffix("-") if found else None
