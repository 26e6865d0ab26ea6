"""ZeRO stage 3: each rank keeps the parameters of 1/N of the model only.

The idea: a layer's parameters are needed whole only while that layer computes. So keep them partitioned,
all-gather a module's own before its forward and again before its backward, let them go right after, and
meanwhile fetch those that come next (ZeRO, arXiv 1910.02054, section 5.3 and 7.2.2).

Forward is told by module hooks. Backward is told by autograd itself: while forward runs, a weight that is
saved for backward is saved as a note of where it lies, and is gathered when backward asks for it. So tied
weights, modules called twice and any order of execution need no special case.

Memory per rank for P parameters in fp32 with Adam: (4 + 4 + 8)P/N, and a window of gathered parameters: the
module in use and what is prefetched.
Traffic per rank and step: (N-1)/N · P elements each for the gather in forward, the gather in backward, and
the reduce-scatter of the gradients: 3(N-1)/N · P, 1.5 times that of data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .comm import Work
from .data_parallel import DEFAULT_BUCKET
from .flat import Bucket, make_buckets
from .zero import (
    DEFAULT_PERSISTENCE_THRESHOLD,
    GATHERED,
    GatheredParameters,
    ShardedBucket,
    bucket_of,
    partition,
)
from .zero2 import Zero2

Saved = torch.Tensor | tuple[ShardedBucket, torch.Size, tuple[int, ...], int]


class Zero3(Zero2):
    """Zero2 with partitioned parameters. Arguments as for :class:`DataParallel`, and:

    Args:
        stage3_prefetch_bucket_size: elements that may be gathered ahead of use; 0 gathers on demand.
        stage3_param_persistence_threshold: parameters with at most so many elements are never partitioned:
            many small messages would cost more time than they save memory.
        leaf_modules: classes whose forward reads the weights of its children directly; everything below
            such a module is gathered with it.

    Attributes:
        gathered_elements: elements gathered now, with padding.
        peak_gathered_elements: the most so far; never above ``window_elements``, but for recomputation.
        window_elements: the largest set of modules in use at once, and the prefetch size.
    """

    stage = 3

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] | None = None,
        *,
        stage3_prefetch_bucket_size: int = DEFAULT_BUCKET,
        stage3_param_persistence_threshold: int = DEFAULT_PERSISTENCE_THRESHOLD,
        leaf_modules: Iterable[type[nn.Module]] = (nn.MultiheadAttention,),
        **others: Any,
    ) -> None:
        self._prefetch_size = stage3_prefetch_bucket_size
        self._threshold = stage3_param_persistence_threshold
        self._leaf_modules = tuple(leaf_modules)
        self._training_pass = True  # a pass is a forward and, with gradients, its backward
        self._fetched: list[ShardedBucket] = []  # in this pass, in order
        self._traces: dict[bool, list[ShardedBucket]] = {}  # what the last pass of either kind fetched
        self._position = 0  # in the trace
        self._inside = 0  # forwards under way
        self._node: Any = None  # the autograd node that runs now
        self._node_buckets: list[ShardedBucket] = []  # what it uses
        self._recomputed: list[ShardedBucket] = []  # gathered by a forward that backward is running again
        self.gathered_elements = self.peak_gathered_elements = 0
        super().__init__(module, optimizer_class, **others)
        self._watch_modules()

    # -- partitioning ----------------------------------------------------------------------------------------

    def _broadcast_from_first_rank(self) -> None:
        # Parameters that zero.Init partitioned already have rank 0's values; the others get them here or when
        # they are partitioned.
        for tensor in [*self._names, *self.module.buffers()]:
            if bucket_of(tensor) is None:
                tensor.data = tensor.data.contiguous()
                self.comm.broadcast(tensor.data, 0, purpose="setup")
        self._buffer_versions = [buffer._version for buffer in self.module.buffers()]

    def _make_buckets(self, bucket_size: int) -> list[Bucket]:
        for module in self.module.modules():
            own = [(self._names[p], p) for p in module.parameters(recurse=False)]
            partition(own, self.comm, self.pool, self._threshold)
        found = [bucket_of(param) for param in self._names]
        self.sharded = list(dict.fromkeys(bucket for bucket in found if bucket is not None))
        for bucket in self.sharded:
            bucket.pool, bucket.comm = self.pool, self.comm
            for slot in bucket.slots:
                slot.name = self._names.get(slot.param, slot.name)  # zero.Init knew only a part of the path
        small = [(self._names[p], p) for p in reversed(self._params) if bucket_of(p) is None]
        for _, param in small:
            param._zero_comm = self.comm
        buckets = make_buckets(small, bucket_size, self.comm.world_size)
        buckets += [b for b in self.sharded if any(slot.param.requires_grad for slot in b.slots)]
        # A bucket is complete when backward has reached the first of its parameters in order of use.
        order = {param: i for i, param in enumerate(self._names)}
        return sorted(buckets, key=lambda b: -min(order.get(slot.param, 0) for slot in b.slots))

    def _lay_parameters_flat(self, buckets: list[Bucket]) -> None:
        super()._lay_parameters_flat([b for b in buckets if not isinstance(b, ShardedBucket)])

    def _param_shard(self, bucket: Bucket) -> torch.Tensor:
        return bucket.shard_values if isinstance(bucket, ShardedBucket) else super()._param_shard(bucket)

    def _watch_modules(self) -> None:
        self._uses: dict[nn.Module, list[ShardedBucket]] = {}
        in_use_at_most = 0

        def visit(module: nn.Module, above: set[ShardedBucket]) -> None:
            nonlocal in_use_at_most
            is_leaf = isinstance(module, self._leaf_modules)
            found = [bucket_of(param) for param in module.parameters(recurse=is_leaf)]
            own = list(dict.fromkeys(bucket for bucket in found if bucket is not None))
            if own and module not in self._uses:
                self._uses[module] = own
                module.register_forward_pre_hook(self._before_forward, prepend=True)
                module.register_forward_hook(self._after_forward, always_call=True)
            in_use = above | set(own)
            in_use_at_most = max(in_use_at_most, sum(bucket.padded for bucket in in_use))
            for child in module.children() if not is_leaf else ():
                visit(child, in_use)

        visit(self.module, set())
        self.window_elements = in_use_at_most + self._prefetch_size

    # -- gathering and releasing -----------------------------------------------------------------------------

    def _fetch(self, bucket: ShardedBucket) -> None:
        """Someone needs this bucket now."""
        self._gather(bucket)
        bucket.acquire()
        self._fetched.append(bucket)
        self._prefetch(bucket)

    def _gather(self, bucket: ShardedBucket) -> None:
        if bucket.gathered is not None:
            return
        bucket.gather()
        self.gathered_elements += bucket.padded
        self.peak_gathered_elements = max(self.peak_gathered_elements, self.gathered_elements)
        if self.gathered_elements > self.window_elements and not self._recomputed:
            raise RuntimeError(
                f"{self.gathered_elements} elements are gathered at once, more than the window of "
                f"{self.window_elements}: a defect of zero_course, please report it"
            )

    def _release(self, bucket: ShardedBucket) -> None:
        bucket.release()
        if bucket.gathered is None:
            self.gathered_elements -= bucket.padded

    def _prefetch(self, bucket: ShardedBucket) -> None:
        """Gather what came after ``bucket`` the last time, as far as the prefetch size goes."""
        trace = self._traces.get(self._training_pass, [])
        try:
            self._position = trace.index(bucket, self._position) + 1
        except ValueError:
            return  # another path than the last time: gather on demand
        waiting = sum(b.padded for b in self.sharded if b.gathered is not None and b.users == 0)
        for following in trace[self._position :]:
            if following.gathered is None:
                waiting += following.padded
                if waiting > self._prefetch_size:
                    return
                self._gather(following)

    def _drop_unused(self) -> None:
        """Let go what was prefetched and not used."""
        for bucket in self.sharded:
            if bucket.gathered is not None and bucket.users == 0:
                bucket.drop()
                self.gathered_elements -= bucket.padded

    def release_prefetched(self) -> None:
        """Let go of parameters gathered ahead of use: they would be out of date once values are written."""
        self._drop_unused()

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with parameters gathered as they are used."""
        if torch._C._current_graph_task_id() == -1:
            self._drop_unused()
            self._traces[self._training_pass] = self._fetched
            self._training_pass, self._fetched, self._position = torch.is_grad_enabled(), [], 0
        self._inside += 1
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return super().forward(*args, **kwargs)
        finally:
            self._inside -= 1

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled() and not self._inside and not in_backward:
            raise RuntimeError(
                f"{type(module).__name__} was called directly with gradients enabled. Under stage 3 training goes "
                "through the wrapped model, which gathers again in backward: call model(...), or wrap the call "
                "in torch.no_grad()"
            )
        for bucket in self._uses[module]:
            self._fetch(bucket)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for bucket in self._uses[module]:
            if bucket.users == 0:
                continue  # the forward failed before it was gathered
            if torch._C._current_graph_task_id() != -1:
                # Recomputation in backward: what it saves is used soon, and is saved as it is.
                self._recomputed.append(bucket)
            else:
                self._release(bucket)

    # -- backward --------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Saved:
        """Forward saves a tensor: if it is part of a gathered buffer, save where it lies."""
        bucket = GATHERED.get(tensor.untyped_storage().data_ptr())
        if bucket is None:
            return tensor
        return bucket, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, saved: Saved) -> torch.Tensor:
        """Backward wants a tensor back. Autograd runs one node at a time: let go what the last one used."""
        if isinstance(saved, torch.Tensor):
            return saved
        bucket, size, stride, offset = saved
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._release_node()
            self._node = node
        if bucket not in self._node_buckets:
            self._node_buckets.append(bucket)
            self._fetch(bucket)
        return bucket.gathered.as_strided(size, stride, offset)

    def _release_node(self) -> None:
        for bucket in self._node_buckets:
            self._release(bucket)
        self._node, self._node_buckets = None, []

    def _reduce(self, bucket: Bucket) -> Work:
        for recomputed in [b for b in self._recomputed if b is bucket]:
            self._recomputed.remove(recomputed)
            self._release(recomputed)
        return super()._reduce(bucket)

    def _end_backward(self) -> None:
        self._release_backward()
        super()._end_backward()

    def _release_backward(self) -> None:
        self._release_node()
        while self._recomputed:
            self._release(self._recomputed.pop())
        self._drop_unused()

    def _abandon_backward(self) -> None:
        self._release_backward()
        super()._abandon_backward()

    def step(self) -> None:
        """Update this rank's slices; what was gathered before is out of date."""
        self._drop_unused()
        super().step()

    # -- what is where ---------------------------------------------------------------------------------------

    def _parameter_tensors(self) -> list[torch.Tensor]:
        whole = [param.data for param in self._names if bucket_of(param) is None]
        return [*whole, *self._flat_params.values(), *(bucket.shard_values for bucket in self.sharded)]

    def predicted_memory(self, moments: int = 2) -> dict[str, int]:
        """As in :meth:`Zero2.predicted_memory`, with this rank's slices of the partitioned parameters."""
        whole = sum(flat.numel() * flat.element_size() for flat in self._flat_params.values())
        frozen = [p for p in self._names if not p.requires_grad and bucket_of(p) is None]
        whole += sum(p.numel() * p.element_size() for p in frozen)
        slices = sum(b.padded // b.world_size * b.dtype.itemsize for b in self.sharded)
        return {**super().predicted_memory(moments), "parameters": whole + slices}

    def predicted_traffic(self) -> dict[str, int]:
        """As in :meth:`Zero2.predicted_traffic`; a partitioned module is gathered in forward and in backward.

        A module's backward gathers its parameters when it reads them: an embedding's does not, nor does the
        weight gradient of a first layer whose input needs no gradient (which this formula does not know).
        """

        def sent(bucket: Bucket) -> int:
            return (bucket.world_size - 1) * bucket.padded // bucket.world_size * bucket.dtype.itemsize

        parameters = sum(sent(bucket) for bucket in self._flat_params)
        for module, buckets in self._uses.items():
            gathers = 1 if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else 2
            parameters += gathers * sum(sent(bucket) for bucket in buckets)
        return {**super().predicted_traffic(), "parameters": parameters}

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The module's state dict with whole tensors, copied to the CPU. A collective: call it on every rank."""
        state: dict[str, torch.Tensor] = {}
        copies: dict[nn.Parameter, torch.Tensor] = {}
        for key, tensor in self._named_state():
            if bucket_of(tensor) is not None and tensor not in copies:
                with GatheredParameters(tensor):
                    copies[tensor] = tensor.detach().cpu().clone()
            state[key] = copies[tensor] if tensor in copies else tensor.detach().cpu().clone()
        return state

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set the parameters and buffers from whole tensors, the same on every rank."""
        own = dict(self._named_state())
        if own.keys() != state.keys():
            raise KeyError(f"state dict differs from the model in {sorted(own.keys() ^ state.keys())}")
        self._drop_unused()
        with torch.no_grad():
            for key, tensor in own.items():
                bucket = bucket_of(tensor)
                if tuple(state[key].shape) != tuple(tensor.shape):
                    raise ValueError(
                        f"{key}: shape {tuple(state[key].shape)}, expected {tuple(tensor.shape)}"
                    )
                if bucket is None:
                    tensor.copy_(state[key])
                    continue
                for piece in bucket.pieces(self.comm.rank):
                    if piece.slot.param is tensor:
                        values = state[key].reshape(-1)[piece.start : piece.stop]
                        piece.view(bucket.shard_values).copy_(values)

    def _named_state(self) -> Iterable[tuple[str, torch.Tensor]]:
        """What a state dict of the module holds, under the same names, without touching values."""
        for path, module in self.module.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for key, param in module._parameters.items():
                if param is not None:
                    yield prefix + key, param
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    yield prefix + key, buffer
