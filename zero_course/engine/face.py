"""The engine's public attributes, figures and checkpoint calls, by DeepSpeed's names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import load_checkpoint, save_checkpoint, write_state_dict
from ..comm import get_local_rank
from ..config import Config
from ..data_parallel import DataParallel
from .dataloader import ShardedDataLoader

logger = logging.getLogger(__name__)


class EngineFace(nn.Module):
    """All of the engine but the training loop's calls.

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
        skipped_steps: how many of them were skipped; ``skipped_in_a_row``: without a good one since.
        micro_steps: micro-batches so far.
        global_samples: samples of all ranks in those steps.
        accumulated: micro-batches since the last optimizer step.
        data_position: the loader's place at the last optimizer step.
    """

    def __init__(
        self,
        rung: DataParallel,
        config: Config,
        lr_scheduler: Any,
        training_dataloader: ShardedDataLoader | None,
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
        self.skipped_in_a_row = self.accumulated = 0
        self.data_position: dict[str, int] | None = None
        self.global_grad_norm: float | None = None

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
        return self.global_grad_norm

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

    def save_16bit_model(
        self, save_dir: str | PathLike[str], save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """Write the whole model's state dict, floating-point tensors as bfloat16, to one file. Every rank must call it.

        Args:
            save_dir: folder, made if need be.
            save_filename: one that ends in ``.safetensors`` is written as such, others by ``torch.save``.

        Returns:
            Whether it was written. Under stage 3 every rank would hold the whole model for it, so it is only
            done if ``stage3_gather_16bit_weights_on_model_save`` is set.
        """
        if (
            self.rung.stage == 3
            and not self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save
        ):
            logger.warning(
                "save_16bit_model: nothing written. Under stage 3 set zero_optimization."
                "stage3_gather_16bit_weights_on_model_save to true, or save_checkpoint and convert it with "
                "`python -m zero_course.checkpoint`"
            )
            return False
        state = self.rung.full_state_dict()
        if self.global_rank == 0:
            state = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state.items()}
            write_state_dict(state, Path(save_dir) / save_filename)
        self.comm.barrier()
        return True

    # -- as a module ----------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> EngineFace:
        """Training mode, or with False evaluation mode, as for any module."""
        self.rung.training = mode
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> EngineFace:
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
