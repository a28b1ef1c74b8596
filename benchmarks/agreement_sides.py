"""A server, a trainer and the local engine over the trainer's transformer, for ``agreement.py``. In: cases and records. Out:
how far the two sides are apart, and updates that reach both.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from agreement_report import Case, Measurement

from miles_wan.config import Config
from miles_wan.flow import transition
from miles_wan.records import Conditioning, PromptRecord, RolloutRequest, SamplingSettings, TrainItem, Trajectory
from miles_wan.rollout.base import Answer, SyncReport
from miles_wan.rollout.local.engine import LocalEngine
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.rollout.sglang.payload import serialize_update
from miles_wan.training.batch import by_expert, micro_batches, stack_steps, step_pairs
from miles_wan.training.policy import PolicyObjective
from miles_wan.training.velocity import VelocityModel
from miles_wan.training.worker import TrainingWorker
from miles_wan.wan.conditioning import sampled_mask
from miles_wan.wan.facts import WanFamily
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.model import WanModel, load_model
from miles_wan.weight_sync.update import make_update

CPU = torch.device("cpu")
SEEDS = (7, 100)
STEPS, NUM_STEPS, ETA, SHIFT = (0, 1, 2, 4), 6, 0.7, 5.0
GUIDANCE = ((1.0, 1.0), (3.0, 2.0))  # of the model, or the high-noise expert; of the low-noise one
SIZES = ((32, 32, 5), (96, 64, 9))  # width, height, frames
RANK, ALPHA = 4, 8


def cases(family: WanFamily) -> Iterator[Case]:
    """Every law with each way to start, guidance and size."""
    for kind, image, (guidance, second), size in itertools.product(
        ("flow_sde", "cps", "ode"), starts(family), GUIDANCE, SIZES
    ):
        yield Case(
            kind=kind,
            image=image,
            guidance=guidance,
            size=size,
            guidance_2=second if len(family.experts) == 2 else None,
        )


def starts(family: WanFamily) -> tuple[bool, ...]:
    """With a first image, without one, or both."""
    return {"none": (False,), "channels": (True,), "first_frame": (True, False)}[family.image_conditioning]


def request_for(
    case: Case, record: PromptRecord, *, seeds: tuple[int, ...] = SEEDS, version: int = 0
) -> RolloutRequest:
    width, height, frames = case.size
    sampling = SamplingSettings(
        width=width,
        height=height,
        num_frames=frames,
        fps=8,
        num_inference_steps=NUM_STEPS,
        guidance_scale=case.guidance,
        flow_shift=SHIFT,
        kind=case.kind,
        noise_level=ETA,
        guidance_scale_2=case.guidance_2,
    )
    return RolloutRequest(
        record=record if case.image else replace(record, image_path=None),
        seeds=seeds,
        sampling=sampling,
        stochastic_steps=() if case.kind == "ode" else STEPS,
        policy_version=version,
        rollout_id=version,
        group_index=0,
        keep_final=True,
    )


class Sides:
    """A server, a trainer and the local engine over the trainer's transformer."""

    def __init__(self, engine: SGLangEngine, worker: TrainingWorker, config: Config, folder: ModelFolder) -> None:
        self.engine, self.worker, self.config, self.folder = engine, worker, config, folder
        self.local = LocalEngine(folder, worker.model, device=CPU)

    async def compare(self, case: Case, record: PromptRecord) -> Measurement:
        """Both engines' videos of a case, each scored by the other side."""
        request = request_for(case, record)
        theirs = await self.engine.generate_debug(request, range(len(SEEDS)))
        ours = self.local.generate_debug(request, range(len(SEEDS)))
        conditioning = theirs[0].output.conditioning
        assert conditioning is not None
        pairs = list(zip(ours, theirs, strict=True))
        gaps = [self.trainer_gaps(case, their.output.trajectory, conditioning) for their in theirs]
        return Measurement(
            case=case,
            latents_relative=max(relative(a, b) for our, their in pairs for a, b in latent_pairs(our, their)),
            latents_absolute=max(float(np.abs(a - b).max()) for pair in pairs for a, b in latent_pairs(*pair)),
            velocity_relative=max(relative(a, b) for pair in pairs for a, b in velocity_pairs(*pair)),
            log_prob=max(largest(our.log_probs - their.log_probs) for our, their in pairs),
            sglang_by_trainer=max(map(largest, gaps)),
            local_by_sglang=max(largest(self.sglang_gaps(request, our, their)) for our, their in pairs),
            trainer_gaps={
                str(step): [float(gap[k]) for gap in gaps] for k, step in enumerate(request.stochastic_steps)
            },
        )

    @torch.no_grad()
    def trainer_gaps(self, case: Case, trajectory: Trajectory | None, conditioning: Conditioning) -> np.ndarray:
        """Log-prob of the trainer's forward minus the server's [K], on a trajectory of the server."""
        assert trajectory is not None
        scales = {"guidance_scale": case.guidance, "guidance_scale_2": case.guidance_2}
        rollout = self.config.rollout.model_copy(update={**scales, "sampler": case.kind})
        config = self.config.model_copy(update={"rollout": rollout})
        objective = PolicyObjective(VelocityModel(self.worker.model, None, config), config)
        pairs = by_expert(step_pairs([train_item(trajectory, conditioning, advantage=0.0)]), self.worker.model.experts)
        if not any(pairs.values()):
            return np.zeros(0)
        counts = {name: len(own) for name, own in pairs.items()}
        batches = micro_batches(pairs, stack_steps, counts=counts, size=1, device=CPU)  # high noise first, as the steps
        return np.concatenate(
            [(objective.law(batch).transition.log_prob - batch.engine_log_prob).numpy() for batch in batches]
        )

    def sglang_gaps(self, request: RolloutRequest, ours: Answer, theirs: Answer) -> np.ndarray:
        """Log-prob by the server's velocities minus the local engine's [K], on a trajectory of the local engine."""
        trajectory = ours.output.trajectory
        given = request.record.image_path is not None and self.folder.image_conditioning == "first_frame"
        assert trajectory is not None
        assert theirs.debug is not None
        gaps = []
        for (state, after), step, log_prob in zip(
            torch.from_numpy(trajectory.latents), trajectory.steps, trajectory.log_probs, strict=True
        ):
            scored = transition(
                request.sampling.kind,
                state[None],
                torch.from_numpy(theirs.debug.model_outputs[step])[None],
                sigma=float(trajectory.sigmas[step]),
                sigma_next=float(trajectory.sigmas[step + 1]),
                sigma_max=float(trajectory.sigmas[1]),
                noise_level=request.sampling.noise_level,
                next_sample=after[None],
                mask=sampled_mask(state[None], torch.tensor([given])),
            )
            gaps.append(float(scored.log_prob) - float(log_prob))
        return np.array(gaps)

    async def update(self, records: Sequence[PromptRecord], *, version: int) -> dict[str, float]:
        """Train on videos of the server, with and without a first image where there may be one; then push the new adapters
        into it."""
        items: list[TrainItem] = []
        guidance, second = self.config.rollout.guidance_scale, self.config.rollout.guidance_scale_2
        for record, image in itertools.product(records, starts(self.folder.family)):
            case = Case(kind="flow_sde", image=image, guidance=guidance, size=SIZES[0], guidance_2=second)
            seeds = tuple(SEEDS[0] + 1000 * version + index for index in range(2))
            request = request_for(case, record, seeds=seeds, version=version - 1)
            outputs = await self.engine.generate(request, (0, 1), return_conditioning=True)
            conditioning = outputs[0].conditioning
            assert conditioning is not None
            for advantage, output in zip((1.0, -1.0), outputs, strict=True):
                assert output.trajectory is not None
                items.append(train_item(output.trajectory, conditioning, advantage=advantage))
        metrics = self.worker.update([items], rollout_id=version - 1)
        reports = await self.push(version)
        return {
            "policy_version": version,
            "tensors": sum(report.tensors for report in reports),
            "unmapped": sum(report.unmapped for report in reports),
            "log_prob_gap_max": metrics["train/log_prob_gap_max"],
            "pairs": metrics["train/log_prob_pairs"],
            "grad_norm": metrics["train/grad_norm"],
        }

    async def push(self, version: int) -> list[SyncReport]:
        """The adapter of each expert."""
        reports = []
        for module, tensors in self.worker.adapters().items():
            update = make_update(tensors.items(), target_module=module, alpha=ALPHA, rank=RANK, policy_version=version)
            payload = serialize_update(update, "cpu", consumers=self.config.rollout.tp_size)
            try:
                reports.append(await self.engine.apply_weights(payload.as_push()))
            finally:
                payload.release()
        return reports


