"""Checks the model of the reward ``clip`` as open_clip would find it: a folder, a hub id or architecture:tag. Reads
headers, no weights, and does not look on the network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import is_offline_mode

from miles_wan.errors import first_line
from miles_wan.wan.family import looks_like_hub_id, weight_file_fault

CONFIG = "open_clip_config.json"
_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_GIVE = f"give a folder in the format of open_clip ({CONFIG} and weights), a hub id or architecture:tag"


def clip_model_faults(model: str) -> list[str]:
    """Why open_clip would not load ``model``; every fault of a folder is told."""
    path = Path(os.path.expanduser(model.removeprefix("local-dir:")))
    if path.is_dir():
        return _folder_faults(path)
    if os.path.exists(path):
        return ["is a file; give the folder that holds it"]
    model_id = model.removeprefix("hf-hub:")
    if looks_like_hub_id(model_id):
        return _cache_faults(model_id, (CONFIG,), _WEIGHTS)
    architecture, _, tag = model.partition(":")
    if "/" in model or not tag or model.startswith(("hf-hub:", "local-dir:")):
        return [f"no such folder; {_GIVE}"]
    return _tag_faults(architecture, tag)


def _cache_faults(model_id: str, *needed: Sequence[str]) -> list[str]:
    """A fault if the hub must not be asked and the cache lacks all names of one entry of ``needed``."""
    if not is_offline_mode():
        return []
    if all(any(isinstance(try_to_load_from_cache(model_id, name), str) for name in names) for names in needed):
        return []
    return [f"{model_id} is not whole in the cache of the model hub while HF_HUB_OFFLINE is set; give a folder"]


def _tag_faults(architecture: str, tag: str) -> list[str]:
    import open_clip  # slow to import

    models, tags = open_clip.list_models(), open_clip.list_pretrained_tags_by_model(architecture)
    for name, value, known in (("architecture", architecture, models), ("tag", tag, tags)):
        if value not in known:
            close = get_close_matches(value, known, n=1, cutoff=0.6) or known
            hint = f"known here: {', '.join(close[:8])}" if close else "this architecture has no released weights"
            return [f"open_clip has no {name} {value!r} ({hint}); {_GIVE}"]
    model_id, file = os.path.split(open_clip.get_pretrained_cfg(architecture, tag).get("hf_hub", ""))
    return _cache_faults(model_id, (file, *_WEIGHTS) if file else _WEIGHTS) if model_id else []


def _folder_faults(path: Path) -> list[str]:
    from open_clip.factory import _find_checkpoint_in_dir  # the order in which open_clip looks for weights

    from miles_wan.rewards.clip import quiet_open_clip

    with quiet_open_clip():
        found = _find_checkpoint_in_dir(path)
    faults = [] if found else [f"holds no weights ({_WEIGHTS[0]}); fetch the model again"]
    broken = weight_file_fault(Path(found)) if found and found.endswith(".safetensors") else None
    if broken is not None:
        faults.append(broken)
    config, fault = _read_config(path)
    if config is None:
        return [fault, *faults]
    tokenizer_fault = _tokenizer_fault(path, config)
    if tokenizer_fault is not None:
        faults.append(tokenizer_fault)
    if "hf_model_name" in config["text_cfg"]:  # its text tower follows from files on the hub
        return faults
    return faults + _model_faults(path, Path(found) if found and broken is None else None)


def _read_config(path: Path) -> tuple[dict[str, Any] | None, str]:
    file = path / CONFIG
    if not file.is_file():
        is_transformers = (path / "config.json").is_file()
        hint = " (this is the format of transformers; the reward pickscore reads it)" if is_transformers else ""
        return None, f"holds no {CONFIG}{hint}; {_GIVE}"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{CONFIG} is not readable ({error}); fetch the model again"
    config = content.get("model_cfg") if isinstance(content, dict) else None
    towers = [config.get(name) for name in ("vision_cfg", "text_cfg")] if isinstance(config, dict) else []
    if not towers or not all(isinstance(tower, dict) for tower in towers):
        return None, f"{CONFIG} has no model_cfg with vision_cfg and text_cfg: it is none of open_clip; {_GIVE}"
    return config, ""


def _tokenizer_fault(path: Path, config: Mapping[str, Any]) -> str | None:
    import open_clip

    from miles_wan.rewards.clip import quiet_open_clip

    try:
        with quiet_open_clip():
            tokens = open_clip.get_tokenizer(f"local-dir:{path}")(["red", "der"])
    except Exception as error:  # missing vocabulary, odd classes: the libraries raise whatever they met
        return f"its tokenizer does not load ({first_line(error)}); fetch the model again"
    if bool((tokens[0] == tokens[1]).all()):
        return "its tokenizer cannot tell texts apart: the vocabulary is missing; fetch the model again"
    return None


def _model_faults(path: Path, weights: Path | None) -> list[str]:
    """Does the configuration make a model, and do the weights fit it? Names and shapes only."""
    import open_clip
    import torch

    from miles_wan.rewards.clip import quiet_open_clip
    from miles_wan.wan.load import weight_file_faults

    try:
        with quiet_open_clip(), torch.device("meta"):
            model = open_clip.create_model(f"local-dir:{path}", load_weights=False, device="meta")
    except Exception as error:  # whatever open_clip meets in values it does not check
        return [f"{CONFIG} describes no CLIP ({first_line(error)}); fetch the model again"]
    if weights is None or weights.suffix != ".safetensors":
        return []
    return weight_file_faults(path, model, file=weights.name, config=CONFIG)
