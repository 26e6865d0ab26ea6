"""Parameters that are not there: partitioned over the ranks, gathered for as long as they are used.

The idea of ZeRO stage 3 (arXiv 1910.02054, section 5.3) in one class: a :class:`ShardedBucket` keeps 1/N of
its parameters' values on each rank. ``acquire`` all-gathers the whole into a pooled buffer and points the
parameters at it, ``release`` gives the buffer back. A released parameter keeps its shape and dtype but has
no values: any use of them is an error that says how to gather it, never a silent zero.

:class:`Init` builds a model that no rank could hold whole: each layer is partitioned as soon as it is part
of its parent. :class:`GatheredParameters` is for reading and editing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .comm import Communicator, Work
from .flat import Bucket, BufferPool

DEFAULT_PERSISTENCE_THRESHOLD = 100_000  # elements; DeepSpeed's default

# What may be asked of a parameter whose values are elsewhere.
_METADATA = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "grad", "grad_fn", "is_leaf", "ndim", "layout")
    + ("is_sparse", "is_cuda", "is_cpu", "is_meta", "is_quantized", "itemsize", "nbytes", "_version")
}
_METADATA |= {getattr(torch.Tensor, name) for name in ("size", "numel", "dim", "nelement", "element_size")}
_METADATA |= {torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.register_hook}
_METADATA |= {torch.Tensor.requires_grad_, torch.Tensor.is_floating_point, torch.Tensor.is_complex}
_METADATA |= {torch.Tensor.grad.__set__, torch.Tensor.requires_grad.__set__, torch.Tensor.grad.__delete__}

GATHERED: dict[int, ShardedBucket] = {}  # address of a gathered buffer's storage → the bucket it holds
_initialising: list[Init] = []  # Init contexts under way


class PartitionedParameter(nn.Parameter):
    """What a parameter is while its values are spread over the ranks."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        params = [arg for arg in args if isinstance(arg, PartitionedParameter)]
        params += [arg for arg in (kwargs or {}).values() if isinstance(arg, PartitionedParameter)]
        if _initialising and params:
            return _initialise(func, params, args, kwargs or {})
        what = ", ".join(map(repr, params)) or "a partitioned parameter"
        raise RuntimeError(
            f"{_name(func)} on {what}: its values are partitioned over the ranks. Gather it "
            "first: `with zero_course.zero.GatheredParameters(param): ...` (a forward through the wrapped model "
            "gathers by itself; a parent that reads its child's weight wants leaf_modules=[type(parent)])"
        )

    def __repr__(self) -> str:
        bucket = bucket_of(self)
        name = next(slot.name for slot in bucket.slots if slot.param is self)
        return (
            f"PartitionedParameter({name!r}, shape {tuple(self.shape)}, {self.dtype}, 1/{bucket.world_size} on each "
            "rank; gather it with zero.GatheredParameters)"
        )


class ShardedBucket(Bucket):
    """Parameters of one module of which each rank keeps 1/N.

    Args:
        params: (name, parameter) pairs with whole values, which are let go.
        comm: the ranks to spread them over.
        pool: where gathered buffers come from.

    Attributes:
        shard_values: (padded / N,), this rank's slice.
        gathered: (padded,), all values, while someone uses them or they are on their way; else None.
        users: how many acquired it and have not released it.
    """

    def __init__(
        self, params: Iterable[tuple[str, nn.Parameter]], comm: Communicator, pool: BufferPool
    ) -> None:
        super().__init__(params, comm.world_size)
        self.comm, self.pool = comm, pool
        self.gathered: torch.Tensor | None = None
        self.users = 0
        self._work: Work | None = None
        self.shard_values = self.empty(self.padded // self.world_size)
        self._placeholder = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        for piece in self.pieces(comm.rank):
            whole = piece.slot.param.data.reshape(-1)
            piece.view(self.shard_values).copy_(whole[piece.start : piece.stop])
        for slot in self.slots:
            slot.param._zero_bucket = self
        self._detach()

    def gather(self) -> None:
        """Start to bring the values together; nothing to do when they are here or on their way."""
        if self.gathered is None:
            self.gathered = self.pool.take(self.padded, self.dtype, self.device)
            GATHERED[self.gathered.untyped_storage().data_ptr()] = self
            self._work = self.comm.all_gather(
                self.gathered, self.shard_values, purpose="parameters", async_op=True
            )

    def acquire(self) -> None:
        """Give the parameters their values until :meth:`release`."""
        self.gather()
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self.users == 0:
            for slot in self.slots:
                slot.param.__class__ = nn.Parameter
                slot.param.data = slot.view(self.gathered)
        self.users += 1

    def release(self) -> None:
        """Undo one :meth:`acquire`; the last one lets the values go."""
        self.users -= 1
        if self.users == 0:
            self._detach()
            self.drop()

    def drop(self) -> None:
        """Give the gathered buffer back, which nobody uses (any more, or in the end)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        del GATHERED[self.gathered.untyped_storage().data_ptr()]
        self.pool.give_back(self.gathered)
        self.gathered = None

    def keep_edits(self, rank: int) -> None:
        """Make what rank ``rank`` has in its gathered buffer the value of the parameters everywhere."""
        self.comm.broadcast(self.gathered, rank, purpose="setup")
        self.shard_values.copy_(self.shard(self.gathered, self.comm.rank))

    def _detach(self) -> None:
        for slot in self.slots:
            slot.param.data = self._placeholder.expand(slot.shape)  # the shape, in the memory of one element
            slot.param.__class__ = PartitionedParameter


def bucket_of(param: torch.Tensor) -> ShardedBucket | None:
    """The bucket a parameter is partitioned in; None for an ordinary one."""
    return getattr(param, "_zero_bucket", None)


class GatheredParameters:
    """Within the context, partitioned parameters have their values. Every rank must enter it.

    Args:
        params: one parameter or several; ordinary ones are allowed.
        modifier_rank: the rank whose edits are kept; with None, edits are lost on leaving.
        enabled: with False, does nothing.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        enabled: bool = True,
    ) -> None:
        self.params = [params] if isinstance(params, torch.Tensor) else list(params)
        self.modifier_rank, self.enabled = modifier_rank, enabled

    def __enter__(self) -> GatheredParameters:
        buckets = [bucket_of(param) for param in self.params if self.enabled]
        self._buckets = list(dict.fromkeys(bucket for bucket in buckets if bucket is not None))
        for bucket in self._buckets:
            bucket.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        keep = self.modifier_rank is not None and kind is None and self.enabled
        for bucket in self._buckets:
            if keep:
                bucket.keep_edits(self.modifier_rank)
            bucket.release()
        for param in self.params if keep else ():
            comm = getattr(param, "_zero_comm", None)  # kept whole by Zero3, since it is small
            if comm is not None:
                comm.broadcast(param.data, self.modifier_rank, purpose="setup")


