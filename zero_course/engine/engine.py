"""The training loop's three calls: ``loss = engine(x)``, ``engine.backward(loss)``, ``engine.step()``.

The engine adds to a rung of the ladder what a training run needs besides the strategy: gradient accumulation,
clipping, a learning-rate schedule, a guard against gradients that are not finite, counters, reports and
checkpoints. One optimizer step takes ``gradient_accumulation_steps`` micro-batches. ``backward()`` divides each
loss by their number (so the gradient is the mean over the micro-batches: do not divide it yourself), and only
the last one's ``step()`` acts.

    micro-batch            1         2         3         4 = boundary
    stages 0 and 1         add up    add up    add up    add up, average over the ranks, update
    stages 2 and 3         average   average   average   average, update       (no room for whole gradients)

A step whose gradient norm is nan or infinite is skipped on every rank: the weights, the optimizer's state and
the schedule stay as they are, a warning names the first parameter concerned, and `MAX_SKIPPED_IN_A_ROW` such
steps in a row are an error. (DeepSpeed in fp32 takes such a step, which destroys the weights.)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..checkpoint import load_checkpoint, save_checkpoint, write_state_dict
from ..comm import get_local_rank
from ..config import Config
from ..data_parallel import DataParallel
from ..utils import register
from .dataloader import ShardedDataLoader
from .report import Reporter, Step

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 5


class TrainingDivergedError(ArithmeticError):
    """Too many steps in a row had gradients that are not finite."""


class Engine(nn.Module):
    """A model in training. Made by :func:`zero_course.initialize`.

    Attributes:
        module: the model itself. Attributes that the engine lacks are looked up there.
        rung: the strategy around it: DataParallel, Zero1, Zero2 or Zero3.
        optimizer: a torch optimizer over what this rank updates; None if there is nothing to train with.
        lr_scheduler: the schedule, or None.
        training_dataloader: the loader over ``training_data``, or None.
        config: the checked configuration.
        comm, device: the ranks, and where this one computes.
        global_rank, local_rank, world_size: this rank in the job and on its host, and their number.
        global_steps: optimizer steps so far, skipped ones included.
        skipped_steps: how many of them were skipped.
        micro_steps: micro-batches so far.
        global_samples: samples of all ranks in those steps.
    """

    def __init__(
        self,
        rung: DataParallel,
        config: Config,
        lr_scheduler: Any = None,
        training_dataloader: ShardedDataLoader | None = None,
    ) -> None:
        super().__init__()
        self.module = rung.module
        self.__dict__["rung"] = rung  # not as a submodule: the engine's parameters are named module.*
        self.training = rung.training = rung.module.training
        self.optimizer, self.lr_scheduler = rung.optimizer, lr_scheduler
        self.training_dataloader = training_dataloader
        self.config = config
        self.comm, self.device = rung.comm, rung.comm.device
        self.global_rank, self.local_rank = rung.comm.rank, get_local_rank()
        self.world_size = rung.comm.world_size
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self.skipped_in_a_row = 0
        self.reporter = Reporter(config, rung)
        self._boundary: bool | None = None  # set by set_gradient_accumulation_boundary
        self._in_no_sync = False
        self._norm: float | None = None
        self.forget_micro_batches()
        register(rung)

    def forget_micro_batches(self) -> None:
        """Drop the gradients since the last optimizer step, and begin the next one anew."""
        self.rung.zero_grad()
        self.accumulated = 0  # micro-batches since the last optimizer step
        self._forwarded = False  # a forward has run since the last backward
        self._backwards = 0  # since the last step()
        self._losses: list[torch.Tensor] = []
        self._tokens = 0
        self.data_position = self.training_dataloader.state_dict() if self.training_dataloader else None

    # -- the three calls ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, on this rank's micro-batch."""
        if torch.is_grad_enabled():
            self._forwarded = True
            self._tokens += _tokens_in((args, kwargs))
        with self.reporter.timed("forward"):
            return self.rung(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Compute gradients and, where the stage and the boundary say so, average them over the ranks.

        Args:
            loss: one element, the mean over this rank's micro-batch.
            retain_graph: as in ``torch.Tensor.backward``.
            scale_wrt_gas: divide by the accumulation steps; with False you have done so yourself.

        Returns:
            The loss as it was differentiated.

        Raises:
            TypeError, ValueError: the loss is no tensor of one element, or has no gradient.
            RuntimeError: called before a forward, or twice without ``step()`` in between.
        """
        self._check_loss(loss)
        steps = self.gradient_accumulation_steps()
        scaled = loss / steps if scale_wrt_gas and steps > 1 else loss
        self._losses.append(loss.detach())
        if loss.device.type == "cpu":  # on a GPU, looking at the value would make the program wait for it
            self._warn_of_losses(self._losses[-1:])
        hold_back = self.rung.stage < 2 and not self.is_gradient_accumulation_boundary()
        with self.reporter.timed("backward"), self.rung.no_sync() if hold_back else nullcontext():
            scaled.backward(retain_graph=retain_graph)
        self._forwarded = False
        self._backwards += not self._in_no_sync
        return scaled

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the accumulation boundary, clip, update, zero the gradients, move the schedule.

        Args:
            lr_kwargs: passed on to the schedule's ``step()`` (``{"metrics": ...}`` for ReduceLROnPlateau).

        Raises:
            RuntimeError: called before ``backward()``, inside ``no_sync()``, or without an optimizer.
            TrainingDivergedError: `MAX_SKIPPED_IN_A_ROW` steps in a row had gradients that are not finite.
        """
        if self._in_no_sync:
            raise RuntimeError("step() inside no_sync(): the gradients are not averaged yet; call it after the block")
        if self._backwards == 0:
            raise RuntimeError("step() before backward(loss): there are no gradients to step on")
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self.accumulated += 1
        self._backwards = 0
        if boundary:
            self._take_step(self.train_batch_size(), lr_kwargs or {})

    def flush(self) -> bool:
        """Step on the micro-batches accumulated so far, e.g. at the end of the data, as a mean over those.

        Every rank must have accumulated the same number. Without it, the next micro-batches complete the step.

        Returns:
            Whether there were any.
        """
        if self._backwards:
            raise RuntimeError("flush() between backward() and step(); call it after step()")
        count = self.accumulated
        if count == 0:
            return False
        if self.rung.stage < 2:
            self.rung.synchronize_gradients()
        self.rung.scale_gradients(self.gradient_accumulation_steps() / count)
        self._take_step(count * self.train_micro_batch_size_per_gpu() * self.world_size, {})
        return True

    def _take_step(self, samples: int, lr_kwargs: Mapping[str, Any]) -> None:
        if self.device.type != "cpu":
            self._warn_of_losses(self._losses)
        lr = self.get_lr()
        with self.reporter.timed("step"):
            self._norm = norm = self.rung.grad_norm()  # the same on every rank, so all of them decide alike
            clip = self.config.gradient_clipping
            finite = math.isfinite(norm)
            culprit = None if finite else self._first_parameter_not_finite()
            if finite:
                if clip:
                    self.rung.clip_grad_norm_(clip, norm)
                self.rung.step()
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += samples
        self.skipped_steps += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        clipped = min(norm, clip) if clip and finite else norm
        learning_rate = lr[0] if lr else 0.0
        losses, tokens = self._losses, self._tokens * self.world_size
        self.forget_micro_batches()
        self.reporter.report(
            Step(
                self.global_steps, self.global_samples, samples, tokens, losses, learning_rate, norm, clipped,
                skipped=not finite,
            )
        )  # fmt: skip
        if not finite:
            self._complain(norm, culprit)

    # -- what is not finite ---------------------------------------------------------------------------------

    def _warn_of_losses(self, losses: list[torch.Tensor]) -> None:
        for loss in losses:
            if not math.isfinite(loss.item()):
                logger.warning(
                    "step %d: the loss of micro-batch %d on rank %d is %s; look at this rank's inputs and at the "
                    "learning rate (%s)",
                    self.global_steps + 1, self.micro_steps + 1, self.global_rank, loss.item(), self.get_lr(),
                )  # fmt: skip

    def _first_parameter_not_finite(self) -> str | None:
        """Name of the first parameter, in the model's order, whose gradient is not finite on some rank."""
        order = {name: i for i, (name, _) in enumerate(self.module.named_parameters())}
        mine = [
            order[piece.name]
            for piece, values in self.rung.owned_pieces()
            for gradient in [piece.slot.param.grad if self.rung.stage == 0 else values.grad]
            if gradient is not None and not torch.isfinite(gradient).all()
        ]
        first = [i for i in self.comm.all_gather_object(min(mine, default=None), "control") if i is not None]
        return list(order)[min(first)] if first else None

    def _complain(self, norm: float, culprit: str | None) -> None:
        where = f"the first gradient that is not finite is that of {culprit!r}"
        if culprit is None:
            where = "each gradient is finite, but the sum of their squares is not"
        text = (
            f"step {self.global_steps} skipped on every rank: the gradient norm is {norm}; {where}. The weights are "
            f"as before ({self.skipped_steps} skipped so far, {self.skipped_in_a_row} in a row)"
        )
        if self.global_rank == 0:
            logger.warning(text)
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingDivergedError(
                f"{text}. That is {MAX_SKIPPED_IN_A_ROW} in a row: training does not recover by itself. Go back to a "
                "checkpoint with a smaller learning rate, a longer warm-up, or smaller gradient_clipping "
                f"({self.config.gradient_clipping})"
            )

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"backward() takes the loss, a tensor of one element, not a {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(
                f"backward() takes a loss of one element, not of shape {tuple(loss.shape)}: take its mean first"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss has no gradient: it was computed under torch.no_grad(), was detached, or every "
                "parameter is frozen"
            )
        if not self._forwarded and not self._backwards:
            raise RuntimeError("backward() before a forward: get the loss from engine(...), not from engine.module(...)")
        if self._backwards and self._boundary is None and not self._in_no_sync:
            raise RuntimeError(
                "backward() twice without step(): call step() after every backward(), it acts only when all "
                f"{self.gradient_accumulation_steps()} micro-batches of a step are there; of several losses of one "
                "micro-batch, take the sum"
            )

    # -- accumulation ---------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way (up to its ``step()``) completes an optimizer step."""
        if self._in_no_sync:
            return False
        if self._boundary is not None:
            return self._boundary
        return self.accumulated + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say yourself whether the coming micro-batches complete a step; None returns to counting.

        Then ``step()`` need not follow each ``backward()``; losses are still divided by
        ``gradient_accumulation_steps``.
        """
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block gradients add up on this rank, and ``step()`` is not allowed.

        Raises:
            RuntimeError: in stages 2 and 3, which have no room for whole gradients.
        """
        with self.rung.no_sync():
            self._in_no_sync = True
            try:
                yield
            finally:
                self._in_no_sync = False

    # -- figures, by DeepSpeed's names ----------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples of an optimizer step, all ranks together."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward and backward on one rank."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step on one rank."""
        return self.config.gradient_accumulation_steps

    def zero_optimization_stage(self) -> int:
        """0 (plain data parallelism) to 3."""
        return self.rung.stage

    def gradient_clipping(self) -> float:
        """The greatest gradient norm; 0 is off."""
        return self.config.gradient_clipping

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last step over the whole model, before clipping; None before the first."""
        return self._norm

    @property
    def loss_scale(self) -> float:
        """1: nothing is scaled in fp32."""
        return 1.0

    cur_scale = loss_scale

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Save everything that training goes on from. Every rank must call it.

        Args and errors: see :func:`zero_course.checkpoint.save_checkpoint`.
        """
        return save_checkpoint(self, save_dir, tag, client_state or {}, save_latest)

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint, saved by any number of ranks at any stage. Every rank must call it.

        Args, returns and errors: see :func:`zero_course.checkpoint.load_checkpoint`.
        """
        return load_checkpoint(
            self, load_dir, tag, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )

    def save_16bit_model(self, save_dir: str | PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """Write the whole model's state dict, floating-point tensors as bfloat16, to one file. Every rank must call it.

        Args:
            save_dir: folder, made if need be.
            save_filename: one that ends in ``.safetensors`` is written as such, others by ``torch.save``.

        Returns:
            Whether it was written. Under stage 3 every rank would hold the whole model for it, so it is only
            done if ``stage3_gather_16bit_weights_on_model_save`` is set.
        """
        if self.rung.stage == 3 and not self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save:
            logger.warning(
                "save_16bit_model: nothing written. Under stage 3 set zero_optimization."
                "stage3_gather_16bit_weights_on_model_save to true, or save_checkpoint and convert it with "
                "`python -m zero_course.checkpoint.convert`"
            )
            return False
        state = self.rung.full_state_dict()
        if self.global_rank == 0:
            state = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state.items()}
            write_state_dict(state, Path(save_dir) / save_filename)
        self.comm.barrier()
        return True

    # -- as a module ----------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Engine:
        """Training mode, or with False evaluation mode, as for any module."""
        self.rung.training = mode
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Engine:
        """Refuse ``.to()``, ``.half()`` and the like, unless they change nothing."""
        for param in self.module.parameters():
            before = torch.empty(0, dtype=param.dtype, device=param.device)
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise RuntimeError(
                    f"the engine's parameters lie in flat buffers and cannot be moved or cast ({before.dtype} on "
                    f"{before.device} to {after.dtype} on {after.device}); do that to the model before initialize"
                )
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)


def _tokens_in(inputs: Any) -> int:
    """Elements of the first tensor of whole numbers with two or more dimensions: (batch, time) tokens."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2:
            return 0 if leaf.is_floating_point() else leaf.numel()
    return 0
