"""A whole checkpoint with its adapters folded in. In: a checkpoint folder and an adapter folder as training writes it. Out: a
folder that diffusers, an engine or the next training loads without adapters. All or nothing; it knows no training.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diffusers import WanTransformer3DModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from miles_wan.errors import InputError, MilesWanError, first_line
from miles_wan.wan.experts import Experts
from miles_wan.wan.family import ModelFolder, load_family
from miles_wan.wan.folders import folder_bytes, space_fault, whole_folder
from miles_wan.wan.load import load_transformer, meta_transformer, stored_dtype, stored_shapes, weight_file_faults
from miles_wan.wan.lora import PREFIX, WEIGHTS_NAME, adapter_file, adapter_folder, adapter_metadata, layer_prefix
from miles_wan.wan.merge import merged_weights, save_weights, with_adapter
from miles_wan.wan.quantization import Quantization, parameter_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Adapter:
    """A stored adapter: its file and alpha (None: it is the rank, as diffusers reads it)."""

    file: Path
    alpha: float | None

    def merged_into(self, transformer: WanTransformer3DModel) -> dict[str, Tensor]:
        """The weights that ``transformer`` computes with, the adapter folded in."""
        weights = dict(merged_weights(transformer))
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(self.file).items()}
        for layer in {layer_prefix(name) for name in tensors}:
            a, b = (tensors[f"{layer}.lora_{side}.weight"] for side in "AB")
            scaling = 1.0 if self.alpha is None else self.alpha / a.shape[0]
            weights[f"{layer}.weight"] = with_adapter(weights[f"{layer}.weight"], a, b, scaling=scaling)
        return weights


def export_checkpoint(
    model: Path, adapter: Path, out: Path, *, quantization: Quantization = "none", dtype: str | None = None
) -> Mapping[str, Path | None]:
    """Write ``out``: the checkpoint with W + alpha / r B A for W; all other files are copied.

    Args:
        model: checkpoint folder.
        adapter: of one transformer a folder or file; of two a folder that holds one in transformer/, in transformer_2/ or in
            both. An expert without one stays as it is.
        out: must not exist.
        quantization: what the adapter was trained on. It is then folded into the dequantised weights.
        dtype: ``bf16`` or ``fp32``, by default what the checkpoint is stored in. The dequantised weights are the trainer's, bit
            for bit, if it is the trainer's.

    Returns:
        By expert, the file of the adapter that it was given, or None.

    Raises:
        InputError: with every fault of model, adapters, ``out`` and disk.
        MilesWanError: it could not be written.
    """
    faults = [f"--out: {out}: exists already; choose another folder or move it away"] if os.path.lexists(out) else []
    try:
        folder = load_family(model)
    except InputError as error:
        raise InputError([*(f"--model: {fault}" for fault in error.faults), *faults]) from error
    if model.resolve() in out.resolve().parents:
        faults.append(f"--out: {out}: lies inside the checkpoint; choose another folder")
    dtype = dtype or stored_dtype(model / folder.experts[0])
    plain = meta_transformer(folder.transformer, dtype=dtype)
    for expert in folder.experts:
        faults += [f"--model: {fault}" for fault in weight_file_faults(model / expert, plain)]
    adapters = _read_adapters(adapter, folder.routing, plain, faults)
    others = [entry for entry in model.iterdir() if entry.name not in folder.experts and not entry.name.startswith(".")]
    needed = parameter_bytes(plain) * len(folder.experts)
    needed += sum(folder_bytes(entry, links=True) if entry.is_dir() else entry.stat().st_size for entry in others)
    if fault := space_fault(out, needed):
        faults.append(f"--out: {out}: the checkpoint {fault}; choose another disk or free some space")
    if faults:
        raise InputError(faults)
    try:
        _write(folder, adapters, others, out, dtype=dtype, quantization=quantization)
    except (OSError, SafetensorError) as error:
        raise MilesWanError(f"{out} could not be written ({error}); free space, or choose another folder") from error
    return {name: own.file if own is not None else None for name, own in adapters.items()}


def _write(
    folder: ModelFolder,
    adapters: Mapping[str, _Adapter | None],
    others: list[Path],
    out: Path,
    *,
    dtype: str,
    quantization: Quantization,
) -> None:
    with whole_folder(out) as partial:
        for entry in others:
            logger.info("copying %s", entry.name)
            (shutil.copytree if entry.is_dir() else shutil.copyfile)(entry, partial / entry.name)
        for name, adapter in adapters.items():
            logger.info("writing %s, %s", name, f"with {adapter.file}" if adapter else "which has no adapter")
            transformer = load_transformer(folder.path, dtype=dtype, subfolder=name, quantization=quantization)
            weights = adapter.merged_into(transformer) if adapter else dict(merged_weights(transformer))
            save_weights(transformer.config, weights, partial / name)
            del transformer, weights  # before the next expert is read


def _read_adapters(
    root: Path, experts: Experts, plain: WanTransformer3DModel, faults: list[str]
) -> dict[str, _Adapter | None]:
    files = {name: adapter_file(adapter_folder(root, name, experts)) for name in experts.names}
    if not any(file.is_file() for file in files.values()):
        places = " and/or ".join(str(adapter_folder(root, name, experts) / WEIGHTS_NAME) for name in files)
        faults.append(f"--adapter: {root}: holds no adapter for this model; it is looked for at {places}")
    return {name: _read_adapter(file, plain, faults) if file.is_file() else None for name, file in files.items()}


def _read_adapter(file: Path, plain: WanTransformer3DModel, faults: list[str]) -> _Adapter | None:
    """The adapter in ``file``, from its header. What does not fit ``plain`` is added to ``faults``."""
    try:
        shapes = {name.removeprefix(PREFIX): shape for name, shape in stored_shapes(file).items()}
        metadata = adapter_metadata(file)
    except Exception as error:  # safetensors, JSON, the file system: each has errors of its own
        faults.append(f"--adapter: {file} is not a readable adapter in safetensors format ({first_line(error)})")
        return None
    special = [key for key in ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora") if metadata.get(key)]
    if special:
        faults.append(f"--adapter: {file} has {', '.join(special)}, which is not merged; merge it with peft")
    linear = {name: module for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    wanted: dict[str, tuple[int, ...]] = {}
    for layer in {layer_prefix(name) for name in shapes} & linear.keys():
        rank = next((shape[0] for name, shape in shapes.items() if name == f"{layer}.lora_A.weight"), 0)
        wanted[f"{layer}.lora_A.weight"] = (rank, linear[layer].in_features)
        wanted[f"{layer}.lora_B.weight"] = (linear[layer].out_features, rank)
    if wrong := sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)):
        first = wrong[0]
        faults.append(
            f"--adapter: {file} does not fit this model: {len(wrong)} tensors differ, first {first}, which is "
            f"{shapes.get(first, 'missing')} and should be {wanted.get(first, 'absent')}; give the model it was trained on"
        )
    return _Adapter(file, metadata.get("lora_alpha"))
