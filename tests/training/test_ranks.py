"""Two real FSDP2 ranks over gloo: parity with the engine, gradients, checkpoints, export, refusals."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_data import GOLDEN, ti2v_rollout, write_model_folder
from rank_references import ALPHA, RANK, reference_gradients, reference_nft_gradients, relative, start_adapter
from ranks import ITEMS, NFT_SCALE
from safetensors.torch import load_file

from miles_wan.wan.lora import save_adapter

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Any:
    """What both ranks saw, in one run of all scenarios."""
    folder = tmp_path_factory.mktemp("ranks")
    write_model_folder(folder / "model")
    adapter = start_adapter()
    save_adapter(folder / "adapter", adapter, rank=RANK, alpha=ALPHA)
    path = os.pathsep.join([str(GOLDEN.parent), os.environ.get("PYTHONPATH", "")])
    processes, logs = [], []
    for rank in range(2):
        logs.append((folder / f"log_{rank}").open("w+"))
        command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(rank), "2", str(folder)]
        environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, stdout=logs[-1], stderr=subprocess.STDOUT, env=environment))
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, code in enumerate(codes):
        logs[rank].seek(0)
        assert code == 0, f"rank {rank}: {logs[rank].read()[-2000:]}"
    seen = [torch.load(folder / f"results_{rank}.pt", weights_only=False) for rank in range(2)]
    return SimpleNamespace(ranks=seen, folder=folder, adapter=adapter)


def test_the_nft_gradients_are_those_of_one_process_with_all_the_data(results):
    expected = reference_nft_gradients()
    for rank in results.ranks:
        assert relative(rank["nft"]["gradients"], expected) <= 1e-5
    metrics = results.ranks[0]["nft"]["metrics"]
    assert metrics["train/nft_velocity_change"] > 0
    assert metrics["train/nft_reference_loss"] > 0
    assert "train/log_prob_pairs" not in metrics


def test_the_average_is_back_in_its_place_after_an_nft_step(results):
    seen = results.ranks[0]["nft"]
    for name, tensor in results.adapter.items():
        assert torch.equal(seen["before"]["ema"][name], tensor)
        assert torch.allclose(seen["before"]["policy"][name], NFT_SCALE * tensor)
        assert torch.allclose(seen["policy"][name], NFT_SCALE * tensor)  # the rate is 0


@pytest.mark.parametrize(("rise", "decays"), [("None", [0.75, 0.75, 0.75]), ("0.3", [0.3, 0.6, 0.75])])
def test_the_average_follows_its_formula(results, rise, decays):
    for rank in results.ranks:
        history = rank["average"][rise]
        expected = dict(history[0][0])
        assert all(torch.equal(history[0][1][name], tensor) for name, tensor in expected.items())
        for decay, (policy, average) in zip(decays, history[1:], strict=True):
            expected = {name: decay * tensor + (1 - decay) * policy[name] for name, tensor in expected.items()}
            for name, tensor in expected.items():
                assert torch.allclose(average[name], tensor, rtol=1e-5, atol=1e-7)
    stored = load_file(results.folder / f"exported average {rise}" / "pytorch_lora_weights.safetensors")
    for name, tensor in results.ranks[0]["average"][rise][-1][1].items():
        assert torch.equal(stored[f"transformer.{name}"], tensor)


def test_recomputed_log_probs_begin_at_ratio_one_where_the_engines_do_not(results):
    engine, recompute = (results.ranks[0]["old_policies"][old] for old in ("engine", "recompute"))
    assert engine["train/log_prob_gap_max"] > 1e-3  # another adapter than the engine's
    assert recompute["train/log_prob_gap_max"] == engine["train/log_prob_gap_max"]
    assert engine["train/ratio_minus_one_max_before_update"] > 1e-3
    assert recompute["train/ratio_minus_one_max_before_update"] <= 1e-6
    assert recompute["train/ratio_mean"] != 1  # the second step comes after the first one's update


def test_parity_is_told_by_step(results):
    metrics = results.ranks[0]["parity"][1]["metrics"]
    kept = {k for rank in ITEMS for steps, _ in ITEMS[rank] for k in steps}
    for figure in ("log_prob_gap", "mean_gap"):
        largest = {
            int(name.rsplit("/", 1)[1]): v for name, v in metrics.items() if name.startswith(f"parity/{figure}_max/")
        }
        assert set(largest) == kept
        assert max(largest.values()) <= 1e-5
        assert all(metrics[f"parity/{figure}_mean/{step}"] <= value for step, value in largest.items())
    moved = results.ranks[0]["old_policies"]["engine"]
    assert max(value for name, value in moved.items() if name.startswith("parity/mean_gap_max/")) > 1e-3


def test_parameters_are_split_over_the_ranks(results):
    total = results.ranks[0]["sharding"]["report"].total_parameters
    assert sum(rank["sharding"]["local"] for rank in results.ranks) == total
    assert all(rank["sharding"]["local"] < 0.6 * total for rank in results.ranks)
    assert all(rank["sharding"]["sharded_blocks"] == 2 for rank in results.ranks)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rank_holds_what_was_estimated_and_rank_0_says_so(results, dtype):
    seen = [rank["sharding"][dtype] for rank in results.ranks]
    assert seen[0]["held"] == seen[0]["share"]  # the first rank has the largest pieces
    assert seen[1]["held"] <= seen[1]["share"]
    assert seen[0]["text"] in seen[0]["logged"]
    assert seen[0]["text"].startswith("mesh fsdp = 2: a rank holds")


def test_a_mesh_that_does_not_shard_is_refused(results):
    for rank in results.ranks:
        assert "the mesh does not shard the model" in rank["unsharded"]


@pytest.mark.parametrize("steps", [1, 2])
def test_the_sharded_forward_gives_the_engines_log_probs_before_any_update(results, steps):
    metrics = results.ranks[0]["parity"][steps]["metrics"]
    assert metrics["train/log_prob_gap_max"] <= 1e-5
    assert metrics["train/log_prob_gap_mean"] <= metrics["train/log_prob_gap_max"]
    assert metrics["train/ratio_minus_one_max_before_update"] <= 1e-5
    assert metrics["train/log_prob_pairs"] == sum(len(kept) for rank in ITEMS for kept, _ in ITEMS[rank])
    assert metrics["train/optimizer_steps"] == steps
    # A large rate: pairs of the second step, compared after the first one, would show a gap.
    assert results.ranks[0]["parity"][steps]["moved"]


def test_metrics_are_equal_on_all_ranks(results):
    first, second = (rank["gradients"]["kl"]["metrics"] for rank in results.ranks)
    assert first == second
    weights = [abs(advantage) for rank in ITEMS for kept, advantage in ITEMS[rank] for _ in kept]
    assert first["train/advantage_abs_mean"] == pytest.approx(sum(weights) / len(weights))
    assert first["train/kl"] > 0
    assert first["train/loss"] == pytest.approx(first["train/policy_loss"] + 0.3 * first["train/kl"], rel=1e-6)


@pytest.mark.parametrize("case", ["micro 1", "micro 2", "micro 4", "checkpointing", "kl negligible"])
def test_gradients_are_those_of_one_process_with_all_the_data(results, case):
    expected = reference_gradients()
    assert all(bool((gradient != 0).any()) for gradient in expected.values())
    for rank in results.ranks:
        assert relative(rank["gradients"][case]["gradients"], expected) <= 1e-5


def test_gradients_without_guidance(results):
    expected = reference_gradients(guidance=1.0)
    assert relative(results.ranks[0]["gradients"]["no guidance"]["gradients"], expected) <= 1e-5


@pytest.mark.parametrize("case", ["guard", "dppo", "clip higher", "noise level", "recompute", "guard recompute"])
def test_gradients_of_every_loss(results, case):
    expected = reference_gradients(loss_name=case)
    assert relative(expected, reference_gradients()) > 1e-3
    for rank in results.ranks:
        # float32: guard's division by -d (0.05 to 0.2) takes the rounding of its late steps with it.
        assert relative(rank["gradients"][case]["gradients"], expected) <= (2e-5 if "guard" in case else 1e-5)


@pytest.mark.parametrize("case", ["kl", "kl checkpointing"])
def test_gradients_with_the_kl_to_the_base(results, case):
    expected = reference_gradients(kl_beta=0.3)
    assert relative(results.ranks[0]["gradients"][case]["gradients"], expected) <= 1e-5
    assert relative(expected, reference_gradients()) > 1e-3


@pytest.mark.parametrize("checkpointing", ["False", "True"])
def test_gradients_with_the_kl_to_the_average(results, checkpointing):
    expected = reference_gradients(kl_beta=0.3, scale=NFT_SCALE, reference_scale=1.0)
    assert relative(expected, reference_gradients(kl_beta=0.3, scale=NFT_SCALE)) > 1e-3
    for rank in results.ranks:
        assert relative(rank["kl_to_the_average"][checkpointing], expected) <= 1e-5


def test_the_reference_pass_leaves_gradients_and_adapters_as_they_are(results):
    for rank in results.ranks:
        without, with_pass = rank["gradients"]["micro 2"], rank["gradients"]["kl negligible"]
        assert relative(with_pass["gradients"], without["gradients"]) <= 1e-6
        assert with_pass["trainable"] == without["trainable"] == len(results.adapter)


@pytest.mark.parametrize(("plain", "recomputed"), [("micro 2", "checkpointing"), ("bf16", "bf16 checkpointing")])
def test_activation_checkpointing_leaves_gradients_as_they_are(results, plain, recomputed):
    for rank in results.ranks:
        gradients = rank["gradients"]
        assert relative(gradients[recomputed]["gradients"], gradients[plain]["gradients"]) <= 1e-6


def test_a_bf16_base_keeps_float32_adapters_that_move_at_a_small_rate(results):
    for rank in results.ranks:
        seen = rank["gradients"]["bf16"]
        assert seen["moved"] == set(results.adapter)  # lr 1e-5: less than half a bf16 step of most weights
        assert {tensor.dtype for tensor in seen["adapter"].values()} == {torch.float32}
        assert {gradient.dtype for gradient in seen["gradients"].values()} == {torch.float32}
        assert seen["moments"] == {torch.float32}


def test_bf16_does_not_round_the_timesteps(results):
    sigmas = ti2v_rollout()["trajectory.sigmas"]
    for rank, items in ITEMS.items():
        times = results.ranks[rank]["gradients"]["bf16"]["times"]
        assert times.dtype == torch.float32
        assert set(times.flatten().tolist()) == {0.0, *((sigmas[k] * 1000).item() for k in items[0][0])}
    # What the arithmetic of bf16 costs; rounded timesteps cost more than ten times that.
    assert relative(results.ranks[0]["gradients"]["bf16"]["gradients"], reference_gradients()) < 0.04


def test_ranks_hold_one_adapter_after_an_update_with_different_data(results):
    first, second = (rank["agreement"] for rank in results.ranks)
    assert first["before"] == second["before"]
    assert first["after"] == second["after"]
    assert first["before"] != first["after"]
    for seen in (first, second):
        assert "ranks hold different adapters" in seen["error"]


def equal_states(first: dict[str, Any], second: dict[str, Any]) -> bool:
    tensors = [
        (a, second[group][key]) for group in ("weights", "moments", "average") for key, a in first[group].items()
    ]
    return (
        all(torch.equal(a, b) for a, b in tensors)
        and first["scheduler"] == second["scheduler"]
        and first["lr"] == second["lr"]
    )


def test_a_checkpoint_restores_weights_moments_schedule_and_random_state_bitwise(results):
    for rank in results.ranks:
        seen = rank["resume"]
        assert equal_states(seen["saved"], seen["loaded"])
        assert torch.equal(seen["saved"]["random"], seen["loaded"]["random"])
        assert not equal_states(seen["saved"], seen["after"])
        assert {float(v) for (_, key), v in seen["loaded"]["moments"].items() if key == "step"} == {2.0}
    assert not torch.equal(*(rank["resume"]["loaded"]["random"] for rank in results.ranks))


def test_a_resumed_worker_goes_on_as_if_never_stopped(results):
    for rank in results.ranks:
        seen = rank["resume"]
        assert seen["again"] == seen["continued"]
        assert equal_states(seen["after"], seen["after_again"])


def test_the_logged_rate_is_the_one_that_was_used(results):
    # Warm-up of one step from 0, then a cosine over the remaining three: step 1 is at its start.
    assert results.ranks[0]["resume"]["rates"] == pytest.approx([0.0, 1e-2])
    half = 1e-2 * 0.5 * (1 + math.cos(math.pi / 3))
    assert results.ranks[0]["resume"]["continued"]["train/lr"] == pytest.approx(half)


def test_a_checkpoint_that_does_not_fit_is_refused_with_the_remedy(results):
    for rank in results.ranks:
        for case in ("other rank", "nothing"):
            assert rank["resume"][case].startswith("CheckpointError: could not read the checkpoint")
            assert "Resume with the configuration it was written with" in rank["resume"][case]


def test_an_export_holds_the_rows_of_both_ranks(results):
    stored = load_file(results.folder / "exported" / "pytorch_lora_weights.safetensors")
    assert len(stored) == len(results.adapter)
    for name, tensor in stored.items():
        assert tensor.shape == results.adapter[name.removeprefix("transformer.")].shape
        half = len(tensor) // 2
        assert bool((tensor[:half] == 1).all())
        assert bool((tensor[half:] == 2).all())


@pytest.mark.parametrize("case", ["wrong log-prob", "nan log-prob", "other grid", "other image", "perturbed adapter"])
def test_a_gap_above_the_bound_stops_every_rank_before_a_weight_moves(results, case):
    for rank in results.ranks:
        seen = rank["refusals"][case]
        assert seen["error"] is not None
        assert seen["error"].startswith("ParityError: engine and trainer differ by")
        assert "max_log_prob_gap = 0.0001" in seen["error"]
        assert not seen["moved"]


def test_a_gradient_that_is_not_finite_is_refused(results):
    for rank in results.ranks:
        seen = rank["refusals"]["nan advantage"]
        assert seen["error"].startswith("MilesWanError: the gradient norm is nan in rollout 0")
        assert not seen["moved"]


def test_a_clip_range_below_the_numeric_noise_is_a_warning_on_one_rank(results):
    first, second = (rank["warnings"] for rank in results.ranks)
    assert len(first[1e-3]) == 1
    assert "differ by up to 1.0e-02" in first[1e-3][0]
    assert "clip_range = 0.001" in first[1e-3][0]
    assert first[0.1] == second[1e-3] == second[0.1] == []
