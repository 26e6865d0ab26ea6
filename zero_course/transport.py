"""How a collective is carried out: from send and receive, or by the library.

Each collective is a generator. It posts messages and yields their handles; when it is resumed they have
arrived, and it goes on with its next phase. ``comm.py`` drives it, times it and enters it in the ledger.

:class:`PeerTransport` builds everything from send and receive, which over gloo is the fastest way and the one
with the fewest bytes: gloo's own reduce-scatter sends what an all-reduce sends, twice the ideal. Slice j of a
vector goes straight to rank j, which adds up what it gets in rank order. :class:`NativeTransport` calls the
library's collectives, as NCCL wants it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .flat import BufferPool
from .ledger import Entry

LOW_PRECISION = (torch.float16, torch.bfloat16)
Phases = Iterator[list[Any]]  # of handles with a wait() each


@dataclass
class Call:
    """What a collective needs to know of the call.

    Attributes:
        entry: its line in the ledger; the transport enters the bytes it sends.
        average: divide the sum by the number of ranks.
        tag: marks its messages; the same on every rank that makes the same call.
    """

    entry: Entry
    average: bool
    tag: int


class PeerTransport:
    """Collectives from send and receive between each pair of ranks.

    Args:
        group: the process group; ``None`` for the whole job.
        rank, world_size: this rank in the group, and its size.
        backend: the group's backend.
        pool: where receive buffers come from.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, world_size: int, backend: str, pool: BufferPool
    ) -> None:
        self.group, self.rank, self.world_size, self.pool = group, rank, world_size, pool

    def all_reduce(self, tensor: torch.Tensor, call: Call) -> Phases:
        """Reduce-scatter, then all-gather. Slices need not be equal: the last ones are shorter or empty."""
        flat = tensor.view(-1)
        length = -(-flat.numel() // self.world_size)
        slices = flat.tensor_split([min(length * j, flat.numel()) for j in range(1, self.world_size)])
        yield from self._reduce(slices, slices[self.rank], call)
        yield self._exchange([slices[self.rank]] * self.world_size, slices, call)

    def reduce_scatter(self, input: torch.Tensor, call: Call, output: torch.Tensor) -> Phases:
        """Slice j goes to rank j, which sums."""
        yield from self._reduce(input.chunk(self.world_size), output, call)

    def all_gather(self, output: torch.Tensor, call: Call, input: torch.Tensor) -> Phases:
        """Every rank sends its slice to every other."""
        slices = output.chunk(self.world_size)
        handles = self._exchange([input] * self.world_size, slices, call)
        if slices[self.rank].data_ptr() != input.data_ptr():
            slices[self.rank].copy_(input)
        yield handles

    def all_to_all(self, input: torch.Tensor, call: Call, output: torch.Tensor) -> Phases:
        """Slice j goes to rank j."""
        into, out_of = output.chunk(self.world_size), input.chunk(self.world_size)
        handles = self._exchange(out_of, into, call)
        into[self.rank].copy_(out_of[self.rank])
        yield handles

    def broadcast(self, tensor: torch.Tensor, call: Call, src: int) -> Phases:
        """Rank ``src`` sends the whole to every other."""
        flat = tensor.view(-1)
        nothing = [flat[:0]] * self.world_size
        if self.rank == src:
            yield self._exchange([flat] * self.world_size, nothing, call)
        else:
            yield self._exchange(nothing, [*nothing[:src], flat, *nothing[src + 1 :]], call)

    def _exchange(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], call: Call
    ) -> list[Any]:
        """Post the sending of ``outgoing[j]`` to each other rank j and the receiving of ``incoming[j]`` from it."""
        handles = []
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        for peer in reversed(others):  # receives first, so that a message finds its buffer waiting
            if incoming[peer].numel():
                handles.append(dist.irecv(incoming[peer], group=self.group, group_src=peer, tag=call.tag))
        for peer in others:  # each rank starts with another peer, so that no rank is everyone's first target
            if outgoing[peer].numel():
                handles.append(dist.isend(outgoing[peer], group=self.group, group_dst=peer, tag=call.tag))
                call.entry.wire_bytes += bytes_of(outgoing[peer])
        return handles

    def _reduce(self, slices: Sequence[torch.Tensor], output: torch.Tensor, call: Call) -> Phases:
        """Send slice j to rank j, then add up, in rank order, this rank's own and what the others sent."""
        own, others = slices[self.rank], self.world_size - 1
        buffer = self.pool.take(others * own.numel(), own.dtype, own.device)
        received = buffer.view(others, own.numel()).unbind()
        terms = [*received[: self.rank], own, *received[self.rank :]]
        yield self._exchange(slices, terms, call)
        if own.dtype in LOW_PRECISION:  # a 16-bit running sum would lose bits at each rank
            terms = [term.float() for term in terms]
        if terms[0] is own:  # rank 0: the input stays as it is
            total = torch.add(terms[0], terms[1], out=output)
        else:
            total = terms[0].add_(terms[1])
        for term in terms[2:]:
            total.add_(term)
        if call.average:
            torch.div(total, self.world_size, out=output)
        elif total is not output:
            output.copy_(total)
        self.pool.give_back(buffer)


