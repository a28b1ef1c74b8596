"""Do the SGLang engine, the local engine and the trainer compute the same thing? Latents, velocities and log-probs of equal
seeds, before training and after real updates with real weight syncs.

    python benchmarks/agreement.py --out runs/agreement
    python benchmarks/agreement.py --out runs/agreement --tp 1 2 --dtype fp32 bf16 --merge-mode dynamic merge
    python benchmarks/agreement.py --out runs/agreement-i2v --family wan2.2-i2v-a14b --tp 1 --merge-mode dynamic

Each combination is one real server beside one FSDP2 rank. Finished ones in ``--out`` are kept. Writes one JSON file per
combination and ``agreement.md`` over all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tyro
from agreement_report import BOUND, Measurement, Report, markdown
from agreement_sides import (
    ALPHA,
    ETA,
    GUIDANCE,
    NUM_STEPS,
    RANK,
    SHIFT,
    SIZES,
    Sides,
    cases,
    own_rounding,
    relative,
    request_for,
)

from miles_wan.config import Config
from miles_wan.records import PromptRecord
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.rollout.sglang.settings import EngineSettings
from miles_wan.tiny import TinyPaths, make_tiny
from miles_wan.training.worker import Rank, TrainingWorker
from miles_wan.wan.facts import family_named
from miles_wan.wan.family import load_family

Dtype = Literal["fp32", "bf16"]
MergeMode = Literal["dynamic", "merge"]


@dataclass(frozen=True)
class Arguments:
    """What to compare."""

    out: Path = Path("runs/agreement")
    """Folder of the results, the tiny checkpoint and the server logs."""
    family: str = "wan2.2-ti2v-5b"
    """The released model that the tiny checkpoint is one of."""
    tp: tuple[int, ...] = (1, 2)
    """Tensor-parallel sizes of the server."""
    dtype: tuple[Dtype, ...] = ("fp32",)
    """Precisions, of both sides."""
    merge_mode: tuple[MergeMode, ...] = ("dynamic", "merge")
    """How the server holds the adapter."""
    updates: int = 5
    """Updates, each with a weight sync."""
    lr: float = 2e-2
    """Learning rate of these updates."""


@dataclass(frozen=True)
class Combination:
    """One server."""

    family: str
    dtype: Dtype
    tp: int
    merge_mode: MergeMode

    @property
    def name(self) -> str:
        """Of TI2V, which came first, without the family."""
        family = "" if self.family == "wan2.2-ti2v-5b" else f"{self.family.removeprefix('wan2.2-')}-"
        return f"{family}{self.dtype}-tp{self.tp}-{self.merge_mode}"


def configuration(combination: Combination, tiny: TinyPaths, arguments: Arguments) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(tiny.model), "dtype": combination.dtype, "lora_rank": RANK, "lora_alpha": ALPHA},
            "data": {"train": str(tiny.train_jsonl)},
            "rollout": {
                "num_inference_steps": NUM_STEPS,
                "guidance_scale": GUIDANCE[-1][0],
                "guidance_scale_2": GUIDANCE[-1][1] if len(family_named(combination.family).experts) == 2 else None,
                "flow_shift": SHIFT,
                "noise_level": ETA,
                "tp_size": combination.tp,
            },
            "algorithm": {"max_log_prob_gap": 1.0},  # measured here, not enforced
            "training": {
                "micro_batch_size": 4,
                "activation_checkpointing": False,
                "optimizer": {"lr": arguments.lr},
            },
            "num_rollouts": arguments.updates,
        }
    )


@contextmanager
def sides(combination: Combination, tiny: TinyPaths, arguments: Arguments, runner: asyncio.Runner) -> Iterator[Sides]:
    config = configuration(combination, tiny, arguments)
    folder = load_family(tiny.model)
    engine = SGLangEngine(
        EngineSettings(
            model_path=str(tiny.model.resolve()),
            model_id=folder.family.engine_model_id,
            devices=tuple(str(index) for index in range(combination.tp)),
            log_dir=arguments.out / "logs" / combination.name,
            tp_size=combination.tp,
            device="cpu",
            dtype=combination.dtype,
            flow_shift=SHIFT,
            lora_merge_mode=combination.merge_mode,
        )
    )
    with tempfile.TemporaryDirectory() as meeting:
        engine.start()
        try:
            worker = TrainingWorker(config, Rank(0, 1, f"file://{meeting}/ranks", "cpu"), folder=folder)
            try:
                yield Sides(engine, worker, config, folder)
            finally:
                worker.close()
        finally:
            runner.run(engine.close())


async def measure(sides: Sides, records: Sequence[PromptRecord], combination: Combination, updates: int) -> Report:
    async def table() -> list[Measurement]:
        return [await sides.compare(case, records[0]) for case in all_cases]

    all_cases = list(cases(sides.folder.family))
    probe = request_for(all_cases[0], records[0])
    before = sides.local.generate(probe, [0])[0].trajectory
    start = await table()
    trained = [await sides.update(records, version=version) for version in range(1, updates + 1)]
    after = sides.local.generate(probe, [0])[0].trajectory
    assert before is not None
    assert after is not None
    with sides.worker.velocity.base():  # as if no update had reached one side
        control = [await sides.compare(case, records[0]) for case in all_cases if case.size == SIZES[0]]
    return Report(
        name=combination.name,
        start=start,
        after=await table(),
        control=control,
        updates=trained,
        moved=relative(after.latents, before.latents),
    )


def read_records(tiny: TinyPaths) -> list[PromptRecord]:
    """The first two training records of the toy data set, with their first frames if the family takes any."""
    records = []
    for line in tiny.train_jsonl.read_text().splitlines()[:2]:
        values = json.loads(line)
        image = values["metadata"].get("image_path")
        path = None if image is None else str((tiny.train_jsonl.parent / image).resolve())
        records.append(PromptRecord(record_id=values["input"], prompt=values["input"], image_path=path))
    return records


def main(arguments: Arguments) -> None:
    logging.basicConfig(level=logging.WARNING)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tiny = make_tiny(arguments.out / "tiny", family=arguments.family)
    for dtype, tp, merge_mode in itertools.product(arguments.dtype, arguments.tp, arguments.merge_mode):
        combination = Combination(arguments.family, dtype, tp, merge_mode)
        file = arguments.out / f"{combination.name}.json"
        if file.exists():
            continue
        print(f"{combination.name}: starting")
        with asyncio.Runner() as runner, sides(combination, tiny, arguments, runner) as both:
            report = runner.run(measure(both, read_records(tiny), combination, arguments.updates))
        file.write_text(json.dumps(asdict(report), indent=1))
    reports = [Report.read(file) for file in sorted(arguments.out.glob("*-tp*.json"))]
    bf16 = any(not report.exact for report in reports)
    text = markdown(reports, own_rounding(load_family(tiny.model), read_records(tiny)[0]) if bf16 else {})
    (arguments.out / "agreement.md").write_text(text)
    print(text)
    apart = [report.name for report in reports if report.exact and not report.within(BOUND)]
    if apart:
        raise SystemExit(f"above {BOUND:g}: {', '.join(apart)}")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
