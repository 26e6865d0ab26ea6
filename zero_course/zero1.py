"""ZeRO stage 1: each rank keeps the optimizer state of 1/N of the model only.

The idea: after the gradients are averaged, all N ranks of data parallelism do the same update N times over.
Let each rank update only the slice that it owns, and hand the result round (ZeRO, arXiv 1910.02054, section
5.1). The all-reduce falls apart into its two halves with the update between them, so nothing more is sent:

    all-reduce gradients, step            →  reduce-scatter gradients, step on 1/N, all-gather parameters

Memory per rank for P parameters in fp32 with Adam: 4P parameters + 4P gradients + 8P/N moments.
Traffic per rank and step: (N-1)/N · P elements of gradients + (N-1)/N · P of parameters, as data parallelism.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from .comm import Work
from .data_parallel import DataParallel
from .flat import Bucket, Piece


class Zero1(DataParallel):
    """Data parallelism with a partitioned optimizer. Arguments as for :class:`DataParallel`.

    After ``backward()``, ``.grad`` of a parameter holds the average only in the part that this rank owns.
    """

    stage = 1

    def _allocate(self) -> None:
        super()._allocate()
        self._reduced_before = False
        self._lay_parameters_flat(self.buckets)

    def _lay_parameters_flat(self, buckets: list[Bucket]) -> None:
        """Make each bucket's parameters views of one flat vector, so that one all-gather fills them all."""
        self._flat_params = {bucket: bucket.empty() for bucket in buckets}
        for bucket, flat in self._flat_params.items():
            for slot in bucket.slots:
                slot.view(flat).copy_(slot.param.data)
                slot.param.data = slot.view(flat)

    def _param_shard(self, bucket: Bucket) -> torch.Tensor:
        """This rank's slice (padded / N,) of the bucket's parameters, which the optimizer updates in place."""
        return bucket.shard(self._flat_params[bucket], self.comm.rank)

    def _gradient_shard(self, bucket: Bucket) -> torch.Tensor:
        """This rank's slice (padded / N,) of the bucket's gradients."""
        return bucket.shard(self._gradients[bucket], self.comm.rank)

    @cached_property
    def _pieces(self) -> list[tuple[Piece, nn.Parameter, Bucket]]:
        """This rank's pieces, each with its values (stop - start,) as the optimizer sees them."""
        return [
            (piece, nn.Parameter(piece.view(self._param_shard(bucket))), bucket)
            for bucket in self.buckets
            for piece in bucket.pieces(self.comm.rank)
        ]

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        """The same groups, with this rank's pieces in place of the parameters."""
        of_param: dict[nn.Parameter, list[nn.Parameter]] = {}
        for piece, values, _ in self._pieces:
            of_param.setdefault(piece.slot.param, []).append(values)
        groups = []
        for group in self._groups:
            owned = [values for param in group["params"] for values in of_param.get(param, [])]
            # torch refuses an optimizer without parameters, which a rank of a tiny model may be
            groups.append(
                {**group, "params": owned or [nn.Parameter(torch.empty(0, device=self.comm.device))]}
            )
        return groups

    def _begin_backward(self, gradient: torch.Tensor | None = None) -> None:
        if not self._in_backward and self._reduced_before:
            # The owner holds an average A, the others stale sums. To add this backward's gradients g, let
            # the owner contribute N·A + g and the others g: the new average is A + mean(g).
            for bucket in self.buckets:
                own = self._gradient_shard(bucket).clone()
                self._gradients[bucket].zero_()
                self._gradient_shard(bucket).copy_(own.mul_(self.comm.world_size))
            self._reduced_before = False
        super()._begin_backward(gradient)

    def _reduce(self, bucket: Bucket) -> Work:
        flat = self._gradients[bucket]
        for slot in bucket.slots:
            if slot.param.grad is None:
                slot.view(flat).zero_()
        own = self._gradient_shard(bucket)
        return self.comm.reduce_scatter(own, flat, average=True, purpose="gradients", async_op=True)

    def _publish_gradients(self, used: set[nn.Parameter]) -> None:
        super()._publish_gradients(used)
        self._reduced_before = True
        self._publish_to_optimizer(used)

    def _publish_to_optimizer(self, used: set[nn.Parameter]) -> None:
        for piece, values, bucket in self._pieces if self.optimizer else ():
            values.grad = piece.view(self._gradient_shard(bucket)) if piece.slot.param in used else None

    def _after_step(self) -> None:
        works = []
        for bucket, flat in self._flat_params.items():
            own = self._param_shard(bucket)
            works.append(self.comm.all_gather(flat, own, purpose="parameters", async_op=True))
        for work in works:
            work.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As :meth:`DataParallel.zero_grad`, for this rank's pieces too."""
        super().zero_grad(set_to_none)
        self._reduced_before = False
        for _, values, _ in self._pieces if self.optimizer else ():
            values.grad = None

    def _owned_gradients(self) -> list[torch.Tensor]:
        return [values.grad for _, values, _ in self._pieces if values.grad is not None]

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        self.comm.all_reduce(value, purpose="control")
        return value

    def owned_pieces(self) -> list[tuple[Piece, torch.Tensor]]:
        """What this rank's optimizer updates: (piece, its values (stop - start,)), a part of each parameter."""
        return [(piece, values) for piece, values, _ in self._pieces]

    def _parameter_tensors(self) -> list[torch.Tensor]:
        return [*super()._parameter_tensors(), *self._flat_params.values()]

    def predicted_memory(self, moments: int = 2) -> dict[str, int]:
        """As in :meth:`DataParallel.predicted_memory`: parameters are padded, moments are this rank's own."""
        predicted = super().predicted_memory(moments)
        padding = sum((b.padded - b.numel) * b.dtype.itemsize for b in self.buckets)
        owned = sum((p.stop - p.start) * values.element_size() for p, values in self.owned_pieces())
        return {**predicted, "parameters": predicted["parameters"] + padding, "optimizer": moments * owned}

    def predicted_traffic(self) -> dict[str, int]:
        """As :meth:`DataParallel.predicted_traffic`: half of it for gradients, half for parameters."""
        others = self.comm.world_size - 1
        half = sum(
            others * bucket.padded // bucket.world_size * bucket.dtype.itemsize for bucket in self.buckets
        )
        return {"gradients": half, "control": self._flags_traffic(), "parameters": half}
