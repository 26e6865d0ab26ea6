"""Data parallelism: every rank holds the whole model and works on its own part of the batch.

The idea: the gradient of the mean loss over the joined batch is the mean of the ranks' gradients. So average
the gradients over the ranks after backward, and every rank takes the same step. Gradients are averaged in
buckets (Li et al., PyTorch Distributed, VLDB 2020, section 3.2), each as soon as backward has filled it, so
that communication and computation overlap.

Memory per rank for P parameters in fp32 with Adam: 4P parameters + 4P gradients + 8P moments.
Traffic per rank and step on N ranks: one all-reduce of the gradients, 2(N-1)/N · P elements sent.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from .comm import Communicator, Work
from .flat import Bucket, BufferPool, Piece, Slot, make_buckets
from .memory import live_bytes_by_class

DEFAULT_BUCKET = 2**20  # elements; 4 MiB in fp32


class DataParallel(nn.Module):
    """A model whose gradients are averaged over all ranks during ``backward()``.

    Use it as the module itself: ``loss = model(x); loss.backward(); model.step(); model.zero_grad()``.
    All ranks start from rank 0's parameters and buffers.

    Args:
        module: any module; the same on every rank.
        optimizer_class: a torch optimizer class that works elementwise (AdamW, SGD, ...). Without one,
            ``backward()`` leaves averaged gradients in ``.grad`` and the step is yours.
        params: what the optimizer is to train, as for a torch optimizer: parameters or a list of
            parameter-group dicts. By default all of the module's.
        comm: the ranks to average over; by default the whole job.
        reduce_bucket_size: elements in a bucket of gradients.
        overlap_comm: reduce buckets while backward goes on. Otherwise each is waited for.
        broadcast_buffers: before a forward in training, copy from rank 0 the buffers that forward
            changes (batch-norm statistics).
        **optimizer_args: passed to ``optimizer_class``: lr, betas, weight_decay, ...

    Raises:
        ValueError: ranks hold different models, or params are not the module's.
    """

    stage = 0

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] | None = None,
        *,
        params: Iterable[Any] | None = None,
        comm: Communicator | None = None,
        reduce_bucket_size: int = DEFAULT_BUCKET,
        overlap_comm: bool = True,
        broadcast_buffers: bool = True,
        **optimizer_args: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = comm or Communicator()
        self.overlap_comm = overlap_comm
        self.broadcast_buffers = broadcast_buffers
        self.pool = BufferPool()
        self._names = {param: name for name, param in module.named_parameters()}
        self._groups = _param_groups(module, params)
        self._params = [p for p in self._names if p.requires_grad]  # what gradients are reduced for
        self._check_same_model()
        self._broadcast_from_first_rank()

        self._sync = True
        self._in_backward = False
        self._used: set[nn.Parameter] = set()  # had a gradient on this rank since zero_grad
        self._in_flight: deque[tuple[Bucket, Work]] = deque()
        self.buckets = self._make_buckets(reduce_bucket_size)
        self._place: dict[nn.Parameter, tuple[Bucket, Slot]] = {
            slot.param: (bucket, slot) for bucket in self.buckets for slot in bucket.slots
        }
        self._allocate()
        for param in self._params:
            param.register_post_accumulate_grad_hook(_weakly(self._on_gradient))
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer_class is not None:
            self.optimizer = optimizer_class(self._optimizer_groups(), **optimizer_args)

    # -- what differs from rung to rung ----------------------------------------------------------------------

    def _make_buckets(self, bucket_size: int) -> list[Bucket]:
        # Backward reaches the parameters roughly in the reverse of the order in which forward used them.
        named = [(self._names[param], param) for param in reversed(self._params)]
        return make_buckets(named, bucket_size, self.comm.world_size)

    def _allocate(self) -> None:
        """Persistent buffers: here the flat gradients, which ``.grad`` will be views of."""
        self._gradients = {bucket: bucket.empty() for bucket in self.buckets}

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        """Parameter groups for the optimizer: here whole parameters."""
        return self._groups

    def _collect(self, bucket: Bucket, slot: Slot) -> None:
        """Move a fresh gradient into its bucket. Later micro-batches accumulate into the view directly."""
        view, grad = slot.view(self._gradients[bucket]), slot.param.grad
        if grad.data_ptr() != view.data_ptr() or grad.numel() == 0:
            view.copy_(grad)
            slot.param.grad = view

    def _reduce(self, bucket: Bucket) -> Work:
        """Start to average the bucket over the ranks."""
        flat = self._gradients[bucket]
        for slot in bucket.slots:
            if slot.param.grad is None:  # unused here, but another rank may have used it
                slot.view(flat).zero_()
        return self.comm.all_reduce(flat, average=True, purpose="gradients", async_op=True)

    def _reduced(self, bucket: Bucket) -> None:
        """The bucket's average has arrived."""

    def _used_here(self, param: nn.Parameter) -> bool:
        return param.grad is not None

    def _publish_gradients(self, used: set[nn.Parameter]) -> None:
        """Give the optimizer its gradients; a parameter that no rank used has none, as without ranks."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.param.grad = slot.view(self._gradients[bucket]) if slot.param in used else None

    def _after_step(self) -> None:
        """Bring every rank's parameters up to date: here they already are."""

    # -- backward --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._abandon_backward()
        if self.broadcast_buffers and self.training:
            self._synchronize_buffers()
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._begin_backward)
        return output

    def _begin_backward(self, gradient: torch.Tensor | None = None) -> None:
        """First thing in each backward: expect every gradient, and be called when the last one is there."""
        if self._in_backward:
            return
        self._in_backward = True
        self._missing = {bucket: {slot.param for slot in bucket.slots} for bucket in self.buckets}
        self._next = 0  # buckets are launched in this order on every rank, whatever order they fill in
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _on_gradient(self, param: nn.Parameter) -> None:
        """Called by autograd when ``param.grad`` is complete for this backward."""
        self._begin_backward()
        if param.grad.is_sparse:
            raise RuntimeError(
                f"parameter {self._names[param]!r} has a sparse gradient, which has no place in a flat bucket; "
                "build its embedding with sparse=False"
            )
        bucket, slot = self._place[param]
        if self._sync and param not in self._missing[bucket]:
            raise RuntimeError(
                f"parameter {self._names[param]!r} received a second gradient in one backward, after its bucket "
                "may have been reduced. It is used in two re-entrant checkpoints: pass use_reentrant=False to "
                "torch.utils.checkpoint"
            )
        self._used.add(param)
        self._collect(bucket, slot)
        self._missing[bucket].discard(param)
        if self._sync:
            self._launch_complete()

    def _launch_complete(self, all_of_them: bool = False) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if self._missing[bucket] and not all_of_them:
                return
            self._next += 1
            self._advance()
            self._in_flight.append((bucket, self._reduce(bucket)))
            if not self.overlap_comm:
                self._drain()

    def _advance(self) -> None:
        """Move every bucket in flight on by one phase."""
        for bucket, work in list(self._in_flight):
            work.advance()
            if work.done:
                self._in_flight.popleft()
                self._reduced(bucket)

    def _drain(self) -> None:
        while self._in_flight:
            self._advance()

    def _end_backward(self) -> None:
        """Backward is over: reduce what is left, and learn which parameters any rank used."""
        self._in_backward = False
        if not self._sync:
            return
        self._launch_complete(all_of_them=True)
        self._drain()
        flags = torch.tensor([self._used_here(p) for p in self._params], dtype=torch.int32)
        flags = flags.to(self.comm.device)
        self.comm.all_reduce(flags, purpose="control")
        self._publish_gradients({p for p, flag in zip(self._params, flags.tolist(), strict=True) if flag})

    def _abandon_backward(self) -> None:
        """An earlier backward ended with an exception: forget what it left behind."""
        self._in_backward = False
        self._drain()
        self.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate micro-batches on this rank; the first backward outside averages their sum, once."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def synchronize_gradients(self) -> None:
        """Average what :meth:`no_sync` accumulated, when there is no further backward that would."""
        self._end_backward()

    # -- the step --------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Update the parameters from the averaged gradients.

        Raises:
            RuntimeError: no optimizer was given.
        """
        if self.optimizer is None:
            raise RuntimeError(
                f"{type(self).__name__} has no optimizer; build it as "
                f"{type(self).__name__}(module, torch.optim.AdamW, lr=1e-3)"
            )
        self.optimizer.step()
        self._after_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. They are always set to None, so that unused parameters stay untouched."""
        self._used.clear()
        for param in self._params:
            param.grad = None

    def _owned_gradients(self) -> list[torch.Tensor]:
        return [param.grad for param in self._params if param.grad is not None]

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """A sum over what this rank owns, made whole: here each rank owns everything."""
        return value

    def grad_norm(self) -> float:
        """2-norm of the averaged gradients of the whole model."""
        squares = [_sum_of_squares(gradient) for gradient in self._owned_gradients()]
        total = (
            torch.stack(squares).sum()
            if squares
            else torch.zeros((), dtype=torch.float64, device=self.comm.device)
        )
        return self._sum_over_ranks(total.view(1)).sqrt().item()

    def clip_grad_norm_(self, max_norm: float, norm: float | None = None) -> float:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

        Args:
            max_norm: the greatest norm allowed.
            norm: what :meth:`grad_norm` returned, where it is known already.

        Returns:
            The norm before clipping.
        """
        norm = self.grad_norm() if norm is None else norm
        if norm > max_norm:
            self.scale_gradients(max_norm / (norm + 1e-6))
        return norm

    def scale_gradients(self, factor: float) -> None:
        """Multiply the averaged gradients of the whole model by ``factor``."""
        for gradient in self._owned_gradients():
            gradient.mul_(factor)

    # -- what is where ---------------------------------------------------------------------------------------

    def owned_pieces(self) -> list[tuple[Piece, torch.Tensor]]:
        """What this rank's optimizer updates: (piece, its values (stop - start,)). Here, everything."""
        whole = []
        for bucket in self.buckets:
            for slot in bucket.slots:
                whole.append((Piece(slot, 0, slot.numel, slot.offset), slot.param.data.view(-1)))
        return whole

    def group_names(self) -> list[list[str]]:
        """Names of the parameters in each of the optimizer's groups, the same on every rank."""
        return [[self._names[param] for param in group["params"]] for group in self._groups]

    def release_prefetched(self) -> None:
        """Let go of parameters gathered ahead of use, before values are written: here there are none."""

    def _parameter_tensors(self) -> list[torch.Tensor]:
        return [param.data for param in self._names]

    def _tensors(self) -> dict[str, list[torch.Tensor]]:
        """Every tensor that the rung keeps, by class."""
        moments = []
        for state in self.optimizer.state.values() if self.optimizer else ():
            # torch keeps Adam's step counter as a tensor of one element; it is no moment
            moments += [v for key, v in state.items() if isinstance(v, torch.Tensor) and key != "step"]
        return {
            "parameters": self._parameter_tensors(),
            "gradients": list(self._gradients.values()),
            "optimizer": moments,
            "communication_buffers": self.pool.buffers + self.comm.pool.buffers,
            "buffers": list(self.module.buffers()),
        }

    def memory(self) -> dict[str, int]:
        """Bytes this rank keeps, by class, measured from deduplicated storages."""
        return live_bytes_by_class(self._tensors())

    def predicted_memory(self, moments: int = 2) -> dict[str, int]:
        """The formula for ``parameters``, ``gradients`` and ``optimizer`` of :meth:`memory`, in bytes.

        Args:
            moments: values the optimizer keeps per parameter: 2 for Adam, 1 for SGD with momentum.
        """
        trained = [bucket.padded * bucket.dtype.itemsize for bucket in self.buckets]
        frozen = sum(p.numel() * p.element_size() for p in self._names if not p.requires_grad)
        sizes = sum(slot.numel * bucket.dtype.itemsize for bucket in self.buckets for slot in bucket.slots)
        return {
            "parameters": sizes + frozen,
            "gradients": sum(trained),
            "optimizer": moments * sizes,
        }

    def predicted_traffic(self) -> dict[str, int]:
        """The formula for the bytes this rank sends in one step of one micro-batch, without clipping."""
        others = self.comm.world_size - 1
        return {
            "gradients": sum(2 * others * b.padded // b.world_size * b.dtype.itemsize for b in self.buckets),
            "control": self._flags_traffic(),
        }

    def _flags_traffic(self) -> int:
        """Bytes sent to agree on which parameters were used: an all-reduce of one int32 each."""
        n, rank, count = self.comm.world_size, self.comm.rank, len(self._params)
        length = -(-count // n)
        own = min(length, max(0, count - rank * length))
        return 4 * ((count - own) + (n - 1) * own) if n > 1 else 0

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The module's state dict with whole tensors; names as in the module itself."""
        return self.module.state_dict()

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set the parameters and buffers from whole tensors, the same on every rank."""
        with torch.no_grad():
            self.module.load_state_dict(state)

    # -- the same start on every rank ------------------------------------------------------------------------

    def _check_same_model(self) -> None:
        mine = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for p, n in self._names.items()]
        for rank, theirs in enumerate(self.comm.all_gather_object(mine)):
            for here, there in zip(mine + [None] * len(theirs), theirs + [None] * len(mine), strict=True):
                if here != there:
                    raise ValueError(
                        f"ranks hold different models: on rank {self.comm.rank} {_describe(here)}, on rank {rank} "
                        f"{_describe(there)}. Build the same model on every rank"
                    )

    def _broadcast_from_first_rank(self) -> None:
        for tensor in [*self._names, *self.module.buffers()]:
            contiguous = tensor.data.contiguous()
            self.comm.broadcast(contiguous, 0, purpose="setup")
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(contiguous)
        self._buffer_versions = [buffer._version for buffer in self.module.buffers()]

    def _synchronize_buffers(self) -> None:
        """Copy from rank 0 the buffers that forward writes to, the same ones on every rank."""
        versions = [buffer._version for buffer in self.module.buffers()]
        written = {
            b
            for b, new, old in zip(self.module.buffers(), versions, self._buffer_versions, strict=True)
            if new != old
        }
        for module in self.module.modules():
            if isinstance(module, _NormBase) and module.training:  # writes without counting the version up
                written.update(module.buffers(recurse=False))
        for buffer in self.module.buffers():
            if buffer in written:
                self.comm.broadcast(buffer, 0, purpose="buffers")
        self._buffer_versions = [buffer._version for buffer in self.module.buffers()]


def _sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares, a float64 scalar. In rows, each one pass in float32: fast, and no long sum in 24 bits."""
    flat, row = values.reshape(-1), 4096
    even = flat.numel() // row * row
    dtype = torch.promote_types(values.dtype, torch.float32)
    norms = torch.linalg.vector_norm(flat[:even].view(-1, row), dim=1, dtype=dtype)
    return (
        norms.double().square().sum() + torch.linalg.vector_norm(flat[even:], dtype=dtype).double().square()
    )


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """The method as a hook that does not keep its object alive.

    torch holds the hooks of a tensor where the garbage collector does not look, so that a tensor, its hook and
    the hook's object, which has the tensor, would stay for ever.
    """
    reference = weakref.WeakMethod(method)

    def hook(param: nn.Parameter) -> None:
        alive = reference()
        if alive is not None:
            alive(param)

    return hook


def _describe(param: tuple[Any, ...] | None) -> str:
    if param is None:
        return "there is no further parameter"
    name, shape, dtype, trained = param
    return f"{name!r} is {shape} {dtype.removeprefix('torch.')}{'' if trained else ' frozen'}"


def _param_groups(module: nn.Module, params: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Parameter-group dicts of trainable parameters of ``module``; all of them when ``params`` is None."""
    given = list(module.parameters() if params is None else params)
    groups = [dict(g) for g in given] if given and isinstance(given[0], dict) else [{"params": given}]
    own, seen = set(module.parameters()), set()
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        for param in members:
            if param not in own:
                raise ValueError(
                    f"params holds a tensor of shape {tuple(param.shape)} that is not the module's"
                )
            if param in seen:
                raise ValueError(f"params holds the tensor of shape {tuple(param.shape)} twice")
            seen.add(param)
        group["params"] = [param for param in members if param.requires_grad]
    return groups
