"""The clips of a run, training and validation, through the cache. In: settings and the library. Out: clips that can be used, and
every other record by name. It knows no model but through the library.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

from miles_wan.data.clips import ClipSet, Finding, load_clips, summarised
from miles_wan.errors import InputError
from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.encode import ClipLibrary, EncodedClip
from miles_wan.tracking.writing import replacing
from miles_wan.wan.facts import DEFAULT_NEGATIVE_PROMPT

logger = logging.getLogger(__name__)


class RunData:
    """Both data sets, encoded (a collective). ``bad`` and ``notes`` hold what was found out, by data set; ``entries`` counts the
    cache entries of the training clips, ``made`` those that were not there.

    Raises:
        InputError: a data set without one clip that can be used, with the fault of each record.
    """

    def __init__(self, config: SftConfig, library: ClipLibrary) -> None:
        data, evaluation = config.data, config.eval
        given = {"data.train": _usable(load_clips(data.train), data.skip_other_languages)}
        if data.eval is not None and evaluation.interval:
            given["data.eval"] = _usable(load_clips(data.eval), data.skip_other_languages)
        prompts = [DEFAULT_NEGATIVE_PROMPT] if evaluation.videos else []
        encoded = {name: library.encode(clips.records, prompts=prompts) for name, clips in given.items()}
        self.bad: dict[str, list[Finding]] = {n: [*given[n].bad, *found.bad] for n, found in encoded.items()}
        self.notes: dict[str, list[Finding]] = {n: [*given[n].notes, *found.notes] for n, found in encoded.items()}
        faults = [
            f"{name}: {finding.source}: {finding.text}"
            for name, found in encoded.items()
            if not found.clips
            for finding in self.bad[name]
        ]
        if faults:
            raise InputError(faults)
        self.train: tuple[EncodedClip, ...] = encoded["data.train"].clips
        self.entries, self.made = encoded["data.train"].entries, encoded["data.train"].made
        validated = encoded.get("data.eval")
        self.evaluation: tuple[EncodedClip, ...] = validated.clips[: evaluation.max_records] if validated else ()

    def tell(self, file: Path) -> None:
        """Log what was found, and write every record that is left out as a JSON line into ``file``."""
        logger.info(
            "%d training clips (%d cache entries, %d of them new), %d validation clips",
            len(self.train),
            self.entries,
            self.made,
            len(self.evaluation),
        )
        for name in self.bad:
            for sentence in summarised(self.bad[name]):
                logger.warning("%s: left out: %s", name, sentence)
            for sentence in summarised(self.notes[name]):
                logger.info("%s: %s", name, sentence)
        lines = [{"data": name, **asdict(finding)} for name, findings in self.bad.items() for finding in findings]
        with replacing(file) as temporary:
            temporary.write_text(
                "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), encoding="utf-8"
            )


def _usable(clips: ClipSet, skip_other_languages: bool) -> ClipSet:
    """Without the captions in another script, if they are not wanted."""
    if not skip_other_languages:
        return clips
    foreign = {note.source: note for note in clips.notes if note.kind == "other_language"}
    return ClipSet(
        clips.path,
        tuple(record for record in clips.records if record.source not in foreign),
        (*clips.bad, *foreign.values()),
        tuple(note for note in clips.notes if note.source not in foreign),
    )
