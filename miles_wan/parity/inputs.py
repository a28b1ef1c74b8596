"""What a parity check reads before anything starts. In: the configuration of a run. Out: its model folder and records, the
configuration of the check, or one InputError with every fault. Rewards, validation and output folder are not looked at.
"""

from __future__ import annotations

from typing import Any

from miles_wan.config import Config
from miles_wan.configuration import check_config
from miles_wan.data import Dataset, load_records
from miles_wan.doctor.machine import training_memory
from miles_wan.doctor.model import family_faults, find_model, transformer_faults
from miles_wan.errors import InputError
from miles_wan.wan.family import ModelFolder


def check_inputs(config: Config, *, records: int, samples: int) -> tuple[ModelFolder, Dataset]:
    """Model folder and training records of ``config``. Raises InputError with every fault."""
    named = {"--records": records, "--samples": samples}
    faults = [f"{name} {value}: give at least 1" for name, value in named.items() if value < 1]
    faults += check_config(config.model_copy(update={"eval": config.eval.model_copy(update={"interval": 0})}))
    dataset: Dataset | None = None
    try:
        dataset = load_records(config.data.train)
    except InputError as error:
        faults += [f"data.train: {fault}" for fault in error.faults]
    model = find_model(config, faults)
    if model is not None:
        faults += family_faults(model, config, [dataset] if dataset is not None else [])
    device_bytes = training_memory(config, faults, [])
    if model is not None:
        faults += transformer_faults(model, config, device_bytes)
    if faults or model is None or dataset is None:
        raise InputError(list(dict.fromkeys(faults)))
    return model, dataset


def for_parity(config: Config, *, records: int, samples: int) -> Config:
    """The same run with so few records and samples. A run whose rollouts have no noise (``ode``) is checked with flow_sde:
    only stochastic steps are kept, and the model that both sides run is the same.
    """
    rollout = config.rollout
    changes: dict[str, Any] = {"prompts_per_rollout": records, "samples_per_prompt": samples}
    if rollout.sampler == "ode":  # its steps were never chosen: take all that may be stochastic
        changes |= {"sampler": "flow_sde", "step_selection": "all", "window_range": None}
    return config.model_copy(update={"rollout": rollout.model_copy(update=changes)})
