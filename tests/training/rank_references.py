"""The losses of the rank scenarios in one process, without sharding: a plain diffusers transformer, adapters by peft, and the
formulas written out."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from diffusers import WanTransformer3DModel
from golden_data import GOLDEN, padded_embeds, ti2v_item, ti2v_rollout
from peft import LoraConfig
from ranks import CLIP_HIGH, CLIP_LOW, DPPO_THRESHOLD, ITEMS, NFT, NFT_SCALE, finished
from safetensors.torch import load_file
from torch import Tensor

from miles_wan.records import derived_seed
from miles_wan.training.batch import noise_pairs, stack_noised

RANK, ALPHA = 4, 6  # their ratio is not 1
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]


def plain_transformer() -> torch.nn.Module:
    """The golden transformer with adapters by peft alone."""
    model = WanTransformer3DModel.from_config(
        WanTransformer3DModel.load_config(GOLDEN / "tiny_ti2v_transformer_config.json")
    )
    model.load_state_dict(load_file(GOLDEN / "tiny_ti2v_transformer.safetensors"))
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
    return model


def plain_adapter(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora_" in n}


@lru_cache
def start_adapter() -> dict[str, Tensor]:
    """Adapters with a B that is not zero."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(p.shape, generator=generator) * (0.1 if "lora_B" in name else 0.2)
        for name, p in plain_adapter(plain_transformer()).items()
    }


