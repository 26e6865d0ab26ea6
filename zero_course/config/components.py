"""`optimizer` and `scheduler`: sections whose `type` decides which `params` there are."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import model_validator
from pydantic_core import PydanticCustomError

from zero_course.config.values import (
    Betas,
    Count,
    LastIteration,
    NonNegative,
    PerGroup,
    Positive,
    Real,
    Section,
    hint,
    later,
)


class AdamParams(Section):
    """`optimizer.params` of Adam and AdamW; the defaults are those of DeepSpeed's FusedAdam and DeepSpeedCPUAdam.

    (ops/adam/fused_adam.py, ops/adam/cpu_adam.py; weight_decay is 0 there, where torch.optim.AdamW has 0.01.)
    """

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    adam_w_mode: bool = True  # "Adam" is AdamW unless this is false; "AdamW" always is
    torch_adam: bool = False  # takes torch's defaults instead: weight_decay 0.01 for AdamW
    amsgrad: bool = False
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None
    bias_correction: bool = later(True)
    fp32_optimizer_states: bool = later(True)
    set_grad_none: bool = hint(True, "the engine owns the gradient buffers")


class SGDParams(Section):
    """`optimizer.params` of SGD; the defaults are those of torch.optim.SGD, which DeepSpeed uses."""

    lr: NonNegative = 1e-3
    momentum: NonNegative = 0.0
    dampening: Real = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: bool = False
    maximize: bool = False
    foreach: bool | None = None
    fused: bool | None = None

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDParams:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise PydanticCustomError("value", "nesterov needs momentum > 0 and dampening 0")
        return self


class WarmupLRParams(Section):
    """`scheduler.params` of WarmupLR; `zero_course.lr_schedules` says what each of them means."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None
    warmup_num_steps: Positive = 1000
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: LastIteration = -1


class WarmupDecayLRParams(WarmupLRParams):
    """`scheduler.params` of WarmupDecayLR."""

    total_num_steps: Positive
    warmup_max_lr: PerGroup | None = 0.001


class WarmupCosineLRParams(Section):
    """`scheduler.params` of WarmupCosineLR."""

    total_num_steps: Positive
    warmup_min_ratio: NonNegative = 0.0
    warmup_num_steps: Positive = 1000
    cos_min_ratio: NonNegative = 0.0001
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: LastIteration = -1


class OneCycleParams(Section):
    """`scheduler.params` of OneCycle."""

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: NonNegative = 0.0
    cycle_first_step_size: Positive = 2000
    cycle_second_step_size: Count | None = None
    cycle_first_stair_count: Count = 0
    cycle_second_stair_count: Count | None = None
    decay_step_size: Count = 0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: NonNegative = 0.0
    last_batch_iteration: LastIteration = -1


class LRRangeTestParams(Section):
    """`scheduler.params` of LRRangeTest."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: Positive = 2000
    lr_range_test_step_rate: Real = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: LastIteration = -1


OPTIMIZERS: dict[str, type[Section]] = {"Adam": AdamParams, "AdamW": AdamParams, "SGD": SGDParams}
OPTIMIZERS_LATER = (
    *("Adagrad", "Lamb", "Lion", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon"),
    *("MuAdam", "MuAdamW", "MuSGD"),
)
SCHEDULERS: dict[str, type[Section]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}


class OptimizerConfig(Section):
    """`optimizer`: DeepSpeed's name of it, and its parameters."""

    type: str
    params: AdamParams | SGDParams

    def torch_class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The torch class and its arguments; see `zero_course.config.build_optimizer_class`."""
        if isinstance(self.params, SGDParams):
            chosen: type[torch.optim.Optimizer] = torch.optim.SGD
            always = {"lr", "momentum", "dampening", "weight_decay", "nesterov"}
        else:
            adamw = self.type == "AdamW" or self.params.adam_w_mode
            chosen = torch.optim.AdamW if adamw else torch.optim.Adam
            always = {"lr", "betas", "eps", "weight_decay"}
        passed = always | ({"amsgrad", "maximize", "foreach", "fused"} & self.params.model_fields_set)
        return chosen, {name: value for name, value in self.params if name in passed}


class SchedulerConfig(Section):
    """`scheduler`: DeepSpeed's name of it, and its parameters."""

    type: str
    params: WarmupLRParams | WarmupDecayLRParams | WarmupCosineLRParams | OneCycleParams | LRRangeTestParams
