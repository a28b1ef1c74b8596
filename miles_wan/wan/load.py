"""Loads the transformer of a diffusers-format checkpoint, quantized if asked, and builds one without weights for counting."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from transformers import UMT5Config, UMT5EncoderModel

from miles_wan.errors import InputError, first_line
from miles_wan.wan.quantization import Quantization, quantize_transformer

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_EIGHT_BITS = ("I8", "U8", "F8_")  # as safetensors names the types


def load_transformer(
    model_path: Path, *, dtype: str, subfolder: str = "transformer", quantization: Quantization = "none"
) -> WanTransformer3DModel:
    """The transformer in evaluation mode on the CPU. ``from_pretrained`` keeps the parts that must stay float32 (rope
    tables, time embedder, modulation tables, norm2) in float32 under bf16; ``.to(bfloat16)`` would not.

    Args:
        model_path: the checkpoint.
        dtype: a key of ``DTYPES``, the compute type.
        subfolder: which expert.
        quantization: how the linear layers of the blocks are stored. They are rounded from their values in ``dtype``, so
            that equal arguments give equal weights; what that costs and saves is logged by the first rank.

    Raises:
        InputError: the weight files lack tensors or hold others than the configuration says (diffusers would fill the gaps
            with random numbers), hold weights in 8 bits, or ones that cannot be quantized.
    """
    if faults := _eight_bit_faults(model_path / subfolder):
        raise InputError(faults)
    transformer, info = WanTransformer3DModel.from_pretrained(
        str(model_path),
        subfolder=subfolder,
        torch_dtype=DTYPES[dtype],
        local_files_only=True,
        output_loading_info=True,
    )
    strange = {kind: names for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if (names := info[kind])}
    if strange:
        found = "; ".join(
            f"{len(names)} {kind.replace('_', ' ')}, e.g. {next(iter(names))}" for kind, names in strange.items()
        )
        raise InputError(
            [f"{model_path / subfolder}: the weights do not fit config.json ({found}); download the folder again"]
        )
    if quantization != "none":
        report = quantize_transformer(transformer, quantization)
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.info("%s: %s", subfolder, report.text)
    return transformer.eval()


def meta_transformer(
    config: Mapping[str, Any], *, dtype: str = "fp32", quantization: Quantization = "none"
) -> WanTransformer3DModel:
    """A transformer of this configuration on the meta device: names, shapes and types as ``load_transformer`` gives
    them, no memory.

    Raises:
        InputError: values that make no transformer.
    """
    try:
        with torch.device("meta"):
            transformer = WanTransformer3DModel.from_config({k: v for k, v in config.items() if not k.startswith("_")})
    except Exception as error:  # whatever diffusers meets in values it does not check
        raise InputError([f"config.json describes no Wan transformer ({first_line(error)}); fetch it again"]) from error
    stay = WanTransformer3DModel._keep_in_fp32_modules
    for name, parameter in transformer.named_parameters():
        if not any(part in name.split(".") for part in stay):
            parameter.data = parameter.data.to(DTYPES[dtype])
    if quantization != "none":
        quantize_transformer(transformer, quantization)
    return transformer


def other_weight_faults(model_path: Path) -> list[str]:
    """As ``weight_file_faults`` for the VAE and the text encoder, which only the engine loads: it logs missing VAE weights
    and goes on."""
    faults = []
    for name, build, file in (
        ("vae", _meta_vae, SAFETENSORS_WEIGHTS_NAME),
        ("text_encoder", _meta_text_encoder, "model.safetensors"),
    ):
        folder = model_path / name
        try:
            with torch.device("meta"):
                component = build(folder)
        except Exception as error:
            faults.append(f"{folder}: config.json describes no {name} ({first_line(error)}); fetch it again")
        else:
            # Files of the text encoder may hold one of two tied tensors, and more than the encoder.
            faults += weight_file_faults(folder, component, file=file, exact=name == "vae")
    return faults


def _meta_vae(folder: Path) -> torch.nn.Module:
    return AutoencoderKLWan.from_config(AutoencoderKLWan.load_config(folder, local_files_only=True))


def _meta_text_encoder(folder: Path) -> torch.nn.Module:
    return UMT5EncoderModel(UMT5Config.from_pretrained(folder, local_files_only=True))


def weight_file_faults(
    folder: Path,
    module: torch.nn.Module,
    *,
    file: str = SAFETENSORS_WEIGHTS_NAME,
    config: str = "config.json",
    exact: bool = True,
) -> list[str]:
    """Compare the headers of a component's weight files with the names and shapes of ``module``; reads no weights.
    Files in another layout than safetensors are left to the loader.

    Args:
        file: name of the weight file; an index beside it names shards instead.
        config: name of the file that ``module`` follows from, for the message.
        exact: whether more tensors than those of ``module`` are a fault, and each of two tied ones must be there.
    """
    files = _weight_files(folder, file)
    if not files:
        return []
    stored = {name: shape for path in files for name, shape in stored_shapes(path).items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if not exact:
        tied = getattr(module, "_tied_weights_keys", None) or {}
        spare = {*tied, *(tied.values() if isinstance(tied, dict) else ())}
        wanted = {name: shape for name, shape in wanted.items() if name in stored or name not in spare}
        stored = {name: shape for name, shape in stored.items() if name in wanted}
    found = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - wanted.keys()),
        "of another shape": sorted(name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name]),
    }
    told = [f"{len(names)} {kind}, first {names[0]}" for kind, names in found.items() if names]
    faults = (
        [f"{folder}: the weights do not fit {config} ({'; '.join(told)}); download the folder again"] if told else []
    )
    return [*faults, *(_eight_bit_faults(folder) if isinstance(module, WanTransformer3DModel) else [])]


def _weight_files(folder: Path, file: str = SAFETENSORS_WEIGHTS_NAME) -> list[Path]:
    """The weight file, or all shards of its index; none if one is missing."""
    index = folder / f"{file}.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {file}
    files = [folder / str(shard) for shard in sorted(shards)]
    return files if all(path.is_file() for path in files) else []


def _eight_bit_faults(folder: Path) -> list[str]:
    """Files of weights in 8 bits: they mean nothing without their scales, which diffusers does not read."""
    found = []
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as handle:
            types = {name: str(handle.get_slice(name).get_dtype()) for name in handle.keys()}  # noqa: SIM118 - no mapping
        found += [(path, name, kind) for name, kind in types.items() if kind.startswith(_EIGHT_BITS)]
    if not found:
        return []
    path, name, kind = found[0]
    return [
        f"{folder}: {len(found)} weights are stored in 8 bits, first {name} ({kind}) of {path.name}, and would be read without "
        "their scales; give the checkpoint in bf16 or fp32 and set model.quantization"
    ]


def stored_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a safetensors file, from its header."""
    with safe_open(file, framework="pt") as handle:
        return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118 - no mapping