def relative(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    difference = sum(float((actual[n].double() - expected[n].double()).square().sum()) for n in expected)
    return math.sqrt(difference / sum(float(g.double().square().sum()) for g in expected.values()))


def clipped(ratio: Tensor, advantage: float, low: float = 0.5, high: float = 0.5) -> Tensor:
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def pair_loss(
    loss: str, density: Tensor, old: Tensor, advantage: float, *, mean: Tensor, old_mean: Tensor, std: Tensor, d: Tensor
) -> Tensor:
    """The loss of one pair, by algorithm, with the formulas of MATH."""
    ratio = torch.exp(density - old)
    if loss == "guard":
        bias = ((mean - old_mean) ** 2).mean() / (2 * std**2)
        return clipped(torch.exp((density - old + bias) * std), advantage) / -d
    if loss == "dppo":
        moved = float((((mean - old_mean) ** 2).mean() / (2 * std**2)).detach())
        moves_on = bool((ratio.detach() - 1) * advantage > 0)
        return 0 * ratio if moved >= DPPO_THRESHOLD and moves_on else -advantage * ratio
    if loss == "clip higher":
        return clipped(ratio, advantage, CLIP_LOW, CLIP_HIGH)
    return clipped(ratio, advantage)


@lru_cache
def reference_gradients(
    *,
    guidance: float = 3.0,
    kl_beta: float = 0.0,
    loss_name: str = "grpo",
    scale: float = 1.0,
    reference_scale: float = 0.0,
) -> dict[str, Tensor]:
    """Gradients of the mean objective over both ranks' pairs.

    Args:
        scale: of the start adapter in the policy; ``reference_scale`` of that in the KL's reference (0: the base).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    rollout, eta = ti2v_rollout(), 0.7
    model = plain_transformer()
    with torch.no_grad():
        for name, parameter in plain_adapter(model).items():
            parameter.copy_(scale * start_adapter()[name])
    latents, sigmas = rollout["trajectory.latents"], rollout["trajectory.sigmas"]
    prompt, negative = padded_embeds("prompt_embeds")[None], padded_embeds("negative_prompt_embeds")[None]
    losses = []
    pairs = [(k, advantage) for rank in ITEMS for steps, advantage in ITEMS[rank] for k in steps]
    recompute = loss_name in ("recompute", "guard recompute")

    def std_of(k: int) -> Tensor:
        s, d = sigmas[k], sigmas[k + 1] - sigmas[k]
        return eta * torch.sqrt(s / (1 - (sigmas[1] if s == 1 else s))) * torch.sqrt(-d)

    def mean_of(k: int) -> Tensor:
        x, s, n = latents[k][None], sigmas[k], sigmas[k + 1]
        frames, height, width = x.shape[2:]
        tokens = height * width // 4
        time = torch.cat([torch.zeros(tokens), torch.full(((frames - 1) * tokens,), float(1000 * s))])[None]

        def velocity(text: Tensor) -> Tensor:
            return model(hidden_states=x, timestep=time, encoder_hidden_states=text, return_dict=False)[0]

        v = velocity(prompt)
        if guidance > 1:
            v_neg = velocity(negative)
            v = v_neg + guidance * (v - v_neg)
        g2, d = eta**2 * s / (1 - (sigmas[1] if s == 1 else s)), n - s
        return x * (1 + g2 * d / (2 * s)) + v * (1 + g2 * (1 - s) / (2 * s)) * d

    references = {}
    if kl_beta:
        with torch.no_grad():
            set_scale(model, reference_scale)
            references = {k: mean_of(k)[:, :, 1:] for k, _ in pairs}
            set_scale(model, scale)
    for k, advantage in pairs:
        d, std = sigmas[k + 1] - sigmas[k], std_of(k)
        mean = mean_of(k)[:, :, 1:]
        density = torch.distributions.Normal(mean, std).log_prob(latents[k + 1][None, :, 1:]).mean()
        old = density.detach() if recompute else rollout["log_probs.first_frame_masked"][k]
        old_mean = mean.detach() if recompute else rollout["debug.rollout_prev_sample_means"][k][None, :, 1:]
        name = loss_name.removesuffix(" recompute")
        loss = pair_loss(name, density, old, advantage, mean=mean, old_mean=old_mean, std=std, d=d)
        if loss_name == "noise level":
            loss = loss * std / torch.stack([std_of(step) for step, _ in pairs]).mean()
        if kl_beta:
            base = references[k]
            loss = loss + kl_beta * ((mean - base) ** 2 / (2 * std**2)).mean()
        losses.append(loss)
    torch.stack(losses).mean().backward()
    torch.set_num_threads(threads)
    return {name: parameter.grad for name, parameter in plain_adapter(model).items()}


@torch.no_grad()
def set_scale(model: torch.nn.Module, scale: float) -> None:
    """Give the model the start adapter times ``scale``."""
    for name, parameter in plain_adapter(model).items():
        parameter.copy_(scale * start_adapter()[name])


def scaled_velocity(model: torch.nn.Module, scale: float, x: Tensor, time: Tensor) -> Tensor:
    """The unguided velocity with the start adapter times ``scale``."""
    set_scale(model, scale)
    prompt = padded_embeds("prompt_embeds")[None]
    return model(hidden_states=x, timestep=time, encoder_hidden_states=prompt, return_dict=False)[0]


def nft_error(distance: Tensor) -> Tensor:
    return (distance**2).mean() / distance.detach().abs().mean()


@lru_cache
def reference_nft_gradients() -> dict[str, Tensor]:
    """Gradients of the DiffusionNFT loss over both ranks' pairs in one process. Noise and levels are the worker's."""
    rollout = ti2v_rollout()
    model = plain_transformer()
    adapter = plain_adapter(model)
    seed = derived_seed(0, "forward", 3)
    beta, weight, losses = NFT["beta"], NFT["reference_weight"], []
    frames, height, width = rollout["trajectory.latents"].shape[2:]
    tokens = height * width // 4
    for item in (finished(ti2v_item(steps, advantage=a)) for rank in ITEMS for steps, a in ITEMS[rank]):
        for pair in noise_pairs([item], levels=NFT["sigmas_per_sample"], seed=seed):
            batch = stack_noised("transformer", 1, [pair], torch.device("cpu"))
            x, sigma = batch.noisy.clone(), float(batch.sigma)
            x[:, :, 0] = rollout["trajectory.latents"][0][:, 0]
            time = torch.cat([torch.zeros(tokens), torch.full(((frames - 1) * tokens,), 1000 * sigma)])[None]

            with torch.no_grad():
                old, base = (scaled_velocity(model, scale, x, time)[:, :, 1:] for scale in (1.0, 0.0))
            v = scaled_velocity(model, NFT_SCALE, x, time)[:, :, 1:]
            clean, noisy = batch.clean[:, :, 1:], x[:, :, 1:]
            plus, minus = beta * v + (1 - beta) * old, (1 + beta) * old - beta * v
            r = item.advantage / 10 + 0.5
            policy = (
                5.0
                * (r * nft_error(noisy - sigma * plus - clean) + (1 - r) * nft_error(noisy - sigma * minus - clean))
                / beta
            )
            losses.append(policy + weight * ((v - base) ** 2).mean())
            (losses[-1] / 8).backward()
    return {name: parameter.grad for name, parameter in adapter.items()}
