"""What a mesh does to the memory of a rank, before and after sharding. In: a model with its adapters (the meta
device will do) and the number of ranks. Out: bytes per rank and per parameter, and what makes a mesh absurd. It starts
no process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from miles_wan.wan.model import WanModel
from miles_wan.wan.quantization import dequantised_bytes, parameter_bytes, parameter_count

GIB = 2**30
# A trainable float32 weight has a gradient and two moments of AdamW of its size beside it.
TRAINABLE_COPIES = 4


@dataclass(frozen=True)
class MeshMemory:
    """Lasting bytes of the fullest rank of a mesh of ``ranks``: weights, gradients and moments, not activations.

    ``weight_bytes`` is the weights' part of ``rank_bytes``; ``whole_bytes`` is what one rank without any sharding would
    hold. ``gathered_bytes`` is the largest block, which a forward gathers for a moment, with its largest layer in the compute
    type if it is quantized. ``parameters`` does not count the scales of quantized weights.
    """

    ranks: int
    parameters: int
    weight_bytes: int
    rank_bytes: int
    whole_bytes: int
    gathered_bytes: int

    @property
    def text(self) -> str:
        """One line for people."""
        return (
            f"mesh fsdp = {self.ranks}: a rank holds {_size(self.weight_bytes)} of weights, "
            f"{self.weight_bytes / self.parameters:.2f} bytes per parameter, {_size(self.rank_bytes)} with gradients and "
            f"moments ({_size(self.whole_bytes)} on a single rank), and gathers {_size(self.gathered_bytes)} for a block"
        )


def estimate(model: WanModel, *, ranks: int) -> MeshMemory:
    """The memory of ``model`` when FSDP2 splits the first dimension of every parameter over ``ranks``."""
    parameters = list(model.parameters())
    blocks = [block for _, transformer in model.items() for block in transformer.blocks]
    return MeshMemory(
        ranks=ranks,
        parameters=parameter_count(model),
        weight_bytes=sum(_share(parameter, ranks) for parameter in parameters),
        rank_bytes=_with_copies(parameters, ranks),
        whole_bytes=_with_copies(parameters, 1),
        gathered_bytes=max(parameter_bytes(block) + dequantised_bytes(block) for block in blocks),
    )


def mesh_faults(memory: MeshMemory, *, devices: int, device_bytes: int) -> list[str]:
    """What makes the mesh absurd: it shards nothing though there are devices, or it does not fit.

    Args:
        memory: of the mesh.
        devices: of the run, ``cluster.num_gpus``.
        device_bytes: memory of the smallest device; on a CPU the machine's, divided by the ranks.
    """
    named = f"training.dp_size = {memory.ranks}"
    if memory.ranks == 1 < devices:
        return [
            f"{named} with cluster.num_gpus = {devices} shards nothing: one rank would hold all of "
            f"{_size(memory.whole_bytes)} and {devices - 1} device(s) would not train; set it to {devices}, or lower --num-gpus"
        ]
    needed = memory.rank_bytes + memory.gathered_bytes
    if needed <= device_bytes:
        return []
    # Sharding cannot lower the gathered block; beyond that each rank takes its part.
    room = device_bytes - memory.gathered_bytes
    enough = -(-memory.whole_bytes // room) if room > 0 else None
    remedy = f"it would take about {enough} ranks (training.dp_size, --num-gpus), or" if enough else "it needs"
    return [
        f"{named}: a rank needs {_size(needed)} for weights, gradients, moments and one gathered block, its device has "
        f"{_size(device_bytes)}; {remedy} model.dtype bf16, model.quantization or a lower model.lora_rank"
    ]


def held_bytes(model: nn.Module) -> int:
    """Bytes of weights that this rank really holds after sharding."""
    return sum(_local_bytes(parameter) for parameter in model.parameters())


def _with_copies(parameters: Iterable[nn.Parameter], ranks: int) -> int:
    return sum(
        _share(parameter, ranks) * (TRAINABLE_COPIES if parameter.requires_grad else 1) for parameter in parameters
    )


def _share(parameter: nn.Parameter, ranks: int) -> int:
    """Bytes on the first rank, which has the largest share: the first dimension is cut into equal pieces, rounded up."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return parameter.numel() // max(1, rows) * -(-rows // ranks) * parameter.element_size()


def _local_bytes(parameter: nn.Parameter) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return int(local.numel() * local.element_size())


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 100 else f"{count / 2**20:.2f} MiB"
