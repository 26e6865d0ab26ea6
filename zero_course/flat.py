"""Flat buckets: the unit in which gradients are reduced and model states are partitioned.

A bucket is a run of parameters laid end to end in one flat vector, padded to a multiple of the number of
ranks N. Rank r owns the r-th of N equal slices of *every* bucket. So each collective is even, and each can
start as soon as its own bucket is ready. (ZeRO, arXiv 1910.02054, section 5, partitions the whole model
once; a partition of each bucket has the same size and lets communication overlap backward.)

    bucket:   | weight 6 | bias 2 | weight 5 |pad 3|     N = 4, padded to 16
    owner:    |  rank 0  |  rank 1  |  rank 2  |  rank 3  |    4 elements each

What a rank owns of a parameter is a *piece*: here rank 1 owns elements 4..6 of the first weight and the
whole bias. The optimizer updates pieces, so hyper-parameters and state stay per parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


def padded_numel(numel: int, world_size: int) -> int:
    """``numel`` rounded up to a multiple of ``world_size``."""
    return -(-numel // world_size) * world_size


def partition_bounds(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Where rank's slice of ``numel`` elements starts and stops, once padded to a multiple of ``world_size``.

    Args:
        numel: elements before padding.
        world_size: number of ranks.
        rank: 0 .. world_size-1.

    Returns:
        (start, stop), all slices equally long; the last ones may lie partly in the padding.

    Raises:
        ValueError: rank is not one of the ranks.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of the {world_size} ranks 0..{world_size - 1}")
    length = padded_numel(numel, world_size) // world_size
    return rank * length, (rank + 1) * length


@dataclass(eq=False)
class Slot:
    """One parameter's place in a bucket."""

    name: str
    param: nn.Parameter
    offset: int  # of its first element in the bucket's flat vector
    shape: torch.Size

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's elements of a flat vector (padded,) in the parameter's own shape."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(eq=False)
class Piece:
    """What one rank owns of one parameter: elements ``start`` to ``stop`` of it, laid flat."""

    slot: Slot
    start: int
    stop: int
    shard_offset: int  # of its first element in the rank's slice of the bucket

    @property
    def name(self) -> str:
        """Name of the parameter, as in the module."""
        return self.slot.name

    def view(self, shard: torch.Tensor) -> torch.Tensor:
        """This piece of a rank's slice (padded / N,) of the bucket, shape (stop - start,)."""
        return shard[self.shard_offset : self.shard_offset + self.stop - self.start]


class Bucket:
    """Parameters of one dtype, laid end to end.

    Args:
        params: (name, parameter) pairs, in the order in which they are laid out.
        world_size: ranks that share the bucket.
    """

    def __init__(self, params: Iterable[tuple[str, nn.Parameter]], world_size: int) -> None:
        self.slots: list[Slot] = []
        self.numel = 0
        for name, param in params:
            self.slots.append(Slot(name, param, self.numel, param.shape))
            self.numel += param.numel()
        self.dtype = self.slots[0].param.dtype
        self.device = self.slots[0].param.device
        self.world_size = world_size
        self.padded = padded_numel(self.numel, world_size)

    def empty(self, numel: int | None = None) -> torch.Tensor:
        """A new flat vector of zeros, (padded,) by default, in the bucket's dtype."""
        return torch.zeros(self.padded if numel is None else numel, dtype=self.dtype, device=self.device)

    def shard(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank's slice (padded / N,) of a flat vector (padded,)."""
        start, stop = partition_bounds(self.numel, self.world_size, rank)
        return flat[start:stop]

    def pieces(self, rank: int) -> list[Piece]:
        """What rank owns of each parameter; parameters it owns nothing of are left out."""
        first, last = partition_bounds(self.numel, self.world_size, rank)
        pieces = []
        for slot in self.slots:
            start, stop = max(first, slot.offset), min(last, slot.offset + slot.numel)
            if start < stop:
                pieces.append(Piece(slot, start - slot.offset, stop - slot.offset, start - first))
        return pieces


def make_buckets(
    params: Iterable[tuple[str, nn.Parameter]], bucket_size: int, world_size: int
) -> list[Bucket]:
    """Lay parameters into buckets in the order given.

    Args:
        params: (name, parameter) pairs, in the order in which backward is expected to finish them.
        bucket_size: elements after which a bucket is closed; a larger parameter gets one of its own.
        world_size: ranks that share the buckets.

    Returns:
        Buckets in the order in which they are expected to be complete. None mixes dtypes or devices.

    Raises:
        ValueError: bucket_size is not positive.
    """
    if bucket_size <= 0:
        raise ValueError(f"bucket size {bucket_size} is not a number of elements above 0")
    filling: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    buckets = []
    for name, param in params:
        members = filling.setdefault((param.dtype, param.device), [])
        if members and sum(p.numel() for _, p in members) + param.numel() > bucket_size:
            buckets.append(Bucket(members, world_size))
            members = filling[param.dtype, param.device] = []
        members.append((name, param))
    return buckets + [Bucket(members, world_size) for members in filling.values() if members]


class BufferPool:
    """Flat buffers that are used again instead of being allocated again.

    A step that allocates and frees large buffers pays for page faults each time, and its peak depends on the
    allocator. The pool grows to what one step needs at once and stays there.
    """

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer (numel,) with arbitrary contents: part of the smallest free one that is large enough."""
        kind = [buffer for buffer in self._free if buffer.dtype == dtype and buffer.device == device]
        fitting = [buffer for buffer in kind if buffer.numel() >= numel]
        if fitting:
            chosen = min(fitting, key=torch.Tensor.numel)
            self._remove(self._free, chosen)
            return chosen[:numel]
        if kind:  # none is large enough: replace one, so that outgrown buffers do not pile up
            outgrown = max(kind, key=torch.Tensor.numel)
            self._remove(self._free, outgrown)
            self._remove(self.buffers, outgrown)
            del outgrown
        buffer = torch.zeros(numel, dtype=dtype, device=device)
        self.buffers.append(buffer)
        return buffer[:numel]

    def give_back(self, part: torch.Tensor) -> None:
        """Return what :meth:`take` gave."""
        address = part.untyped_storage().data_ptr()
        self._free.append(next(b for b in self.buffers if b.untyped_storage().data_ptr() == address))

    @staticmethod
    def _remove(buffers: list[torch.Tensor], gone: torch.Tensor) -> None:
        buffers[:] = [buffer for buffer in buffers if buffer is not gone]
