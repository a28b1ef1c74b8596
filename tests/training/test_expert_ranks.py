"""Two experts under one optimizer on two real FSDP2 ranks over gloo: gradients, an expert without samples, checkpoints,
exports. The reference is plain diffusers, pair by pair, in one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from expert_items import ETA, GUIDANCE, HIGH, SCENARIOS, SIGMAS, items
from golden_data import GOLDEN
from peft import LoraConfig, set_peft_model_state_dict
from torch import Tensor

from miles_wan.flow import transition
from miles_wan.records import TrainItem
from miles_wan.tiny import TinyPaths
from miles_wan.wan.lora import WEIGHTS_NAME, save_adapter

pytestmark = pytest.mark.e2e

EXPERTS = ("transformer", "transformer_2")
RANK, ALPHA = 4, 8
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]


def plain(model: Path, expert: str) -> WanTransformer3DModel:
    """diffusers' transformer with an adapter that is not zero, by peft alone."""
    transformer = WanTransformer3DModel.from_pretrained(model, subfolder=expert)
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
    set_peft_model_state_dict(transformer, start_adapter(model, expert))
    return transformer


@cache
def start_adapter(model: Path, expert: str) -> dict[str, Tensor]:
    transformer = WanTransformer3DModel.from_pretrained(model, subfolder=expert)
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS))
    draw = torch.Generator().manual_seed(EXPERTS.index(expert))
    return {
        name.replace(".default", ""): 0.1 * torch.randn(parameter.shape, generator=draw)
        for name, parameter in transformer.named_parameters()
        if "lora_" in name
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, t2v_paths: TinyPaths, i2v_paths: TinyPaths) -> Any:
    folder = tmp_path_factory.mktemp("experts")
    for start, expert in (("both", EXPERTS[0]), ("both", EXPERTS[1]), ("high", EXPERTS[0])):
        tensors = start_adapter(t2v_paths.model, expert)
        save_adapter(folder / f"adapter_{start}" / expert, tensors, rank=RANK, alpha=ALPHA)
    path = os.pathsep.join([str(GOLDEN.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    script, models = Path(__file__).with_name("expert_ranks.py"), (str(t2v_paths.model), str(i2v_paths.model))
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder), *models],
            stdout=(folder / f"log_{rank}").open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, code in enumerate(codes):
        assert code == 0, f"rank {rank}: {(folder / f'log_{rank}').read_text()[-2000:]}"
    seen = [torch.load(folder / f"results_{rank}.pt", weights_only=False) for rank in range(2)]
    return SimpleNamespace(ranks=seen, folder=folder, t2v=t2v_paths.model, i2v=i2v_paths.model)


def expert_of(step: int) -> str:
    return EXPERTS[0 if step in HIGH else 1]


def velocity(transformer: WanTransformer3DModel, item: TrainItem, k: int, *, guidance: float) -> Tensor:
    conditioning, trajectory = item.conditioning, item.trajectory
    x = torch.from_numpy(trajectory.latents[k, 0])[None]
    if conditioning.condition_latent is not None:
        x = torch.cat([x, torch.from_numpy(conditioning.condition_latent)[None]], dim=1)
    time = 1000 * SIGMAS[trajectory.steps[k]][None]
    positive, negative = (
        transformer(
            hidden_states=x, timestep=time, encoder_hidden_states=torch.from_numpy(text)[None], return_dict=False
        )[0]
        for text in (conditioning.prompt_embeds, conditioning.negative_prompt_embeds)
    )
    return negative + guidance * (positive - negative)


def reference(model: Path, scenario: str, *, channels: int = 0) -> dict[str, dict[str, Tensor]]:
    """Gradients of mean over all pairs of -A ratio at ratio 1: -A d log p."""
    everyone = [item for rank in (0, 1) for item in items(scenario, rank, channels=channels)]
    transformers = {expert: plain(model, expert) for expert in EXPERTS}
    pairs = sum(len(item.trajectory.steps) for item in everyone)
    for item in everyone:
        for k, step in enumerate(item.trajectory.steps):
            expert = expert_of(step)
            v = velocity(transformers[expert], item, k, guidance=GUIDANCE[expert])
            scored = transition(
                "flow_sde", torch.from_numpy(item.trajectory.latents[k, 0])[None], v,
                sigma=SIGMAS[step], sigma_next=SIGMAS[step + 1], sigma_max=SIGMAS[1], noise_level=ETA,
                next_sample=torch.from_numpy(item.trajectory.latents[k, 1])[None],
            )  # fmt: skip
            (-item.advantage * scored.log_prob.sum() / pairs).backward()
    return {
        expert: {n.replace(".default", ""): p.grad for n, p in t.named_parameters() if p.grad is not None}
        for expert, t in transformers.items()
    }


def gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    total = sum(float(((ours[n] - theirs[n]).double() ** 2).sum()) for n in ours)
    return (total / sum(float((theirs[n].double() ** 2).sum()) for n in theirs)) ** 0.5


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_are_those_of_single_pairs_with_the_expert_and_guidance_of_each(results: Any, scenario: str) -> None:
    expected = reference(results.t2v, scenario)
    for rank in results.ranks:
        found = rank[scenario]["gradients"]
        for expert in EXPERTS:
            assert found[expert].keys() == expected[expert].keys()
            if expected[expert]:
                assert gap(found[expert], expected[expert]) <= 1e-5


def test_i2v_too(results: Any) -> None:
    expected = reference(results.i2v, "mixed", channels=20)
    for expert in EXPERTS:
        assert gap(results.ranks[0]["i2v"]["gradients"][expert], expected[expert]) <= 1e-5


def test_an_expert_without_samples_gets_no_update_and_no_decay(results: Any) -> None:
    for rank in results.ranks:
        seen = rank["high alone"]
        assert all(
            torch.equal(seen["before"]["transformer_2"][n], t) for n, t in seen["after"]["transformer_2"].items()
        )
        assert not any(
            torch.equal(seen["before"]["transformer"][n], t) for n, t in seen["after"]["transformer"].items()
        )
        assert not any(name.endswith("/low") for name in seen["metrics"])


def test_each_expert_is_counted_and_has_its_own_gradient_norm(results: Any) -> None:
    metrics = results.ranks[0]["mixed"]["metrics"]
    steps = [step for own in SCENARIOS["mixed"].values() for kept, _ in own for step in kept]
    high = sum(step in HIGH for step in steps)
    assert (metrics["train/pairs/high"], metrics["train/pairs/low"]) == (high, len(steps) - high)
    assert metrics["train/log_prob_pairs"] == len(steps)
    both = (metrics["train/grad_norm/high"] ** 2 + metrics["train/grad_norm/low"] ** 2) ** 0.5
    assert metrics["train/grad_norm"] == pytest.approx(both, rel=1e-6)
    mean = (high * metrics["train/loss/high"] + (len(steps) - high) * metrics["train/loss/low"]) / len(steps)
    assert metrics["train/loss"] == pytest.approx(mean, rel=1e-5)


def test_a_checkpoint_of_before_the_second_expert_s_first_step_continues_equally(results: Any) -> None:
    for rank in results.ranks:
        for expert in EXPERTS:
            for name, tensor in rank["continued"]["after"][expert].items():
                assert torch.equal(rank["again"]["after"][expert][name], tensor)
                assert not torch.equal(rank["continued"]["before"][expert][name], tensor)


def test_one_expert_alone_is_loaded_trained_and_counted(results: Any) -> None:
    half = results.ranks[0]["half"]
    assert half["trained"] == half["loaded"] == ("transformer",)
    assert half["report"].layer_prefixes == 20
    whole = results.ranks[0]["high alone"]["gradients"]["transformer"]
    assert gap(half["gradients"]["transformer"], whole) <= 1e-6


def test_diffusers_loads_the_export_into_both_experts_and_computes_the_same(results: Any) -> None:
    pipeline = WanPipeline.from_pretrained(results.t2v, local_files_only=True)
    for expert in EXPERTS:
        pipeline.load_lora_weights(
            str(results.folder / "exported" / expert),
            weight_name=WEIGHTS_NAME,
            load_into_transformer_2=expert == "transformer_2",
        )
    draw = torch.Generator().manual_seed(5)
    inputs = {
        "hidden_states": torch.randn(1, 16, 2, 4, 4, generator=draw),
        "timestep": torch.tensor([930.0]),
        "encoder_hidden_states": torch.randn(1, 7, 32, generator=draw),
        "return_dict": False,
    }
    for expert in EXPERTS:
        own = plain(results.t2v, expert)
        set_peft_model_state_dict(own, results.ranks[0]["high alone"]["after"][expert])
        loaded = getattr(pipeline, expert)
        with torch.no_grad():
            ours, theirs = own(**inputs)[0], loaded(**inputs)[0]
            loaded.disable_adapters()
            base = loaded(**inputs)[0]
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
        assert float((theirs - base).abs().max()) > 1e-3
