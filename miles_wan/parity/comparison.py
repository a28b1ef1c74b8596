"""The comparison itself. In: an engine, a trainer, requests, what their records should condition on, and two adapters.
Out: a ``ParityReport``. Whoever builds the parts is not its business; a faulty engine is judged like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from miles_wan.config import Config
from miles_wan.errors import EngineError, WeightSyncError
from miles_wan.flow import masked_mean
from miles_wan.parity.causes import (
    CONDITION_TOLERANCE,
    DENSITY_TOLERANCE,
    GRID_TOLERANCE,
    LAW_TOLERANCE,
    condition_causes,
    condition_gaps,
    density_cause,
    grid_cause,
    law_cause,
    law_misfit,
    merged,
    own_density,
)
from miles_wan.parity.model_outputs import model_causes
from miles_wan.parity.pairs import Group, Pair, collect, score
from miles_wan.parity.parts import Adapter, EngineSide, Trainer
from miles_wan.parity.refusals import refusal_causes
from miles_wan.parity.report import UNKNOWN, Cause, Check, ParityReport, StepRow
from miles_wan.records import Conditioning, RolloutRequest, SamplingSettings
from miles_wan.rollout.local.sampler import sigma_grid
from miles_wan.wan.experts import Experts
from miles_wan.wan.model import WanModel

logger = logging.getLogger(__name__)

_MODEL_TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}
_NEXT_STATE_TOLERANCE = 1e-3
_NOISE_TOLERANCE = 1e-6


def compare(
    engine: EngineSide,
    trainer: Trainer,
    requests: Sequence[RolloutRequest],
    *,
    references: Sequence[Conditioning],
    adapters: tuple[Adapter, Adapter],
    config: Config,
) -> ParityReport:
    """Push two adapters one after the other, roll out, and score every kept step again.

    Args:
        requests: with stochastic steps; their sampling settings are the configured ones, whatever the engine does.
        references: of each request, its record's conditioning, encoded without the engine.
        adapters: the one pushed first and the one to roll out with; the trainer holds the second at the end.
        config: bounds, clip ranges and precisions.
    """
    report = empty_report(config, requests)
    previous, current = adapters
    try:
        engine.push(previous, policy_version=1)
        engine.push(current, policy_version=2)
        groups = list(collect(engine, requests, samples_per_call=config.rollout.samples_per_call))
    except (EngineError, WeightSyncError) as error:
        return refused(report, error)
    trainer.hold(current)
    return _judged(report, groups, trainer, references=references, adapters=adapters, config=config)


def empty_report(config: Config, requests: Sequence[RolloutRequest]) -> ParityReport:
    """What is known before anything has run."""
    rollout, algorithm = config.rollout, config.algorithm
    engine_dtype = rollout.dtype if rollout.engine == "sglang" else config.model.dtype
    clip = {"clip_range": algorithm.clip_range, "clip_range_high": algorithm.clip_range_high or algorithm.clip_range}
    bounds = {"grpo": clip, "guard": clip, "dppo": {"kl_threshold": algorithm.kl_threshold}, "nft": {}}
    return ParityReport(
        engine=rollout.engine,
        precision=f"engine {engine_dtype}, trainer {config.model.dtype}",
        records=len(requests),
        samples=sum(len(request.seeds) for request in requests),
        clip=bounds[algorithm.loss],
    )


def refused(report: ParityReport, error: EngineError | WeightSyncError) -> ParityReport:
    """The report of an engine that did not come as far as a rollout."""
    return replace(report, refused=str(error), causes=refusal_causes(error))


def _judged(
    report: ParityReport,
    groups: Sequence[Group],
    trainer: Trainer,
    *,
    references: Sequence[Conditioning],
    adapters: tuple[Adapter, Adapter],
    config: Config,
) -> ParityReport:
    pairs = score(groups, trainer)
    tolerance = max(_MODEL_TOLERANCE[dtype] for dtype in (config.rollout.dtype, config.model.dtype))
    checks = _checks(groups, pairs, references=references, tolerance=tolerance, config=config)
    failed = {check.name for check in checks if not check.holds}
    causes: list[Cause] = []
    if "sigma grid" in failed:
        causes += _grid_causes(groups)
    causes += condition_causes(groups, references)
    if "transition law" in failed:
        causes.append(law_cause(pairs))
    causes += model_causes(
        pairs, groups, references, trainer, previous=adapters[0], current=adapters[1], tolerance=tolerance
    )
    if "own log-prob" in failed:
        causes.append(density_cause(pairs))
    if failed and not causes:
        first = next(check for check in checks if not check.holds)
        causes.append(
            Cause(
                UNKNOWN, f"the first quantity to differ is the {first.name}: {first.value:.1e}, bound {first.bound:.0e}"
            )
        )
    if failed and all(cause.name == UNKNOWN for cause in causes):
        causes.append(Cause(UNKNOWN, f"the precision of both sides is: {report.precision}"))
    floor = max(pair.log_prob_gap for pair in pairs)
    kl_floor = max(pair.kl_gap for pair in pairs)
    return replace(
        report,
        rows=_rows(pairs, trainer.model.experts),
        checks=checks,
        causes=merged(causes),
        warnings=_warnings(config, groups, noise_floor=floor, kl_floor=kl_floor)
        + _unchecked(groups, pairs, trainer.model),
        noise_floor=floor,
        kl_floor=kl_floor,
    )


def _checks(
    groups: Sequence[Group],
    pairs: Sequence[Pair],
    *,
    references: Sequence[Conditioning],
    tolerance: float,
    config: Config,
) -> list[Check]:
    sampling = pairs[0].sampling
    conditions = [
        gap
        for group, reference in zip(groups, references, strict=True)
        for returned in group.conditionings
        for gap in condition_gaps(returned, reference).values()
    ]
    return [
        Check("sigma grid", _grid_gap(groups), GRID_TOLERANCE, "absolute"),
        Check("conditioning", _largest(conditions), CONDITION_TOLERANCE, "relative"),
        Check("noise of the seeds", _largest([pair.noise_gap for pair in pairs]), _NOISE_TOLERANCE, "absolute"),
        Check("next state", _largest([pair.next_state_gap for pair in pairs]), _NEXT_STATE_TOLERANCE, "stds"),
        Check("transition law", law_misfit(pairs, sampling.kind, sampling.noise_level), LAW_TOLERANCE, "stds"),
        Check(
            "own log-prob",
            _largest([abs(pair.log_prob - own_density(pair)) for pair in pairs]),
            DENSITY_TOLERANCE,
            "absolute",
        ),
        Check("model output", _largest([pair.model_output_gap for pair in pairs]), tolerance, "relative"),
        Check("mean", _largest([pair.mean_gap for pair in pairs]), tolerance, "stds"),
        Check(
            "log-prob", _largest([pair.log_prob_gap for pair in pairs]), config.algorithm.max_log_prob_gap, "absolute"
        ),
    ]


def _largest(values: Sequence[float]) -> float:
    """The largest, NaN if one is."""
    return float(np.max(values))


def _grid_gap(groups: Sequence[Group]) -> float:
    return _largest(
        [
            float(np.abs(answer.sigmas - _wanted(group.request.sampling)).max())
            for group in groups
            for answer in group.answers
        ]
    )


def _grid_causes(groups: Sequence[Group]) -> list[Cause]:
    for group in groups:
        sampling = group.request.sampling
        wanted = _wanted(sampling)
        for answer in group.answers:
            if not float(np.abs(answer.sigmas - wanted).max()) <= GRID_TOLERANCE:
                return [grid_cause(answer.sigmas, wanted, grid_in_words(sampling))]
    return []


def _wanted(sampling: SamplingSettings) -> np.ndarray:
    grid: np.ndarray = sigma_grid(sampling).numpy()
    return grid


def grid_in_words(sampling: SamplingSettings) -> str:
    """What was configured."""
    if sampling.sigmas is not None:
        return "the listed ones"
    return f"those of {sampling.num_inference_steps} steps with flow shift {sampling.flow_shift:g}"


def _rows(pairs: Sequence[Pair], experts: Experts) -> list[StepRow]:
    rows = []
    for step in sorted({pair.step for pair in pairs}):
        own = [pair for pair in pairs if pair.step == step]
        velocity = [_gap(pair.own_velocity, pair.velocity, pair) for pair in own]
        mean = [_gap(pair.own_mean, pair.mean, pair) for pair in own]
        log_prob = [pair.log_prob_gap for pair in own]
        rows.append(
            StepRow(
                step=step,
                sigma=own[0].sigma,
                expert=experts.label(own[0].expert),
                pairs=len(own),
                model_output=_largest([pair.model_output_gap for pair in own]),
                model_output_mean=float(np.mean([gap[0] for gap in velocity])),
                model_output_max=_largest([gap[1] for gap in velocity]),
                mean_mean=float(np.mean([gap[0] for gap in mean])),
                mean_max=_largest([gap[1] for gap in mean]),
                log_prob_mean=float(np.mean(log_prob)),
                log_prob_max=_largest(log_prob),
            )
        )
    return rows


def _gap(ours: Tensor, theirs: Tensor, pair: Pair) -> tuple[float, float]:
    """Mean and largest difference over the sampled elements."""
    difference = (ours - theirs).abs()
    return float(masked_mean(difference, pair.mask)), float((difference * pair.mask).max())


def _warnings(config: Config, groups: Sequence[Group], *, noise_floor: float, kl_floor: float) -> list[str]:
    algorithm, warnings = config.algorithm, []
    if algorithm.loss == "dppo" and kl_floor >= algorithm.kl_threshold:
        warnings.append(
            f"the KL between engine and trainer reaches {kl_floor:.1e}, algorithm.kl_threshold is "
            f"{algorithm.kl_threshold:g}: the threshold acts on numeric noise; set algorithm.old_log_prob = recompute or raise it"
        )
    low = min(algorithm.clip_range, algorithm.clip_range_high or algorithm.clip_range)
    if algorithm.loss in ("grpo", "guard") and noise_floor >= low:
        warnings.append(
            f"log-probs of engine and trainer differ by up to {noise_floor:.1e}, the clip range is {low:g}: clipping acts on "
            "numeric noise; set algorithm.old_log_prob = recompute, or raise the clip range or the precision"
        )
    return warnings


def _unchecked(groups: Sequence[Group], pairs: Sequence[Pair], model: WanModel) -> list[str]:
    """What these records and steps say nothing about."""
    warnings = []
    if len({group.request.record.record_id for group in groups}) < 2:
        warnings.append("only one record: swapped conditions cannot be told; give --records 2 or more")
    if model.image_conditioning == "first_frame" and all(group.request.record.image_path is None for group in groups):
        warnings.append("no record with a first image: the first-frame mask was not checked")
    seen = {pair.expert for pair in pairs}
    for name in model.experts.names:
        if name not in seen:
            warnings.append(
                f"no kept step belongs to the expert of {model.experts.label(name)} noise ({name}): it was not checked"
            )
    return warnings
