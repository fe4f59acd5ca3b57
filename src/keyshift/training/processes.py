"""Several processes that train one model: started by torchrun, talking through gloo or NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from keyshift.data import IGNORED_LABEL
from keyshift.errors import RunError, UserError
from keyshift.recipe import Engine


def launched() -> int:
    """How many processes torchrun says it started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the process that writes and speaks."""
    return int(os.environ.get("RANK", "0")) == 0


def check_processes(engine: Engine, connected: int) -> None:
    """Make sure that as many processes work together as were started, and as the recipe wants.

    ``accelerate launch --cpu`` starts one process however many it is asked for, and a launcher whose
    variables are not understood leaves every process to train alone: both would go unnoticed.

    Args:
        connected: how many found each other.

    Raises:
        UserError: another number than ``engine.processes``, or FSDP of one process.
        RunError: they were started together and did not find each other.
    """
    if connected != launched():
        raise RunError(
            f"{launched()} processes were started and {connected} found each other; start them with torchrun"
        )
    if engine.processes not in (None, connected):
        raise UserError(
            f"engine.processes={engine.processes}, but {connected} train together; start as many with "
            f"torchrun --nproc-per-node {engine.processes}"
        )
    if engine.parallel == "fsdp" and connected == 1:
        raise UserError(
            "engine.parallel='fsdp' needs several processes; start them with torchrun, or leave it out"
        )


def check_wrapping(engine: Engine, model: nn.Module) -> None:
    """Make sure that a model which several processes train is wrapped as was asked.

    transformers' own FSDP becomes DDP on a CPU without a word.

    Raises:
        RunError: it is not.
    """
    if launched() == 1:
        return
    sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    replicated = isinstance(model, nn.parallel.DistributedDataParallel)
    if (sharded, replicated) != (engine.parallel == "fsdp", engine.parallel == "ddp"):
        raise RunError(
            f"engine.parallel={engine.parallel!r} was asked for, and the model came out as "
            f"{type(model).__name__}; this is a bug or an unknown version of accelerate"
        )


def uses_bfloat16(engine: Engine) -> bool:
    """Whether products are computed in bfloat16."""
    if engine.precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return engine.precision == "bfloat16"


def shard_(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
    """Give every process its share of the parameters, in place (FSDP2).

    Args:
        blocks: what is gathered at a time.
        device: where this process computes.
        dtype: of gathered weights and products; gradients are summed in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def total(values: Tensor) -> Tensor:
    """The sum of a tensor over processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def anywhere(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is true in any process; all must ask."""
    return flag if not dist.is_initialized() else bool(total(torch.tensor(float(flag), device=device)) > 0)


def wait_for_all() -> None:
    """Return once every process is here."""
    if dist.is_initialized():
        dist.barrier()


def shared_out(batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """This process's part of the batches, as many as every other's: the model may have to be gathered.

    What a process lacks is a batch without labels that count.
    """
    if not dist.is_initialized():
        yield from batches
        return
    rank, size, last = dist.get_rank(), dist.get_world_size(), None
    for index, batch in enumerate(batches):
        last = index, batch
        if index % size == rank:
            yield batch
    if last is not None and (last[0] + 1) % size and rank > last[0] % size:
        yield {**last[1], "labels": torch.full_like(last[1]["labels"], IGNORED_LABEL)}
