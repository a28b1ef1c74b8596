"""LoRA adapters of a Wan transformer: injection through peft, names, counts, and the diffusers file format.

Names without a prefix are diffusers names, e.g. ``blocks.0.attn1.to_q.lora_A.weight``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from miles_wan.config import ModelConfig
from miles_wan.errors import InputError
from miles_wan.records import derived_seed
from miles_wan.wan.experts import Experts
from miles_wan.wan.load import stored_shapes
from miles_wan.wan.model import WanModel
from miles_wan.wan.quantization import parameter_count

ADAPTER = "default"
WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
METADATA_KEY = "lora_adapter_metadata"
PREFIX = "transformer."


@dataclass(frozen=True)
class ModelReport:
    """What is trained: parameter counts, transformer blocks, adapter tensors and the layers that carry a pair."""

    trainable_parameters: int
    total_parameters: int
    blocks: int
    lora_tensors: int
    layer_prefixes: int


def lora_config(transformer: WanTransformer3DModel, *, rank: int, alpha: int, targets: Sequence[str]) -> LoraConfig:
    """The adapter configuration for ``targets`` inside the transformer blocks.

    Raises:
        InputError: a target that matches no linear layer of a block.
    """
    layers = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    unmatched = [t for t in targets if not any(re.fullmatch(_pattern([t]), name) for name in layers)]
    if unmatched:
        known = sorted({name.split(".", 2)[2] for name in layers if name.startswith("blocks.")})
        raise InputError(
            [
                f"model.lora_targets: {t!r} matches no linear layer of a block; layers are {', '.join(known)}"
                for t in unmatched
            ]
        )
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=_pattern(targets), init_lora_weights=True)


def _pattern(targets: Sequence[str]) -> str:
    return r"blocks\.\d+\.(?:.*\.)?(?:" + "|".join(re.escape(target) for target in targets) + ")"


def inject_lora(
    transformer: WanTransformer3DModel, *, rank: int, alpha: int, targets: Sequence[str], seed: int
) -> None:
    """Freeze the transformer and add float32 adapters (A from ``seed``, B zero). Call before sharding: adapters added
    to a sharded model silently keep their gradients local."""
    transformer.requires_grad_(False)
    config = lora_config(transformer, rank=rank, alpha=alpha, targets=targets)
    # peft makes its layers on the CPU first, whatever the device of the model: on the meta device that would cost memory.
    meta = torch.device("meta") if next(transformer.parameters()).is_meta else nullcontext()
    with torch.random.fork_rng(devices=[]), meta:
        torch.manual_seed(seed)
        transformer.add_adapter(config, adapter_name=ADAPTER)
    for _, parameter in trainable_parameters(transformer):
        parameter.data = parameter.data.float()


def add_adapters(model: WanModel, settings: ModelConfig, *, names: Sequence[str], seed: int) -> None:
    """Freeze a model and give the transformers in ``names`` their adapters, each with a start of its own.

    Args:
        seed: of the run.

    Raises:
        InputError: a target without layers, or an initial adapter that does not fit.
    """
    for name, transformer in model.items():
        if name not in names:
            transformer.requires_grad_(False)
            continue
        own = () if name == model.experts.names[0] else (name,)
        inject_lora(
            transformer,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            targets=settings.lora_targets,
            seed=derived_seed(seed, "lora", *own),
        )
        if settings.init_adapter is not None:
            path = adapter_folder(Path(settings.init_adapter), name, model.experts)
            load_adapter(transformer, path, alpha=settings.lora_alpha)


def trainable_parameters(transformer: WanTransformer3DModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(diffusers name, parameter) of every adapter tensor, in the model's order."""
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            yield name.replace(f".{ADAPTER}.weight", ".weight"), parameter


def report(*transformers: WanTransformer3DModel) -> ModelReport:
    """Count parameters and adapters of all together; works on the meta device and on sharded models."""
    reports = [_report(transformer) for transformer in transformers]
    totals = {field.name: sum(getattr(one, field.name) for one in reports) for field in fields(ModelReport)}
    return ModelReport(**totals)


def _report(transformer: WanTransformer3DModel) -> ModelReport:
    names = [name for name, _ in trainable_parameters(transformer)]
    return ModelReport(
        trainable_parameters=sum(p.numel() for _, p in trainable_parameters(transformer)),
        total_parameters=parameter_count(transformer),
        blocks=len(transformer.blocks),
        lora_tensors=len(names),
        layer_prefixes=len({layer_prefix(name) for name in names}),
    )


