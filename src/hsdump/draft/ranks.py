"""One process or many: what differs between them, in one place. `torchrun` sets the environment that is read here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hsdump.errors import UsageError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a training."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this one writes files and shows things."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor up over all ranks; gives it back."""
        if self.world > 1:
            torch.distributed.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            torch.distributed.barrier()


def join(device: str) -> Ranks:
    """Join the other processes of a `torchrun`, if there are any.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        UsageError: a device that is not there.
    """
    world, rank, local = (int(os.environ.get(name, default)) for name, default in _ENVIRONMENT)
    gpu = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    if gpu and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: this torch sees no GPU", "use --device cpu, or install a CUDA build")
    if not gpu and device not in {"auto", "cpu"}:
        raise UsageError(f"--device {device} is not known", "use auto, cpu, cuda or cuda:0")
    place = torch.device(f"cuda:{local}" if gpu and ":" not in device else device if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(place)
    if world > 1:
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
    return Ranks(rank, world, place)


_ENVIRONMENT = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))


def leave(ranks: Ranks) -> None:
    """End what `join` began."""
    if ranks.world > 1:
        torch.distributed.destroy_process_group()


def spread(module: nn.Module, ranks: Ranks, *, fsdp: bool) -> Any:
    """Wrap a module for its ranks: DDP, or FSDP2's shards when asked for."""
    if fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        return fully_shard(module, mesh=mesh)
    if ranks.world == 1:
        return module
    # Compiled are the attention and the loss, which hold no weights: there is nothing to cut into DDP's buckets, and
    # releases of torch that look for some refuse flex attention (pytorch#137481).
    torch._dynamo.config.optimize_ddp = False
    ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(module, device_ids=ids)


def whole(tensor: Tensor) -> Tensor:
    """Give a tensor's full contents on the CPU, gathered where it is sharded. All ranks must call."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().to("cpu", copy=True)


def put(into: Tensor, value: Tensor) -> None:
    """Fill a tensor, sharded or not, with full contents."""
    with torch.no_grad():
        if hasattr(into, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            into.copy_(distribute_tensor(value.to(into.device), into.device_mesh, into.placements))
        else:
            into.copy_(value)
