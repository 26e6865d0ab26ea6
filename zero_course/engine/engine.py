"""The training loop's three calls: ``loss = engine(x)``, ``engine.backward(loss)``, ``engine.step()``.

The engine adds to a rung of the ladder what a training run needs besides the strategy: gradient accumulation,
clipping, a learning-rate schedule, a guard against gradients that are not finite, counters, reports and
checkpoints. One optimizer step takes ``gradient_accumulation_steps`` micro-batches. ``backward()`` divides each
loss by their number (so the gradient is the mean over the micro-batches: do not divide it yourself), and only
the last one's ``step()`` acts.

    micro-batch            1         2         3         4 = boundary
    stages 0 and 1         add up    add up    add up    add up, average over the ranks, update
    stages 2 and 3         average   average   average   average, update       (no room for whole gradients)

A step whose gradient norm is nan or infinite is skipped (guard.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..config import Config
from ..data_parallel import DataParallel
from ..utils import register
from .dataloader import ShardedDataLoader
from .face import EngineFace
from .guard import (
    MAX_SKIPPED_IN_A_ROW,
    TrainingDivergedError,
    first_parameter_not_finite,
    why_skipped,
)
from .report import Reporter, Step

logger = logging.getLogger(__name__)


class Engine(EngineFace):
    """A model in training. Made by :func:`zero_course.initialize`; attributes as in :class:`EngineFace`.

    Args:
        rung: the strategy, with the model in it and the optimizer.
        config: the checked configuration.
        lr_scheduler: anything with a ``step()``, or None.
        training_dataloader: the loader whose place goes into checkpoints, or None.
    """

    def __init__(
        self,
        rung: DataParallel,
        config: Config,
        lr_scheduler: Any = None,
        training_dataloader: ShardedDataLoader | None = None,
    ) -> None:
        super().__init__(rung, config, lr_scheduler, training_dataloader)
        self.reporter = Reporter(config, rung)
        self._boundary: bool | None = None  # set by set_gradient_accumulation_boundary
        self._in_no_sync = False
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
            self._warn_of_losses(self._losses[-1:], self.micro_steps + 1)
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
            raise RuntimeError(
                "step() inside no_sync(): the gradients are not averaged yet; call it after the block"
            )
        if self.optimizer is None:
            raise RuntimeError(
                "step() without an optimizer: name one in the config, or pass one to initialize"
            )
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
            self._warn_of_losses(self._losses, self.micro_steps + 1 - len(self._losses))
        rates, clip = self.get_lr(), self.config.gradient_clipping
        with self.reporter.timed("step"):
            self.global_grad_norm = norm = self.rung.grad_norm()
            finite = math.isfinite(norm)
            reason = "" if finite else why_skipped(norm, first_parameter_not_finite(self.rung))
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
        step = Step(
            number=self.global_steps,
            samples_so_far=self.global_samples,
            samples=samples,
            tokens=self._tokens * self.world_size,
            losses=self._losses,
            lr=rates[0],
            norm=norm,
            clipped_norm=min(norm, clip) if clip and finite else norm,
            skipped=not finite,
        )
        self.forget_micro_batches()
        self.reporter.report(step)
        if not finite:
            self._complain(reason)

    def _warn_of_losses(self, losses: list[torch.Tensor], first: int) -> None:
        for micro_batch, loss in enumerate(losses, first):
            if not math.isfinite(loss.item()):
                logger.warning(
                    "step %d, micro-batch %d: the loss on rank %d is %s; look at this rank's inputs, and at the "
                    "learning rate, %s",
                    self.global_steps + 1,
                    micro_batch,
                    self.global_rank,
                    loss.item(),
                    self.get_lr(),
                )

    def _complain(self, reason: str) -> None:
        text = (
            f"step {self.global_steps} skipped on every rank: {reason}. The weights are as before "
            f"({self.skipped_steps} skipped so far, {self.skipped_in_a_row} in a row)"
        )
        if self.global_rank == 0:
            logger.warning(text)
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingDivergedError(
                f"{text}. After {MAX_SKIPPED_IN_A_ROW} in a row it does not recover by itself: go back to a checkpoint "
                "with a smaller learning rate, a longer warm-up or a smaller gradient_clipping, or look at the data"
            )

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"backward() takes the loss, a tensor of one element, not a {type(loss).__name__}"
            )
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
            raise RuntimeError(
                "backward() before a forward: get the loss from engine(...), not from engine.module(...)"
            )
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


def _tokens_in(inputs: Any) -> int:
    """Elements of the first tensor of whole numbers with two or more dimensions: (batch, time) tokens."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2:
            return 0 if leaf.is_floating_point() else leaf.numel()
    return 0