class NativeTransport:
    """The library's own collectives, with the bytes its algorithms send. Arguments as for PeerTransport."""

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, world_size: int, backend: str, pool: BufferPool
    ) -> None:
        self.group, self.world_size, self.backend = group, world_size, backend

    def all_reduce(self, tensor: torch.Tensor, call: Call) -> Phases:
        """A ring, or an algorithm of the same bytes."""
        call.entry.wire_bytes = 2 * self._all_but_own(tensor)
        yield [dist.all_reduce(tensor, group=self.group, async_op=True)]
        if call.average:
            tensor.div_(self.world_size)

    def reduce_scatter(self, input: torch.Tensor, call: Call, output: torch.Tensor) -> Phases:
        """A ring; but gloo runs an all-reduce underneath (github.com/pytorch/pytorch, pull request 118911)."""
        call.entry.wire_bytes = self._all_but_own(input) * (2 if self.backend == "gloo" else 1)
        yield [dist.reduce_scatter_single(output, input, group=self.group, async_op=True)]
        if call.average:
            output.div_(self.world_size)

    def all_gather(self, output: torch.Tensor, call: Call, input: torch.Tensor) -> Phases:
        """A ring."""
        call.entry.wire_bytes = self._all_but_own(output)
        yield [dist.all_gather_single(output, input, group=self.group, async_op=True)]

    def all_to_all(self, input: torch.Tensor, call: Call, output: torch.Tensor) -> Phases:
        """Slice j goes to rank j."""
        call.entry.wire_bytes = self._all_but_own(input)
        yield [dist.all_to_all_single(output, input, group=self.group, async_op=True)]

    def broadcast(self, tensor: torch.Tensor, call: Call, src: int) -> Phases:
        """A chain or tree: (N-1)/N of the bytes for each rank on average."""
        call.entry.wire_bytes = self._all_but_own(tensor)
        yield [dist.broadcast(tensor, group=self.group, group_src=src, async_op=True)]

    def _all_but_own(self, tensor: torch.Tensor) -> int:
        return bytes_of(tensor) * (self.world_size - 1) // self.world_size


TRANSPORTS = {"peer": PeerTransport, "native": NativeTransport}


def message(op: str, tensor: torch.Tensor, group: dist.ProcessGroup | None, peer: int, tag: int) -> Phases:
    """A single send to, or receive from, one peer, over any backend."""
    if op == "send":
        yield [dist.isend(tensor, group=group, group_dst=peer, tag=tag)]
    else:
        yield [dist.irecv(tensor, group=group, group_src=peer, tag=tag)]


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
