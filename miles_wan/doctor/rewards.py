"""Checks the rewards: functions are imported, model and processor folders looked into. Hub ids are not looked up on the
network.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import is_offline_mode

from miles_wan.config import RewardFunction
from miles_wan.doctor.clip import clip_model_faults
from miles_wan.errors import InputError, first_line
from miles_wan.rewards.registry import BUILT_IN, user_function
from miles_wan.wan.family import looks_like_hub_id, weight_file_fault


def reward_faults(function: RewardFunction) -> list[str]:
    """Why this reward cannot score: an own function that cannot be called, files that are missing or broken."""
    if function.name not in BUILT_IN:
        try:
            user_function(function.name)
        except InputError as error:
            return [f"reward.functions: {fault}" for fault in error.faults]
        return []
    if function.name == "clip":
        faults = [f"model {function.model}: {fault}" for fault in clip_model_faults(function.model)]
        if function.processor:
            faults.append(f"processor {function.processor}: the model brings its own; remove this line")
        return [f"reward.functions: clip: {fault}" for fault in faults]
    fields = {"model": "config.json", "processor": "preprocessor_config.json"}
    faults = []
    for field, file in fields.items():
        value = getattr(function, field)
        if fault := _reward_source_fault(value, is_model=field == "model", file=file):
            faults.append(f"reward.functions: {function.name}: {field} {value}: {fault}")
    return faults


def _reward_source_fault(value: str, *, is_model: bool, file: str) -> str | None:
    path = Path(os.path.expanduser(value))
    if path.is_dir():
        return _reward_folder_fault(path, is_model=is_model)
    if os.path.exists(path):
        return "is a file; give the folder that holds it"
    if not looks_like_hub_id(value):
        return "no such folder; give a CLIP folder or a hub id"
    if is_offline_mode() and not isinstance(try_to_load_from_cache(value, file), str):
        return "no such folder, and as a hub id it is not in the cache while HF_HUB_OFFLINE is set; give a folder"
    return None


def _reward_folder_fault(path: Path, *, is_model: bool) -> str | None:
    if not is_model:
        return _processor_fault(path)
    if not (path / "config.json").is_file():
        return "holds no config.json; give a CLIP folder"
    try:
        kind = json.loads((path / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return f"config.json is not readable ({error}); fetch the model again"
    if kind != "clip":
        return f"is a model of type {kind!r}; pickscore is a CLIP model (model_type clip)"
    weights = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    if not weights:
        return "holds no weights (*.safetensors); fetch the model again"
    broken = (fault for file in path.glob("*.safetensors") if (fault := weight_file_fault(file)) is not None)
    return next(broken, None) or _weights_fault(path)


def _weights_fault(path: Path) -> str | None:
    """Do the weights fit the configuration? Names and shapes only."""
    import torch
    from transformers import CLIPConfig, CLIPModel  # slow to import

    from miles_wan.wan.load import weight_file_faults

    try:
        with torch.device("meta"):
            model = CLIPModel(CLIPConfig.from_pretrained(path, local_files_only=True))
    except Exception as error:  # whatever transformers meets in values it does not check
        return f"config.json describes no CLIP ({first_line(error)}); fetch the model again"
    # Files of older versions of transformers hold more than the model: position ids.
    return next(iter(weight_file_faults(path, model, file="model.safetensors", exact=False)), None)


def _processor_fault(path: Path) -> str | None:
    known = ("processor_config.json", "preprocessor_config.json")
    if not any((path / name).is_file() for name in known):
        return f"holds none of {', '.join(known)}"
    from transformers import CLIPProcessor  # slow to import

    try:
        processor = CLIPProcessor.from_pretrained(path, local_files_only=True)
        words = [tuple(processor.tokenizer(text)["input_ids"]) for text in ("red", "der")]
    except Exception as error:  # JSON, missing vocabulary, odd classes: the library raises whatever it met
        return f"does not load as a CLIP processor ({first_line(error)}); fetch it again"
    if words[0] == words[1]:  # transformers makes an empty vocabulary where the files are missing
        return "its tokenizer cannot tell texts apart: the vocabulary (tokenizer.json) is missing; fetch it again"
    return None
