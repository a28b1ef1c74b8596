"""Adapters into a running SGLang server. In: handles to the tensors and their digests. Out: a report, only when the server
has confirmed every digest under its own name. SGLang says "success" for layers it skipped: its message is read as well.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence

from miles_wan.errors import WeightSyncError
from miles_wan.rollout.base import SyncReport, WeightPush
from miles_wan.rollout.sglang.client import SGLangClient, reason
from miles_wan.rollout.sglang.identity import LAYER_NAMES_PATH

_UPDATE = "/update_weights_from_tensor"
_CHECK = "/update_weights_from_tensor_checker"
_TENSOR_NAME = re.compile(r"^(?P<layer>.+)\.(?P<factor>lora_[AB])\.weight$")
_REPLY = re.compile(r"Updated (?P<updated>\d+) LoRA layers .*skipped (?P<skipped>\d+) unknown")


async def apply_adapter(client: SGLangClient, push: WeightPush) -> SyncReport:
    """Replace the adapter of one module and prove that every worker holds it.

    Raises WeightSyncError if a name maps to nothing, a layer is skipped, or a digest differs; EngineError if the server
    died or hangs.
    """
    started = time.monotonic()
    layers = adapter_layers(push.digests)
    names = await engine_layer_names(client, layers)
    await _send(client, push, num_layers=len(layers))
    await _confirm(client, push, names)
    return SyncReport(
        tensors=len(push.digests),
        layer_prefixes=len(layers),
        unmapped=0,  # anything else was an error above
        bytes=push.nbytes,
        seconds=time.monotonic() - started,
        policy_version=push.policy_version,
    )


def adapter_layers(tensor_names: Iterable[str]) -> tuple[str, ...]:
    """The layers that ``LAYER.lora_A.weight`` / ``LAYER.lora_B.weight`` name, in order. Raises WeightSyncError."""
    factors: dict[str, set[str]] = {}
    strange = []
    for name in tensor_names:
        match = _TENSOR_NAME.match(name)
        if match is None:
            strange.append(name)
        else:
            factors.setdefault(match["layer"], set()).add(match["factor"])
    if strange:
        raise WeightSyncError(
            f"not adapter tensors: {', '.join(strange[:5])}; names end with .lora_A.weight or .lora_B.weight"
        )
    single = [layer for layer, found in factors.items() if len(found) == 1]
    if single:
        raise WeightSyncError(f"{len(single)} layers have only one of lora_A and lora_B, e.g. {single[0]}")
    if not factors:
        raise WeightSyncError("the adapter is empty")
    return tuple(factors)


async def engine_layer_names(client: SGLangClient, layers: Sequence[str]) -> Mapping[str, str]:
    """The engine's name of each diffusers layer, one to one. Raises WeightSyncError, EngineError."""
    response = await client.post(LAYER_NAMES_PATH, {"names": list(layers)})
    if response.status_code != 200:
        raise WeightSyncError(f"the engine gave no layer names: HTTP {response.status_code} {reason(response)}")
    names: dict[str, str | None] = response.json()
    found = {layer: name for layer in layers if (name := names.get(layer)) is not None}
    lost = [layer for layer in layers if layer not in found]
    if lost:
        raise WeightSyncError(f"{len(lost)} layers have no name of their own in the engine, e.g. {lost[0]}")
    if len(set(found.values())) != len(found):
        raise WeightSyncError("two layers of the adapter have the same name in the engine")
    return found


async def _send(client: SGLangClient, push: WeightPush, *, num_layers: int) -> None:
    body = {
        "serialized_named_tensors": list(push.payloads),
        "payload_gpu_uuids": list(push.device_uuids) if push.device_uuids else None,
        "load_format": "flattened_bucket",
        "target_modules": [push.target_module],
        "weight_update_mode": "lora_merge",
        "lora_alpha": push.alpha,
        "lora_rank": push.rank,
    }
    response = await client.post(_UPDATE, body)
    message = reason(response)
    if response.status_code != 200 or not response.json().get("success"):
        raise WeightSyncError(f"the engine refused the adapter: HTTP {response.status_code} {message}")
    match = _REPLY.search(message)
    if match is None:
        raise WeightSyncError(f"the engine's reply to an adapter is not understood: {message}")
    updated, skipped = int(match["updated"]), int(match["skipped"])
    if skipped or updated != num_layers:
        raise WeightSyncError(f"sent {num_layers} layers, the engine updated {updated} and did not know {skipped}")


async def _confirm(client: SGLangClient, push: WeightPush, names: Mapping[str, str]) -> None:
    expected = {}
    for name, digest in push.digests.items():
        layer, factor, _ = name.rsplit(".", 2)
        expected[f"{names[layer]}.{factor}"] = digest
    body = {"target_module": push.target_module, "expected_named_tensors_sha256": expected}
    response = await client.post(_CHECK, body)
    if response.status_code != 200 or not response.json().get("success"):
        raise WeightSyncError(f"the engine does not hold the adapter that was sent: {reason(response)}")
