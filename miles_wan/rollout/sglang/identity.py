"""What a server of ours says about itself. In: the engine's own settings. Out: plain JSON for the client that started it
(a secret token, the state of the hooks, the model class it took) and the engine's names of the trainer's layers. Runs
inside the engine's HTTP process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

PATH = "/miles_wan/identity"
LAYER_NAMES_PATH = "/miles_wan/layer_names"
TOKEN_VARIABLE = "MILES_WAN_ENGINE_TOKEN"


def describe_server(server_args: Any) -> dict[str, Any]:
    """The identity answer: token of the starter's environment, process, hooks, and the settings that change numbers."""
    from sglang.multimodal_gen.runtime.entrypoints.openai.common_api import get_served_pipeline_class
    from sglang.version import __version__

    from miles_wan.rollout.sglang.plugin import hook_states

    config = server_args.pipeline_config
    pipeline = get_served_pipeline_class(server_args)
    return {
        "token": os.environ.get(TOKEN_VARIABLE, ""),
        "pid": os.getpid(),
        "engine_version": __version__,
        "hooks": hook_states(),
        "pipeline_config": type(config).__name__,
        "pipeline_class": pipeline.__name__ if pipeline else None,
        "model_path": server_args.model_path,
        "flow_shift": config.flow_shift,
        "dit_precision": config.dit_precision,
        "tp_size": server_args.tp_size,
        "sp_size": server_args.sp_degree,
        "lora_merge_mode": server_args.lora_merge_mode,
    }


def server_layer_names(server_args: Any, layers: Sequence[str]) -> Mapping[str, str | None]:
    """The engine's name of each diffusers layer, by the engine's own rules; None where it is part of a fused layer."""
    from sglang.multimodal_gen.runtime.loader.utils import get_param_names_mapping

    arch = server_args.pipeline_config.dit_config.arch_config
    rules = [
        get_param_names_mapping(rule) for rule in (arch.lora_param_names_mapping, arch.param_names_mapping) if rule
    ]
    names: dict[str, str | None] = {}
    for layer in layers:
        name, fused = f"{layer}.weight", False
        for rule in rules:
            name, index, _ = rule(name)
            fused = fused or index is not None
        names[layer] = None if fused else name.removesuffix(".weight")
    return names