def layer_prefix(name: str) -> str:
    """``blocks.0.attn1.to_q.lora_A.weight`` -> ``blocks.0.attn1.to_q``."""
    return name.rsplit(".lora_", 1)[0]


def save_adapter(directory: Path, tensors: Mapping[str, Tensor], *, rank: int, alpha: int) -> None:
    """Write the adapter in diffusers format: ``pipeline.load_lora_weights(directory)`` reads it, alpha included."""
    metadata = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": _suffixes(tensors),
        "rank_pattern": {},  # diffusers reads both without a default
        "alpha_pattern": {},
        "lora_dropout": 0.0,
        "bias": "none",
    }
    WanPipeline.save_lora_weights(
        str(directory),
        transformer_lora_layers={name: tensor.contiguous().cpu() for name, tensor in tensors.items()},
        transformer_lora_adapter_metadata=metadata,
    )


def _suffixes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Layer names inside a block (``attn1.to_q``), as a list that JSON can hold and peft matches by suffix."""
    return sorted({layer_prefix(name).split(".", 2)[2] for name in tensors})


def load_adapter(transformer: WanTransformer3DModel, path: Path, *, alpha: int) -> None:
    """Copy an adapter file or folder (diffusers format) into the injected, not yet sharded adapters.

    Raises:
        InputError: file missing or broken, other layers, other rank or alpha.
    """
    if faults := adapter_faults(transformer, path, alpha=alpha):
        raise InputError(faults)
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(adapter_file(path)).items()}
    with torch.no_grad():
        for name, parameter in trainable_parameters(transformer):
            parameter.copy_(stored[name])


def adapter_folder(path: Path, name: str, experts: Experts) -> Path:
    """Where the adapter of one expert lies below ``path``: itself for a model with one, else a folder with the component's
    name. diffusers loads each of the two with ``load_lora_weights``, the second with ``load_into_transformer_2=True``."""
    return path if len(experts.names) == 1 else path / name


def adapter_file(path: Path) -> Path:
    """The weights of an adapter given as folder or file."""
    return path / WEIGHTS_NAME if path.is_dir() else path


def adapter_faults(transformer: WanTransformer3DModel, path: Path, *, alpha: int) -> list[str]:
    """Why the adapter at ``path`` does not fit the adapters injected into ``transformer``, from its header alone."""
    file = adapter_file(path)
    if not file.is_file():
        return [f"model.init_adapter: {path}: holds no adapter; give a folder with {WEIGHTS_NAME}, or the file"]
    try:
        stored = {name.removeprefix(PREFIX): shape for name, shape in stored_shapes(file).items()}
        metadata = _metadata(file)
    except Exception as error:  # safetensors, JSON, the file system: each has errors of its own
        return [f"model.init_adapter: {file} is not a readable adapter in safetensors format ({error}); save it again"]
    own = {name: tuple(parameter.shape) for name, parameter in trainable_parameters(transformer)}
    faults = _first(
        [
            f"model.init_adapter: {file} lacks {name}; set model.lora_targets as it was trained"
            for name in own
            if name not in stored
        ]
    )
    faults += _first(
        [
            f"model.init_adapter: {file} has {name}, which model.lora_targets leaves out"
            for name in stored
            if name not in own
        ]
    )
    faults += _first(
        [
            f"model.init_adapter: {name} is {stored[name]}, expected {shape}; set model.lora_rank"
            for name, shape in own.items()
            if name in stored and stored[name] != shape
        ]
    )
    stored_alpha = metadata.get("lora_alpha")
    if metadata.get("rank_pattern") or metadata.get("alpha_pattern"):
        faults.append(
            f"model.init_adapter: {file} has ranks or alphas of its own for some layers; train one with a single rank and alpha"
        )
    if stored_alpha is not None and stored_alpha != alpha:
        faults.append(
            f"model.init_adapter: {file} was trained with alpha {stored_alpha}, model.lora_alpha is {alpha}; make them equal"
        )
    return faults


def _first(faults: list[str], limit: int = 5) -> list[str]:
    """The same fault of every layer is one fault: name a few layers and count the rest."""
    rest = len(faults) - limit
    return [*faults[:limit], f"model.init_adapter: ... and {rest} more of this kind"] if rest > 0 else faults


def _metadata(file: Path) -> dict[str, Any]:
    """The adapter's configuration, as diffusers stores it beside the tensors; empty without one."""
    with safe_open(file, "pt") as handle:
        metadata = json.loads((handle.metadata() or {}).get(METADATA_KEY, "{}"))
    return {key.removeprefix(PREFIX): value for key, value in metadata.items()}
