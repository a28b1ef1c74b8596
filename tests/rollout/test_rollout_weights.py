"""Adapters into the real server: what is pushed is what it computes with, and nothing is lost in silence."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rollout_replay import (
    ALPHA,
    RANK,
    as_push,
    as_update,
    digests_differ,
    make_request,
    mappings_of_ours,
    push,
    random_adapter,
    replayed_log_probs,
    zeroed,
)

from miles_wan.errors import WeightSyncError
from miles_wan.records import PromptRecord
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.rollout.sglang.payload import serialize_update, tensor_digest
from miles_wan.rollout.sglang.weights import adapter_layers

pytestmark = pytest.mark.e2e


def merged(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A copy of the model with W + (alpha / rank) B A in every layer of the adapter."""
    copied = copy.deepcopy(model)
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = copied.get_submodule(name.removesuffix(".lora_A.weight"))
            b = tensors[name.replace("lora_A", "lora_B")]
            layer.weight.data += ALPHA / RANK * b @ a
    return copied


def test_pushed_adapters_are_what_the_engine_computes_with(
    engine: SGLangEngine, transformer: Any, record: PromptRecord, run: Any
) -> None:
    request = make_request(record)
    base = run(engine.generate(request, [0]))[0].trajectory
    first, second = random_adapter(transformer, 1), random_adapter(transformer, 2)

    report = run(push(engine, first, version=5))
    assert (report.tensors, report.layer_prefixes, report.unmapped, report.policy_version) == (40, 20, 0, 5)
    assert report.bytes == sum(tensor.numel() * 4 for tensor in first.values())
    output = run(engine.generate(request, [0], return_conditioning=True))[0]
    assert np.abs(output.trajectory.latents - base.latents).max() > 1e-3
    replayed = replayed_log_probs(merged(transformer, first), output.trajectory, output.conditioning, guidance=3.0)
    np.testing.assert_allclose(output.trajectory.log_probs, replayed.numpy(), atol=1e-5)

    run(push(engine, second))  # replaces, does not add
    output = run(engine.generate(request, [0], return_conditioning=True))[0]
    replayed = replayed_log_probs(merged(transformer, second), output.trajectory, output.conditioning, guidance=3.0)
    np.testing.assert_allclose(output.trajectory.log_probs, replayed.numpy(), atol=1e-5)

    run(push(engine, zeroed(first)))
    np.testing.assert_array_equal(run(engine.generate(request, [0]))[0].trajectory.latents, base.latents)


def test_the_parity_gap_shows_one_perturbed_tensor(
    engine: SGLangEngine, transformer: Any, record: PromptRecord, run: Any
) -> None:
    pushed = random_adapter(transformer, 3)
    ours = dict(pushed)
    ours["blocks.1.ffn.net.2.lora_B.weight"] = ours["blocks.1.ffn.net.2.lora_B.weight"] + 0.2
    run(push(engine, pushed))
    output = run(engine.generate(make_request(record), [0], return_conditioning=True))[0]
    run(push(engine, zeroed(pushed)))
    replayed = replayed_log_probs(merged(transformer, ours), output.trajectory, output.conditioning, guidance=3.0)
    assert np.abs(output.trajectory.log_probs - replayed.numpy()).max() > 1e-4


def test_a_dynamic_adapter_leaves_the_base_weights_alone(engine: SGLangEngine, transformer: Any, run: Any) -> None:
    tensors = random_adapter(transformer, 4)
    run(push(engine, tensors))
    names = run(engine.layer_names(adapter_layers(tensors)))
    expected = {
        f"{name}.base_layer.weight": tensor_digest(transformer.get_submodule(layer).weight.detach())
        for layer, name in names.items()
    }
    assert digests_differ(run, engine._started, expected) == ""
    run(push(engine, zeroed(tensors)))


def test_a_bfloat16_adapter_arrives_as_it_was_sent(engine: SGLangEngine, transformer: Any, run: Any) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in zeroed(random_adapter(transformer, 1)).items()}
    assert run(push(engine, tensors)).bytes == sum(tensor.numel() * 2 for tensor in tensors.values())


def test_the_engine_keeps_nothing_of_the_senders_memory(engine: SGLangEngine, transformer: Any, run: Any) -> None:
    payload = serialize_update(as_update(zeroed(random_adapter(transformer, 1))), "cpu", consumers=2)
    run(engine.apply_weights(as_push(payload)))
    payload.release()
    assert not mappings_of_ours(run(engine.identity())["pid"])


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda name: f"transformer.{name}", "No LoRA layers updated.*20 unknown"),
        (
            lambda name: name.replace("blocks.1.", "blocks.7."),
            "sent 20 layers, the engine updated 10 and did not know 10",
        ),
    ],
)
def test_names_that_map_to_nothing_are_an_error(
    engine: SGLangEngine, transformer: Any, run: Any, rename: Any, message: str
) -> None:
    tensors = {rename(name): tensor for name, tensor in zeroed(random_adapter(transformer, 1)).items()}
    with pytest.raises(WeightSyncError, match=message):
        run(push(engine, tensors))


def test_one_changed_value_is_an_error(engine: SGLangEngine, transformer: Any, run: Any) -> None:
    tensors = zeroed(random_adapter(transformer, 1))
    payload = serialize_update(as_update(tensors), "cpu", consumers=2)
    tensors["blocks.0.attn1.to_q.lora_A.weight"][0, 0] += 1e-6
    changed = serialize_update(as_update(tensors), "cpu", consumers=2)
    with pytest.raises(WeightSyncError, match=r"checksum mismatch for 1 tensor\(s\): blocks.0.to_q.lora_A"):
        run(engine.apply_weights(replace(as_push(payload), payloads=changed.texts)))
    payload.release()
    changed.release()


def test_an_expert_that_the_model_does_not_have_is_an_error(engine: SGLangEngine, transformer: Any, run: Any) -> None:
    payload = serialize_update(as_update(zeroed(random_adapter(transformer, 1))), "cpu", consumers=2)
    with pytest.raises(WeightSyncError, match="transformer_2"):
        run(engine.apply_weights(replace(as_push(payload), target_module="transformer_2")))
    payload.release()


def test_a_payload_that_is_no_payload_is_an_error(engine: SGLangEngine, transformer: Any, run: Any) -> None:
    payload = serialize_update(as_update(zeroed(random_adapter(transformer, 1))), "cpu", consumers=2)
    with pytest.raises(WeightSyncError, match="refused the adapter"):
        run(engine.apply_weights(replace(as_push(payload), payloads=("AAAA",))))
    payload.release()


def test_every_layer_of_the_model_has_a_name_of_its_own_in_the_engine(
    engine: SGLangEngine, transformer: Any, run: Any
) -> None:
    layers = [name for name, layer in transformer.named_modules() if isinstance(layer, torch.nn.Linear)]
    names = run(engine.layer_names(layers))
    assert set(names) == set(layers)
    assert len(set(names.values())) == len(layers)
    assert names["blocks.1.attn1.to_out.0"] == "blocks.1.to_out"
    assert names["blocks.1.ffn.net.2"] == "blocks.1.ffn.fc_out"
