"""ZeRO stage 2: each rank keeps the gradients of 1/N of the model only.

The idea: a rank steps only on its own slice, so it needs the averaged gradient of that slice and no other.
Gather fresh gradients in a bucket's buffer, reduce the buffer to its owners as soon as it is full, keep the
own slice, and use the buffer again for the next bucket (ZeRO, arXiv 1910.02054, section 5.2).

Memory per rank for P parameters in fp32 with Adam: 4P parameters + 4P/N gradients + 8P/N moments, and the
pooled buffers: one that backward fills, one that is being reduced. A bucket size near P makes these larger
than the gradients that were saved: then ZeRO-2 takes *more* memory than ZeRO-1.
Traffic per rank and step: as ZeRO-1, 2(N-1)/N · P elements. With gradient accumulation every micro-batch is
reduced, since there is no room to keep its whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .comm import Work
from .flat import Bucket, Slot
from .zero1 import Zero1


class Zero2(Zero1):
    """Zero1 with partitioned gradients. Arguments as for :class:`DataParallel`.

    After ``backward()`` every parameter's ``.grad`` is None: the averages are with the optimizer, as pieces.
    """

    stage = 2

    def _allocate(self) -> None:
        self._gradients = {}  # bucket → its pooled buffer (padded,), while it fills and is reduced
        self._gradient_shards = {b: b.empty(b.padded // b.world_size) for b in self.buckets}
        self._accumulated: set[Bucket] = set()  # buckets whose shard holds earlier micro-batches
        self._reduced_before = False
        self._lay_parameters_flat(self.buckets)

    def _gradient_shard(self, bucket: Bucket) -> torch.Tensor:
        return self._gradient_shards[bucket]

    def _begin_backward(self, gradient: torch.Tensor | None = None) -> None:
        if not self._in_backward:
            self._filled: dict[Bucket, set[Slot]] = {}
        super()._begin_backward(gradient)

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self._gradients:
            self._gradients[bucket] = self.pool.take(bucket.padded, bucket.dtype, bucket.device)
            self._filled[bucket] = set()
        return self._gradients[bucket]

    def _collect(self, bucket: Bucket, slot: Slot) -> None:
        slot.view(self._buffer(bucket)).copy_(slot.param.grad)
        self._filled[bucket].add(slot)
        slot.param.grad = None  # autograd's own copy goes at once

    def _reduce(self, bucket: Bucket) -> Work:
        flat = self._buffer(bucket)
        for slot in bucket.slots:
            if slot not in self._filled[bucket]:
                slot.view(flat).zero_()
        first = bucket not in self._accumulated
        output = self._gradient_shard(bucket) if first else bucket.shard(flat, self.comm.rank)
        return self.comm.reduce_scatter(output, flat, average=True, purpose="gradients", async_op=True)

    def _reduced(self, bucket: Bucket) -> None:
        flat = self._gradients.pop(bucket)
        if bucket in self._accumulated:
            self._gradient_shard(bucket).add_(bucket.shard(flat, self.comm.rank))
        self._accumulated.add(bucket)
        self.pool.give_back(flat)

    def _used_here(self, param: nn.Parameter) -> bool:
        return param in self._used

    def _publish_gradients(self, used: set[nn.Parameter]) -> None:
        self._publish_to_optimizer(used)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As :meth:`Zero1.zero_grad`; the next micro-batch overwrites the shards."""
        super().zero_grad(set_to_none)
        self._accumulated.clear()

    def _abandon_backward(self) -> None:
        super()._abandon_backward()
        for bucket in list(self._gradients):
            self.pool.give_back(self._gradients.pop(bucket))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Not possible: a micro-batch's whole gradient would have to be kept, which is what stage 2 saves.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"no_sync() keeps whole gradients, and stage {self.stage} has no room for them: leave it out (every "
            "micro-batch is then reduced and added to this rank's shard), or use stage 1"
        )
        yield

    def _tensors(self) -> dict[str, list[torch.Tensor]]:
        # the pooled buffers belong to communication, also while they hold gradients
        return {**super()._tensors(), "gradients": list(self._gradient_shards.values())}

    def predicted_memory(self, moments: int = 2) -> dict[str, int]:
        """As in :meth:`Zero1.predicted_memory`, with gradients of this rank's slices only."""
        own = sum(bucket.padded // bucket.world_size * bucket.dtype.itemsize for bucket in self.buckets)
        return {**super().predicted_memory(moments), "gradients": own}