def own_rounding(folder: ModelFolder, record: PromptRecord) -> dict[str, float]:
    """By guidance: what bfloat16 alone does to the velocity of the first step, relative to float32 arithmetic on the
    same (bfloat16) weights. Both from the trainer's forward."""
    loaded = load_model(folder, dtype="bf16")
    raised = WanModel(
        {name: copy.deepcopy(transformer).float() for name, transformer in loaded.items()},
        experts=loaded.experts,
        image_conditioning=loaded.image_conditioning,
        dtype=torch.float32,
    )
    rounded, exact = (LocalEngine(folder, model, device=CPU) for model in (loaded, raised))
    result: dict[str, float] = {}
    for case in cases(folder.family):
        if (case.kind, case.size, case.image) == ("ode", SIZES[-1], starts(folder.family)[0]):
            request = request_for(case, record)
            [ours], [theirs] = (engine.generate_debug(request, (0,)) for engine in (rounded, exact))
            result[case.guidance_text] = relative(*next(velocity_pairs(ours, theirs)))
    return result


def train_item(trajectory: Trajectory, conditioning: Conditioning, *, advantage: float) -> TrainItem:
    return TrainItem(
        trajectory=trajectory, conditioning=conditioning, advantage=advantage, record_id="agreement", sample_index=0
    )


def latent_pairs(ours: Answer, theirs: Answer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both ends of every kept step and the last latent."""
    assert ours.output.trajectory is not None
    assert theirs.output.trajectory is not None
    assert theirs.states.keys() <= ours.states.keys()
    for index, state in theirs.states.items():
        yield ours.states[index], state


def velocity_pairs(ours: Answer, theirs: Answer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of every step, deterministic ones included."""
    assert ours.debug is not None
    assert theirs.debug is not None
    yield from zip(ours.debug.model_outputs, theirs.debug.model_outputs, strict=True)


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def largest(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0))
