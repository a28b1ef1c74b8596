"""The trainer's side, written out: velocity of a diffusers transformer and the likelihood of a stored step."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from miles_wan.records import Conditioning, PromptRecord, RolloutRequest, SamplingSettings, Trajectory, WeightUpdate
from miles_wan.rollout.base import SyncReport, WeightPush
from miles_wan.rollout.sglang.payload import SharedPayload, serialize_update

ALPHA, RANK = 8, 4
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")


def make_request(
    record: PromptRecord, *, image: bool = True, seeds: tuple[int, ...] = (7,), **changes: Any
) -> RolloutRequest:
    """A request for 32x32x5 in 6 steps, the first two stochastic. ``changes`` go to the request or to its sampling."""
    sampling = SamplingSettings(
        width=32, height=32, num_frames=5, fps=8, num_inference_steps=6, guidance_scale=3.0, flow_shift=5.0
    )
    request = RolloutRequest(
        record=record if image else replace(record, image_path=None),
        seeds=seeds,
        sampling=sampling,
        stochastic_steps=(0, 1),
        policy_version=3,
        rollout_id=0,
        group_index=0,
    )
    of_request = {key: value for key, value in changes.items() if hasattr(request, key)}
    of_sampling = {key: value for key, value in changes.items() if key not in of_request}
    return replace(request, sampling=replace(sampling, **of_sampling), **of_request)


@torch.no_grad()
def velocity(model: Any, state: Tensor, sigma: float, conditioning: Conditioning, *, guidance: float) -> Tensor:
    """v = v_neg + w (v_pos - v_neg), timestep per token with 0 in the given frame. ``state`` [C, F, h, w]."""
    frames, height, width = state.shape[1:]
    timestep = torch.full((1,), 1000 * sigma)
    if conditioning.condition_latent is not None:
        per_token = torch.full((frames, height // 2, width // 2), 1000 * sigma)
        per_token[0] = 0
        timestep = per_token.flatten()[None]

    def forward(embeds: Any) -> Tensor:
        inputs = torch.from_numpy(embeds)[None]
        return model(hidden_states=state[None], timestep=timestep, encoder_hidden_states=inputs, return_dict=False)[0][
            0
        ]

    positive = forward(conditioning.prompt_embeds)
    if conditioning.negative_prompt_embeds is None:
        return positive
    negative = forward(conditioning.negative_prompt_embeds)
    return negative + guidance * (positive - negative)


def step_law(kind: str, state: Tensor, v: Tensor, sigmas: Tensor, step: int, *, eta: float) -> tuple[Tensor, float]:
    """Mean and std of a stochastic step, as MATH has them, in float64."""
    s, n, x, v = float(sigmas[step]), float(sigmas[step + 1]), state.double(), v.double()
    if kind == "flow_sde":
        g = eta * math.sqrt(s / (1 - (float(sigmas[1]) if s == 1 else s)))
        mean = x * (1 + g * g * (n - s) / (2 * s)) + v * (1 + g * g * (1 - s) / (2 * s)) * (n - s)
        return mean, g * math.sqrt(s - n)
    std = n * math.sin(eta * math.pi / 2)
    return (1 - n) * (x - s * v) + math.sqrt(n * n - std * std) * (x + (1 - s) * v), std


def replayed_log_probs(
    model: Any, trajectory: Trajectory, conditioning: Conditioning, *, guidance: float, kind: str = "flow_sde"
) -> Tensor:
    """log N(x_next; mean, std), mean over the sampled elements, of every kept step."""
    sigmas = torch.from_numpy(trajectory.sigmas)
    given = 1 if trajectory.has_condition else 0
    values = []
    for (state, after), step in zip(torch.from_numpy(trajectory.latents), trajectory.steps, strict=True):
        v = velocity(model, state, float(sigmas[step]), conditioning, guidance=guidance)
        mean, std = step_law(kind, state, v, sigmas, step, eta=0.7)
        density = torch.distributions.Normal(mean, std).log_prob(after.double())
        values.append(density[:, given:].mean())
    return torch.stack(values)


def random_adapter(model: torch.nn.Module, seed: int, *, scale: float = 0.1) -> dict[str, Tensor]:
    """Adapter tensors for every target layer of the blocks, by the names of a ``WeightUpdate``."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in model.named_modules():
        if name.startswith("blocks.") and name.endswith(TARGETS) and isinstance(layer, torch.nn.Linear):
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, layer.in_features, generator=generator) * scale
            tensors[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, RANK, generator=generator) * scale
    return tensors


def as_update(tensors: dict[str, torch.Tensor], version: int = 1, *, module: str = "transformer") -> WeightUpdate:
    return WeightUpdate(
        target_module=module, tensors=tensors, alpha=ALPHA, rank=RANK, policy_version=version, checksum=""
    )


def as_push(payload: SharedPayload) -> WeightPush:
    return payload.as_push()


class Receiver(Protocol):
    async def apply_weights(self, push: WeightPush) -> SyncReport: ...


async def push(
    engine: Receiver,
    tensors: dict[str, torch.Tensor],
    version: int = 1,
    *,
    module: str = "transformer",
    consumers: int = 2,
) -> SyncReport:
    """Serialize for so many workers, apply, release."""
    payload = serialize_update(as_update(tensors, version, module=module), "cpu", consumers=consumers)
    try:
        return await engine.apply_weights(as_push(payload))
    finally:
        payload.release()


def zeroed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor * 0 if "lora_B" in name else tensor for name, tensor in tensors.items()}


def mappings_of_ours(pid: int) -> list[str]:
    """Shared memory of this process that a process and its descendants still map."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    lines = [line for process in family for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    return [line for line in lines if f"/torch_{os.getpid()}_" in line]


def digests_differ(run: Any, client: Any, expected: dict[str, str], *, module: str = "transformer") -> str:
    """What the engine says against these digests of its tensors (by its own names); empty if they agree."""
    body = {"target_module": module, "expected_named_tensors_sha256": expected}
    answer = run(client.post("/update_weights_from_tensor_checker", body)).json()
    return "" if answer["success"] else str(answer["message"])
