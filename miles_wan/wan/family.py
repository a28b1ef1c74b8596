"""Which Wan2.2 model a folder holds. In: a checkpoint folder in diffusers format. Out: the facts of its family and what
its own files say, or every fault of the folder. It reads ``model_index.json`` and the configurations of the components,
never the folder's name and never a whole weight file; it knows no engine and no trainer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from miles_wan.errors import InputError, first_line
from miles_wan.wan.experts import Experts
from miles_wan.wan.facts import FAMILIES, ImageConditioning, WanFamily, family_named, legal_frames, legal_size

__all__ = [
    "FAMILIES",
    "ModelFolder",
    "WanFamily",
    "check_model_folder",
    "family_named",
    "legal_frames",
    "legal_size",
    "load_family",
    "looks_like_hub_id",
    "resolve_model",
]

MODEL_INDEX = "model_index.json"
_LONGEST_NAME = 255
_COMPONENTS = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
_CONFIG_FILES = {"scheduler": "scheduler_config.json", "tokenizer": "tokenizer_config.json"}
# What diffusers assumes for keys that a component's configuration leaves out.
_HEADS_OF_DIFFUSERS = {"num_attention_heads": 40, "attention_head_dim": 128}
_CHANNELS_OF_DIFFUSERS = {"in_channels": 16, "out_channels": 16}
_VAE_OF_DIFFUSERS = {"z_dim": 16, "scale_factor_temporal": 4, "scale_factor_spatial": 8}
_TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "sentencepiece.bpe.model")


@dataclass(frozen=True)
class ModelFolder:
    """A checkpoint folder as its own files describe it.

    ``expand_timesteps`` (per-token timesteps) and ``boundary_ratio`` are those of model_index.json; ``transformer`` and
    ``vae`` the component configurations without their private keys.
    """

    path: Path
    family: WanFamily
    pipeline_class: str
    expand_timesteps: bool
    boundary_ratio: float | None
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]

    @property
    def experts(self) -> tuple[str, ...]:
        return self.family.experts

    @property
    def transformer_folders(self) -> tuple[Path, ...]:
        """The folder of each expert, that of the high noise first."""
        return tuple(self.path / name for name in self.experts)

    @property
    def routing(self) -> Experts:
        """Which expert computes which timestep."""
        return Experts(self.experts, self.boundary_ratio)

    @property
    def image_conditioning(self) -> ImageConditioning:
        """How a first image enters the transformer."""
        return self.family.image_conditioning

    @property
    def inner_dim(self) -> int:
        """Width of the transformer (3072 for the released 5B)."""
        heads, head_dim = (self.transformer.get(key, default) for key, default in _HEADS_OF_DIFFUSERS.items())
        return int(heads) * int(head_dim)

    @property
    def is_full_size(self) -> bool:
        """Whether this is a released size, not a tiny checkpoint of the same format."""
        full = self.family.transformer
        return self.inner_dim >= full["num_attention_heads"] * full["attention_head_dim"]


def load_family(path: str | Path) -> ModelFolder:
    """What the checkpoint in ``path`` is. Raises InputError with every fault of the folder."""
    folder, faults = _inspect(Path(path))
    if folder is None or faults:
        raise InputError(faults)
    return folder


def check_model_folder(path: str | Path) -> list[str]:
    """Every fault of a checkpoint folder, empty if it is whole. Weight files are checked for truncation, not loaded."""
    return _inspect(Path(path))[1]


def resolve_model(path_or_id: str | Path) -> Path:
    """The local folder of a checkpoint: a folder that exists, else the snapshot of a hub id (downloaded if need be).

    Raises InputError if it is neither, or if the hub does not give it.
    """
    path = Path(os.path.expanduser(path_or_id))
    if os.path.exists(path):  # unlike Path.exists, False for a name that no file can have
        return path
    if not looks_like_hub_id(path_or_id):
        raise InputError(
            [f"model.path: {path_or_id}: no such folder; give the folder that holds {MODEL_INDEX}, or a hub id"]
        )
    try:
        return Path(snapshot_download(str(path_or_id)))
    except Exception as error:  # the hub client raises errors of many libraries: network, authorisation, disk
        raise InputError([_hub_fault(str(path_or_id), error)]) from error


def looks_like_hub_id(path_or_id: str | Path) -> bool:
    """Whether a value that is no existing path has the form ``organisation/name`` of a model hub."""
    text = str(path_or_id)
    if text.count("/") != 1:
        return False
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _hub_fault(model_id: str, error: Exception) -> str:
    return (
        f"model.path: {model_id}: no such folder, and the model hub did not give it as a hub id ({first_line(error)}); "
        f"give an existing folder, or check the name, the network and HF_HUB_OFFLINE"
    )


def _inspect(path: Path) -> tuple[ModelFolder | None, list[str]]:
    if not os.path.exists(path):
        return None, [f"{path}: no such model folder; give the folder that holds {MODEL_INDEX}"]
    if not path.is_dir():
        return None, [f"{path}: is a file; give the model folder that holds {MODEL_INDEX}"]
    faults: list[str] = []
    index = _read_json(path / MODEL_INDEX, faults)
    if index is None:
        return None, faults
    named = [name for name in (*_COMPONENTS, "transformer_2") if _names_component(index, name)]
    faults += [
        f"{path / MODEL_INDEX}: names no {name}; it is not a whole Wan pipeline"
        for name in _COMPONENTS
        if name not in named
    ]
    configs = {name: _check_component(path, name, faults) for name in named}
    transformer, vae = configs.get("transformer"), configs.get("vae")
    if transformer is None or vae is None:
        return None, faults
    folder = _identify(path, index, transformer, vae, faults=faults)
    second = configs.get("transformer_2")
    if folder is not None and second is not None:
        _check_experts_agree(path, transformer, second, faults)
    return folder, faults


def _read_json(path: Path, faults: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        faults.append(f"{path}: missing; the folder is not a diffusers checkpoint, or its download is incomplete")
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        faults.append(f"{path}: is not readable JSON ({error}); fetch the file again")
        return None
    if not isinstance(value, dict):
        faults.append(f"{path}: holds a {type(value).__name__}, not a JSON object; fetch the file again")
        return None
    return value


def _names_component(index: Mapping[str, Any], name: str) -> bool:
    entry = index.get(name)  # [library, class], or [null, null] for a component the pipeline does without
    return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None


def _check_component(path: Path, name: str, faults: list[str]) -> dict[str, Any] | None:
    folder = path / name
    if not folder.is_dir():
        faults.append(f"{folder}: missing, though {MODEL_INDEX} names the component; fetch it again")
        return None
    if not any(folder.iterdir()):
        faults.append(f"{folder}: is empty; fetch the component again")
        return None
    config = _read_json(folder / _CONFIG_FILES.get(name, "config.json"), faults)
    if name == "tokenizer":
        if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
            faults.append(f"{folder}: holds no vocabulary ({' or '.join(_TOKENIZER_FILES)}); fetch it again")
    elif name != "scheduler":
        _check_weights(folder, faults)
    return None if config is None else {key: value for key, value in config.items() if not key.startswith("_")}


def _check_weights(folder: Path, faults: list[str]) -> None:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and not any(folder.glob("*.bin")):
        faults.append(f"{folder}: holds no weights (*.safetensors); fetch the component again")
    for index_file in sorted(folder.glob("*.safetensors.index.json")):
        index = _read_json(index_file, faults)
        if index is None:
            continue
        weight_map = index.get("weight_map")
        shards = sorted({str(shard) for shard in weight_map.values()}) if isinstance(weight_map, dict) else []
        if not shards or any(Path(shard).name != shard or len(shard) > _LONGEST_NAME for shard in shards):
            faults.append(f"{index_file}: its weight_map names no files of this folder; fetch the file again")
            continue
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            faults.append(
                f"{folder}: {len(missing)} of {len(shards)} weight files are missing "
                f"({', '.join(missing)}); fetch them again"
            )
    faults += [fault for file in weights if (fault := weight_file_fault(file)) is not None]


def weight_file_fault(file: Path) -> str | None:
    """Why a safetensors file is not whole, or None."""
    try:
        with safe_open(file, framework="np"):  # reads the header and compares it with the length of the file
            return None
    except (SafetensorError, OSError) as error:
        return f"{file}: is not a whole weight file ({error}); fetch it again"


def _identify(
    path: Path, index: Mapping[str, Any], transformer: Mapping[str, Any], vae: Mapping[str, Any], *, faults: list[str]
) -> ModelFolder | None:
    """The family that experts and channels give; contradictions with the rest of the folder are added to ``faults``."""
    experts = tuple(name for name in ("transformer", "transformer_2") if _names_component(index, name))
    sizes = {**_HEADS_OF_DIFFUSERS, **_CHANNELS_OF_DIFFUSERS}
    wrong = {key: transformer[key] for key in sizes if key in transformer and not _is_count(transformer[key])}
    if wrong:
        told = ", ".join(f"{key} is {value!r}" for key, value in wrong.items())
        faults.append(f"{path / 'transformer' / 'config.json'}: {told}: not a positive whole number; fetch it again")
        return None
    channels = tuple(transformer.get(key, default) for key, default in _CHANNELS_OF_DIFFUSERS.items())
    expand = index.get("expand_timesteps", False)
    where = path / MODEL_INDEX
    found = [f for f in FAMILIES.values() if f.experts == experts and (f.in_channels, f.latent_channels) == channels]
    if not found:
        if expand is True:
            faults.append(
                f"{where}: expand_timesteps is true, but the transformer has {channels[1]} latent channels, not 48; "
                "it fits no Wan2.2 model"
            )
        faults.append(
            f"{path}: {len(experts)} expert(s) with {channels[0]} input and {channels[1]} output channels is not a "
            f"supported model; supported are {', '.join(FAMILIES)}"
        )
        return None
    family = found[0]
    faults += _contradictions(path, index, vae, family=family)
    boundary = index.get("boundary_ratio")
    return ModelFolder(
        path=path,
        family=family,
        pipeline_class=str(index.get("_class_name")),
        expand_timesteps=expand is True,
        boundary_ratio=float(boundary) if isinstance(boundary, int | float) else None,
        transformer=transformer,
        vae=vae,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _contradictions(path: Path, index: Mapping[str, Any], vae: Mapping[str, Any], *, family: WanFamily) -> list[str]:
    where, faults = path / MODEL_INDEX, []
    pipeline, boundary = index.get("_class_name"), index.get("boundary_ratio")
    expand = index.get("expand_timesteps", False)
    if pipeline not in family.pipeline_classes:
        faults.append(
            f"{where}: _class_name is {pipeline!r}; {family.name} is a {' or '.join(family.pipeline_classes)}"
        )
    if expand is not family.expand_timesteps:
        said = repr(expand) if "expand_timesteps" in index else "missing (that means false)"
        faults.append(
            f"{where}: expand_timesteps is {said}, but experts and channels are those of {family.name}, where it is "
            f"{str(family.expand_timesteps).lower()}; correct the file"
        )
    if len(family.experts) == 2 and not (isinstance(boundary, int | float) and 0 < boundary < 1):
        faults.append(
            f"{where}: boundary_ratio is {boundary!r}; with two experts it lies between 0 and 1 "
            f"({family.boundary_ratio} as released)"
        )
    if len(family.experts) == 1 and boundary is not None:
        faults.append(f"{where}: boundary_ratio is {boundary!r}, but there is only one expert; set it to null")
    expected = {
        "z_dim": family.latent_channels,
        "scale_factor_temporal": family.temporal_stride,
        "scale_factor_spatial": family.spatial_stride,
    }
    found = {key: vae.get(key, default) for key, default in _VAE_OF_DIFFUSERS.items()}
    for key, value in expected.items():
        if found[key] != value:
            faults.append(f"{path / 'vae' / 'config.json'}: {key} is {found[key]}; {family.name} has {value}")
    return faults


def _check_experts_agree(path: Path, first: Mapping[str, Any], second: Mapping[str, Any], faults: list[str]) -> None:
    differing = sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
    if differing:
        faults.append(f"{path}: transformer and transformer_2 differ in {', '.join(differing)}; they are not one model")
