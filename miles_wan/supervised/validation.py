"""The validation loss: fixed clips, timesteps and noise, so that two validations differ by the weights alone. In: settings and
the losses of the fixed draws. Out: means with 95 % intervals over the clips, per timestep and per expert. It knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from miles_wan.records import derived_seed
from miles_wan.supervised.config import SupervisedEvalConfig
from miles_wan.supervised.draws import Draw
from miles_wan.tracking.summary import mean_ci95
from miles_wan.wan.experts import Experts


def validation_timesteps(settings: SupervisedEvalConfig, experts: Experts, trained: Sequence[str]) -> list[float]:
    """The fixed timesteps of the trained experts: those of ``eval.timesteps``, and ``eval.quantiles`` of each one's range,
    rounded to whole timesteps. Rising, each once."""
    found = {timestep for timestep in settings.timesteps if experts.of(timestep) in trained}
    for name in trained:
        low, high = experts.ranges()[name]
        for quantile in settings.quantiles:
            timestep = min(max(float(round(low + quantile * (high - low))), low, 1.0), high - 1)
            found.add(timestep)
    return sorted(found)


def validation_draws(
    num_clips: int, timesteps: Sequence[float], *, seed: int, experts: Experts, image_share: float
) -> list[Draw]:
    """Every clip at every timestep. The noise of a clip at a timestep follows from ``seed`` and both; its caption is always
    given, and its first frame for a fixed share of the clips: the first, the last, or those between evenly."""
    draws: list[Draw] = []
    for clip in range(num_clips):
        with_image = math.floor((clip + 1) * image_share + 1e-9) > math.floor(clip * image_share + 1e-9)
        for timestep in timesteps:
            draws.append(
                Draw(
                    position=len(draws),
                    clip=clip,
                    timestep=timestep,
                    expert=experts.of(timestep),
                    noise_seed=derived_seed(seed, "validation", clip, str(timestep)),
                    with_image=with_image,
                    with_text=True,
                )
            )
    return draws


def validation_metrics(draws: Sequence[Draw], losses: Sequence[float], experts: Experts) -> dict[str, float]:
    """Metrics ``validation/...``: means over the clips with half-widths of Student's 95 % interval, of everything, of each
    timestep and of each expert (of its timesteps' mean per clip)."""
    metrics: dict[str, float] = {}

    def note(name: str, chosen: Mapping[int, list[float]]) -> None:
        interval = mean_ci95([sum(values) / len(values) for values in chosen.values()])
        metrics[f"validation/loss{name}"] = interval.mean
        if not math.isnan(interval.ci95):
            metrics[f"validation/loss_ci95{name}"] = interval.ci95

    note("", by_clip(draws, losses))
    for timestep in sorted({draw.timestep for draw in draws}):
        chosen = [(draw, loss) for draw, loss in zip(draws, losses, strict=True) if draw.timestep == timestep]
        note(f"/t{timestep:g}", by_clip(*zip(*chosen, strict=True)))
    for name in dict.fromkeys(draw.expert for draw in draws):
        chosen = [(draw, loss) for draw, loss in zip(draws, losses, strict=True) if draw.expert == name]
        note(f"/{experts.label(name)}", by_clip(*zip(*chosen, strict=True)))
    return metrics


def by_clip(draws: Sequence[Draw], losses: Sequence[float]) -> dict[int, list[float]]:
    """The losses of each clip."""
    found: dict[int, list[float]] = {}
    for draw, loss in zip(draws, losses, strict=True):
        found.setdefault(draw.clip, []).append(loss)
    return found
