"""A tiny CLIP in open_clip's format. In: a folder and a seed. Out: a folder that open_clip loads with its ``local-dir:``
schema. It knows nothing of Wan and nothing of PickScore.

open_clip's own tokenizer has 49408 tokens: nearly all of the file is their embedding, hence eight numbers for each, in
float16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

IMAGE_SIZE = 32
CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"

MODEL: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {
        "image_size": IMAGE_SIZE,
        "patch_size": 8,
        "layers": 2,
        "width": 32,
        "head_width": 16,
        "mlp_ratio": 2.0,
    },
    "text_cfg": {
        "context_length": 77,
        "vocab_size": 49408,
        "width": 8,
        "heads": 2,
        "layers": 2,
        "mlp_ratio": 2.0,
    },
}


def write_clip(folder: Path, *, seed: int) -> None:
    """Write configuration and weights into ``folder``.

    Args:
        folder: created if needed.
        seed: of the weights. The global random state of torch is left as it was.
    """
    import open_clip  # slow to import
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = open_clip.CLIP(**MODEL)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    config = {
        "model_cfg": MODEL,
        "preprocess_cfg": {
            "mean": OPENAI_DATASET_MEAN,
            "std": OPENAI_DATASET_STD,
            "interpolation": "bicubic",
            "resize_mode": "shortest",
        },
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
