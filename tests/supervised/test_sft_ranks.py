"""Two real FSDP2 ranks against one, for all families, adapters and whole transformers: routing, gradients, steps, exports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from sft_ranks import FAMILIES
from torch import Tensor
from toy_clips import write_toy_clips

from miles_wan.data import load_clips
from miles_wan.data.video import ClipFormat
from miles_wan.supervised.encode import ClipLibrary
from miles_wan.tiny import make_tiny
from miles_wan.wan.family import load_family
from miles_wan.wan.lora import WEIGHTS_NAME

pytestmark = pytest.mark.e2e

METHODS = ("lora", "full")
CASES = [(family, method) for family in FAMILIES for method in METHODS]
EXACT = 1e-5  # relative: the order of a float32 sum


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one rank and two ranks saw, started together."""
    folder = tmp_path_factory.mktemp("sft ranks")
    for short, family in FAMILIES.items():
        assets = make_tiny(folder / f"assets {short}", family=family, train_records=1, eval_records=1)
        (folder / short).symlink_to(assets.model)
    write_toy_clips(folder / "clips", train=5, evaluation=1, frames=5, every_second_wide=True)
    script = Path(__file__).with_name("sft_ranks.py")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = []
    for world_size, rank in ((1, 0), (2, 0), (2, 1)):
        log = (folder / f"log {world_size} {rank}").open("w+")
        command = [sys.executable, str(script), str(rank), str(world_size), str(folder)]
        started.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment), log))
    try:
        codes = [process.wait(timeout=600) for process, _ in started]
    finally:
        for process, _ in started:
            process.kill()
    for code, (_, log) in zip(codes, started, strict=True):
        log.seek(0)
        assert code == 0, log.read()[-3000:]

    def read(world_size: int, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(folder / f"seen_{world_size}_{rank}.pt", weights_only=False)
        return found

    return SimpleNamespace(folder=folder, one=read(1, 0), two=[read(2, 0), read(2, 1)])


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm."""
    assert found.keys() == expected.keys()
    difference = sum(float(((found[name] - expected[name]).double() ** 2).sum()) for name in expected)
    return (difference / sum(float((value.double() ** 2).sum()) for value in expected.values())) ** 0.5


def furthest(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("family", "method"), CASES)
def test_two_ranks_compute_what_one_does(seen: Any, family: str, method: str) -> None:
    one = seen.one["families"][family, method]
    assert len(set(one["sizes"])) == 2  # two aspect buckets in one batch
    assert {draw.expert for draw in one["draws"]} == (
        {"transformer"} if family == "ti2v" else {"transformer", "transformer_2"}
    )
    for rank in seen.two:
        two = rank["families"][family, method]
        assert two["draws"] == one["draws"]
        assert furthest(two["losses"], one["losses"]) <= EXACT
        assert distance(two["gradients"], one["gradients"]) <= EXACT
        for step, losses in enumerate(one["curve"]):
            assert furthest(two["curve"][step], losses) <= EXACT
        assert distance(two["weights"], one["weights"]) <= EXACT


@pytest.mark.parametrize("family", list(FAMILIES))
def test_losses_are_those_of_diffusers_called_by_hand(seen: Any, family: str) -> None:
    run = seen.one["families"][family, "lora"]  # adapters begin at zero
    model, wanted = load_family(seen.folder / family), ClipFormat(sizes=((32, 32), (64, 32)), num_frames=5, fps=None)
    library = ClipLibrary(seen.folder / "cache", model, wanted, device=torch.device("cpu"))
    encoded = library.encode(load_clips(seen.folder / "clips" / "train.jsonl").records)
    assert encoded.made == 0
    if family == "ti2v":
        assert len({draw.with_image for draw in run["draws"]}) == 2
    for draw, loss in zip(run["draws"], run["losses"], strict=True):
        clip = library.load(encoded.clips[draw.clip], with_text=draw.with_text)
        transformer = WanTransformer3DModel.from_pretrained(model.path / draw.expert)
        noise = torch.randn(clip.latent.shape, generator=torch.Generator().manual_seed(draw.noise_seed))
        sigma = draw.timestep / 1000
        state, timestep, start = (1 - sigma) * clip.latent + sigma * noise, torch.tensor([draw.timestep]), 0
        _, frames, height, width = state.shape
        if draw.with_image and family == "ti2v":  # the clean first frame, whose tokens have timestep 0
            state[:, 0], start = clip.latent[:, 0], 1
            tokens = height // 2 * width // 2
            timestep = torch.tensor([[0.0] * tokens + [draw.timestep] * tokens * (frames - 1)])
        if family == "i2v":  # mask and first frame beside the state
            assert clip.condition is not None
            state = torch.cat([state, clip.condition])
        with torch.no_grad():
            velocity = transformer(state[None], timestep, clip.prompt_embeds[None]).sample[0]
        error = (velocity - (noise - clip.latent))[:, start:] ** 2
        assert loss == pytest.approx(float(error.mean()), rel=EXACT)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_every_trained_weight_gets_a_gradient(seen: Any, family: str, method: str) -> None:
    run = seen.one["families"][family, method]
    assert run["gradients"].keys() == run["weights"].keys()
    moved = [name for name, value in run["gradients"].items() if bool((value != 0).any())]
    # A begins behind a zero B, so that its first gradient is zero.
    assert len(moved) == len(run["gradients"]) // (2 if method == "lora" else 1)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_mixed_batch_is_the_mean_of_its_samples_alone(seen: Any, family: str) -> None:
    for rank in seen.two:
        samples = rank["samples"][family]
        losses, gradients = samples["mixed"]
        count = len(samples["draws"])
        assert furthest(losses, [own[0] for own, _ in samples["alone"]]) <= EXACT
        mean = {name: torch.zeros_like(value) for name, value in gradients.items()}
        for _, own in samples["alone"]:
            for name, value in own.items():
                mean[name] += value / count
        assert distance(gradients, mean) <= EXACT


def test_micro_batches_and_checkpointing_change_nothing(seen: Any) -> None:
    expected = seen.one["families"]["t2v", "lora"]
    for rank in seen.two:
        for losses, gradients in rank["settings"].values():
            assert furthest(losses, expected["losses"]) <= EXACT
            assert distance(gradients, expected["gradients"]) <= EXACT


def test_an_expert_without_samples_gets_no_update_and_no_decay(seen: Any) -> None:
    for rank in seen.two:
        run = rank["one_sided"]
        assert set(run["norms"]) == {None, "transformer_2"}
        for name, before in run["before"].items():
            if name.startswith("transformer."):
                assert torch.equal(run["middle"][name], before), name
            elif "lora_B" in name:
                assert not torch.equal(run["middle"][name], before), name


def test_ranks_with_samples_of_different_experts_step_both_together(seen: Any) -> None:
    first, second = (rank["one_sided"] for rank in seen.two)
    for name, middle in first["middle"].items():
        assert torch.equal(first["after"][name], second["after"][name])
        assert not torch.equal(first["after"][name], middle)


def test_a_resumed_trainer_goes_on_bit_for_bit(seen: Any) -> None:
    for rank in seen.two:
        gone_on, resumed = rank["resume"]["curves"]
        assert resumed == gone_on
        gone_on, resumed = rank["resume"]["weights"]
        assert all(torch.equal(resumed[name], value) for name, value in gone_on.items())


def test_full_fine_tuning_in_bf16_keeps_float32_weights(seen: Any) -> None:
    half, exact = (seen.two[0]["half_precision"][dtype] for dtype in ("bf16", "fp32"))
    assert half["types"] == {torch.float32}
    # bf16 has 8 bits of mantissa: a product errs by 2^-9; the loss is a mean over thousands of them
    assert 0 < furthest(half["losses"], exact["losses"]) < 2**-9
    assert 0 < distance(half["gradients"], exact["gradients"]) < 2**-5


@pytest.mark.parametrize("family", list(FAMILIES))
def test_whole_transformers_are_read_back_by_diffusers(seen: Any, family: str) -> None:
    weights = seen.two[0]["families"][family, "full"]["weights"]
    folder = seen.folder / f"export {family} full 2"
    for name in ("transformer",) if family == "ti2v" else ("transformer", "transformer_2"):
        state = WanTransformer3DModel.from_pretrained(folder / name).state_dict()
        assert state.keys() == {key.removeprefix(f"{name}.") for key in weights if key.startswith(f"{name}.")}
        for key, value in state.items():
            assert torch.equal(value, weights[f"{name}.{key}"]), key


def test_adapters_of_both_experts_are_read_back_by_diffusers(seen: Any) -> None:
    weights = seen.two[0]["families"]["t2v", "lora"]["weights"]
    folder = seen.folder / "export t2v lora 2"
    pipeline = WanPipeline.from_pretrained(seen.folder / "t2v")
    for name, second in (("transformer", False), ("transformer_2", True)):
        pipeline.load_lora_weights(
            folder / name, weight_name=WEIGHTS_NAME, adapter_name="trained", load_into_transformer_2=second
        )
    for name in ("transformer", "transformer_2"):
        loaded = dict(getattr(pipeline, name).named_parameters())
        own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        assert own
        for key, value in own.items():
            assert torch.equal(loaded[key.removesuffix(".weight") + ".trained.weight"], value), key
