"""Writes and reads the training state of all ranks with torch.distributed.checkpoint. Both calls are collectives.

The folder is not a checkpoint until the driver commits it by renaming (see ``cluster.checkpoints``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.futures import Future
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from miles_wan.errors import CheckpointError
from miles_wan.faults import reach
from miles_wan.training.ema import AdapterAverage

# torch's CheckpointException is a BaseException: ``except Exception`` alone would let it through.
FAILURES = (Exception, CheckpointException)


class TrainingState:
    """The ``Stateful`` that torch.distributed.checkpoint saves: trainable weights, optimizer, schedule, random state, and
    the average of the weights if there is one."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        average: AdapterAverage | None,
    ) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._average = average

    def state_dict(self) -> dict[str, Any]:
        adapter, optimizer = get_state_dict(
            self._model, self._optimizer, options=StateDictOptions(ignore_frozen_params=True)
        )
        state = {
            "adapter": adapter,
            "optimizer": optimizer,
            "scheduler": self._scheduler.state_dict(),
            f"random_state_{dist.get_rank()}": torch.get_rng_state(),
        }
        if self._average is not None:
            average = {str(index): tensor for index, tensor in enumerate(self._average.tensors)}
            state |= {"average": average, "average_steps": self._average.steps}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["adapter"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),
        )
        self._scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state[f"random_state_{dist.get_rank()}"])
        if self._average is not None:
            average = state["average"]
            tensors = [average[str(index)] for index in range(len(average))]
            self._average.load(tensors, steps=state["average_steps"])


class _Writer(dcp.FileSystemWriter):
    """The file-system writer with the points at which a test may kill the run."""

    def __init__(self, path: Path, *, rollout_id: int) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True)
        self._rollout_id = rollout_id

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        reach(f"checkpoint/before_shard_{dist.get_rank()}", self._rollout_id)
        return super().write_data(plan, planner)


def save(directory: Path, training: TrainingState, *, rollout_id: int) -> None:
    """Write the state into ``directory``."""
    state = {"training": training}
    try:
        dcp.save(state, storage_writer=_Writer(directory, rollout_id=rollout_id))
    except FAILURES as error:
        raise CheckpointError(
            f"could not write the checkpoint {directory}: {_reason(error)}; free space and resume"
        ) from error


def load(directory: Path, training: TrainingState) -> None:
    """Restore the state in ``directory``, on any number of ranks up to that of the save.

    Raises:
        CheckpointError: files missing or of another model.
    """
    state = {"training": training}
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(directory))
    except FAILURES as error:
        raise CheckpointError(
            f"could not read the checkpoint {directory}: {_reason(error)}. Resume with the configuration it was written with, "
            "or remove this folder to go back to the one before."
        ) from error


def _reason(error: BaseException) -> str:
    """One line: of all ranks' failures (which print as tracebacks) the first."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {type(first).__name__}: {first}"
    return str(error)