class Init:
    """Within the context, modules are partitioned as they are built, so that no rank ever holds the whole.

    A layer is partitioned when it is assigned to its parent, its values taken from rank 0. Initialisers that
    run later (``model.apply(init_weights)``) gather each parameter for their own duration. The result is
    what rank 0 would have built alone, spread out; hand it to :class:`zero_course.Zero3` or ``initialize``.

    Args:
        config: DeepSpeed config (dict or path) to read ``stage3_param_persistence_threshold`` from.
        comm: the ranks to spread over; by default the whole job.
        stage3_param_persistence_threshold: elements up to which a parameter stays whole on every rank.
        enabled: with False, does nothing.
    """

    def __init__(
        self,
        config: dict[str, Any] | str | Path | None = None,
        *,
        comm: Communicator | None = None,
        stage3_param_persistence_threshold: int | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(config, (str, Path)):
            config = json.loads(Path(config).read_text())
        from_config = (config or {}).get("zero_optimization", {}).get("stage3_param_persistence_threshold")
        thresholds = (stage3_param_persistence_threshold, from_config, DEFAULT_PERSISTENCE_THRESHOLD)
        self.threshold = next(int(threshold) for threshold in thresholds if threshold is not None)
        self.enabled = enabled
        self.comm = (comm or Communicator()) if enabled else None
        self.pool = BufferPool()

    def __enter__(self) -> Init:
        if self.enabled:
            self._hook = register_module_module_registration_hook(self._on_registration)
            _initialising.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            _initialising.remove(self)
            self._hook.remove()

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        for path, module in child.named_modules(prefix=name) if child is not None else ():
            params = [(f"{path}.{key}", param) for key, param in module.named_parameters(recurse=False)]
            partition(params, self.comm, self.pool, self.threshold)


def partition(
    params: Iterable[tuple[str, nn.Parameter]], comm: Communicator, pool: BufferPool, threshold: int
) -> list[ShardedBucket]:
    """Partition a module's own parameters that are larger than ``threshold`` elements, with rank 0's values.

    Returns:
        The new buckets: one for each dtype, trained and frozen parameters apart. Parameters that are
        partitioned already stay where they are.
    """
    kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        if bucket_of(param) is None and param.numel() > threshold:
            comm.broadcast(param.data, 0, purpose="setup")
            kinds.setdefault((param.dtype, param.requires_grad), []).append((name, param))
    return [ShardedBucket(members, comm, pool) for members in kinds.values()]


def _name(func: Callable[..., Any]) -> str:
    """How the user would call it: for an attribute, torch hands over the attribute's own __get__."""
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in ("__get__", "__set__") else name


def _initialise(
    func: Callable[..., Any],
    params: list[PartitionedParameter],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an initialiser on gathered parameters and keep what rank 0 made of them."""
    addresses = set()
    with GatheredParameters(params, modifier_rank=0):
        addresses = {bucket_of(param).gathered.untyped_storage().data_ptr() for param in params}
        result = func(*args, **kwargs)
        is_view = isinstance(result, torch.Tensor) and not any(result is param for param in params)
        if is_view and result.untyped_storage().data_ptr() in addresses:
            raise RuntimeError(
                f"{_name(func)} would return a view of a partitioned parameter, which is "
                "gone a moment later. Initialise the parameter itself (torch.nn.init.normal_(param)), or use "
                "zero.GatheredParameters(param, modifier_rank=0)"
            )
    return result
