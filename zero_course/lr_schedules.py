"""Learning-rate schedules: DeepSpeed's five, by DeepSpeed's names, parameters and values.

A schedule is a function of one integer, the number of real optimizer steps so far. `step()` is called after each
of them (not after a skipped one) and writes the next rate into the optimizer's parameter groups. The count starts
at -1, so that the first step trains with the rate set at construction, and after k calls of `step()` the count
is k - 1. Two consequences surprise people, here as in DeepSpeed: a warm-up from 0 trains its first *two* steps
at rate 0 (counts -1 and 0), and a logarithmic warm-up is the default.

WarmupLR        rise to the maximum, stay there
WarmupDecayLR   rise to the maximum, fall linearly to 0
WarmupCosineLR  the same as ratios of the optimizer's own rate, falling along half a cosine
OneCycle        rise, fall, then decay, with momentum moving the other way [Smith 2018, arXiv 1803.09820]
LRRangeTest     grow without end, to see where training breaks [the same paper, section 4.1]

A schedule costs no memory to speak of and no traffic: every rank computes the same numbers by itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from zero_course.config import Config

logger = logging.getLogger(__name__)

PerGroup = float | Sequence[float]
"""One value for every parameter group, or one value each."""


class Schedule:
    """What the five schedules share; the interface is that of `torch.optim.lr_scheduler`.

    Args:
        optimizer: a torch optimizer, or anything that has `param_groups` or wraps such a thing as `.optimizer`.
        last_batch_iteration: the count to start from. -1 starts afresh and writes the initial rates into the
            optimizer; 0 or more goes on from there and leaves the optimizer alone until the next `step()`.

    Attributes:
        base_lrs: each group's rate before the schedule touched it.
        last_batch_iteration: the count; -1 before the first `step()`.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1):
        self.optimizer = (
            optimizer if hasattr(optimizer, "param_groups") else getattr(optimizer, "optimizer", None)
        )
        if not hasattr(self.optimizer, "param_groups"):
            raise TypeError(
                f"a schedule needs an optimizer with param_groups, got {type(optimizer).__name__}"
            )
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = list(self.base_lrs)

    def get_lr(self) -> list[float]:
        """Each group's learning rate at the present count."""
        return self._rates()

    def get_last_lr(self) -> list[float]:
        """Each group's learning rate as last written into the optimizer."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one optimizer step (or jump to the given count) and write the new rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The count, under DeepSpeed's key, and the rates the schedule was built on."""
        return {"last_batch_iteration": self.last_batch_iteration, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved count (DeepSpeed's own state, without `base_lrs`, will do) and write its rates.

        Raises:
            ValueError: the state is of an optimizer with another number of parameter groups.
        """
        base_lrs = state.get("base_lrs", self.base_lrs)
        if len(base_lrs) != len(self.base_lrs):
            raise ValueError(
                f"the saved schedule has {len(base_lrs)} parameter groups, this optimizer has "
                f"{len(self.base_lrs)}; build the optimizer with the groups it was saved with"
            )
        self.base_lrs = list(base_lrs)
        self.last_batch_iteration = state["last_batch_iteration"]
        self._write()

    def _rates(self) -> list[float]:
        raise NotImplementedError

    def _write(self) -> None:
        self._last_lr = self._rates()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr):
            if isinstance(
                group["lr"], torch.Tensor
            ):  # a capturable optimizer reads the rate from this tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _per_group(self, name: str, value: PerGroup) -> list[float]:
        """One value a group: a number is repeated, a list must have the right length."""
        groups = len(self.base_lrs)
        values = list(value) if isinstance(value, Sequence) else [value] * groups
        if len(values) != groups:
            raise ValueError(
                f"{name} has {len(values)} values for {groups} parameter groups; give one or {groups}"
            )
        return values


class WarmupLR(Schedule):
    """Rise from the minimum to the maximum, then stay.

    lr(t) = min + (max - min) g(t), with g(t) = log(t + 1) / log(W) or t / W while t < W, and 1 from then on;
    t is the count and W = max(2, warmup_num_steps). Before the first `step()` the rate is the minimum.

    Args:
        optimizer: see `Schedule`.
        warmup_min_lr: rate to start from, one or one a group.
        warmup_max_lr: rate to reach, one or one a group; None means the optimizer's own.
        warmup_num_steps: steps to reach it, > 0.
        warmup_type: "log" or "linear".
        last_batch_iteration: see `Schedule`.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = _WarmUp(warmup_num_steps, warmup_type)
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self._max_lrs = None if warmup_max_lr is None else self._per_group("warmup_max_lr", warmup_max_lr)
        if last_batch_iteration == -1:
            self._write()

    @property
    def max_lrs(self) -> list[float]:
        """Rate to reach, one a group."""
        return self.base_lrs if self._max_lrs is None else self._max_lrs

    def _rates(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        ratio = self._ratio(self.last_batch_iteration)
        return [low + (high - low) * ratio for low, high in zip(self.min_lrs, self.max_lrs)]

    def _ratio(self, count: int) -> float:
        return self.warmup(count) if count < self.warmup.steps else 1.0


class WarmupDecayLR(WarmupLR):
    """Rise as `WarmupLR` does, then fall linearly to the minimum at total_num_steps, and stay.

    From t = W on, g(t) = max(0, (total - t) / max(1, total - W)).

    Args:
        optimizer: see `Schedule`.
        total_num_steps: length of the training in optimizer steps, warm-up included.
        warmup_min_lr: see `WarmupLR`; also where the fall ends.
        warmup_max_lr: see `WarmupLR`.
        warmup_num_steps: see `WarmupLR`.
        warmup_type: see `WarmupLR`.
        last_batch_iteration: see `Schedule`.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )
        self.warmup.warn_if_longer_than(total_num_steps)

    def _ratio(self, count: int) -> float:
        if count < self.warmup.steps:
            return self.warmup(count)
        return max(0.0, (self.total_num_steps - count) / max(1, self.total_num_steps - self.warmup.steps))


class WarmupCosineLR(Schedule):
    """Scale the optimizer's own rate: rise to 1, then fall along half a cosine to cos_min_ratio, and stay.

    lr(t) = base r(t); r rises from warmup_min_ratio to 1 as in `WarmupLR`, and from t = W on it is
    c + (1 - c)(1 + cos(pi p)) / 2 with c = cos_min_ratio and p = min(1, (t - W + 1) / max(1, total - W)).
    Before the first `step()` the rate is 0, whatever warmup_min_ratio is.

    Args:
        optimizer: see `Schedule`; its rates are the maxima.
        total_num_steps: length of the training in optimizer steps, warm-up included.
        warmup_min_ratio: ratio at t = 0.
        warmup_num_steps: see `WarmupLR`.
        cos_min_ratio: ratio at the end.
        warmup_type: see `WarmupLR`.
        last_batch_iteration: see `Schedule`.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = _WarmUp(warmup_num_steps, warmup_type)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.warmup.warn_if_longer_than(total_num_steps)
        if last_batch_iteration == -1:
            self._write()

    def get_lr_ratio(self) -> float:
        """The factor by which every group's own rate is multiplied at the present count."""
        count, warmup_steps = self.last_batch_iteration, self.warmup.steps
        if count < 0:
            return 0.0
        if count < warmup_steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.warmup(count)
        progress = min(1.0, (count - warmup_steps + 1) / max(1, self.total_num_steps - warmup_steps))
        return max(
            0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2
        )

    def _rates(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.base_lrs]


class OneCycle(Schedule):
    """One triangle from the minimum to the maximum and back, then decay; momentum mirrors the rate.

    With s(t) in [0, 1] the height of the triangle at t + 1: lr = min + (max - min) s and
    beta1 = max_mom - (max_mom - min_mom) s. After the cycle, with d = (steps since) / decay_step_size:
    lr = min / (1 + decay_lr_rate d) and beta1 = max_mom (1 + decay_mom_rate d), if decay_step_size > 0.

    As in DeepSpeed, cycling momentum also sets beta2 to 0.99, and beta1 starts at min_mom, one step before
    the cycle puts it at max_mom. Set cycle_momentum to False to keep the optimizer's own betas.

    Args:
        optimizer: see `Schedule`; momentum cycles only in an optimizer with `betas`.
        cycle_min_lr: rate at both feet of the triangle, one or one a group.
        cycle_max_lr: rate at its top, one or one a group.
        decay_lr_rate: how fast the rate decays after the cycle; 0 keeps cycle_min_lr.
        cycle_first_step_size: steps up, > 0.
        cycle_second_step_size: steps down, >= 0; None means as many as up.
        cycle_first_stair_count: go up in that many stairs instead of evenly; 0 for evenly.
        cycle_second_stair_count: the same going down; None means as many as up.
        decay_step_size: steps of one unit of decay; 0 for no decay.
        cycle_momentum: whether beta1 (and beta2, see above) is written too.
        cycle_min_mom: beta1 at the top of the triangle, one or one a group.
        cycle_max_mom: beta1 at its feet, one or one a group.
        decay_mom_rate: how fast beta1 grows after the cycle; 0 keeps cycle_max_mom.
        last_batch_iteration: see `Schedule`.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        if cycle_first_step_size <= 0:
            raise ValueError(f"cycle_first_step_size must be > 0, got {cycle_first_step_size}")
        if cycle_second_step_size is not None and cycle_second_step_size < 0:
            raise ValueError(f"cycle_second_step_size must be >= 0, got {cycle_second_step_size}")
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.min_moms = self._per_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._per_group("cycle_max_mom", cycle_max_mom)
        self.first_steps = cycle_first_step_size
        self.second_steps = (
            cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        )
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.total_steps = self.first_steps + self.second_steps
        self.decay_steps, self.decay_lr_rate, self.decay_mom_rate = (
            decay_step_size,
            decay_lr_rate,
            decay_mom_rate,
        )
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and not all("betas" in group for group in self.optimizer.param_groups):
            logger.warning(
                "OneCycle: %s has no betas, so momentum is not cycled", type(self.optimizer).__name__
            )
            self.cycle_momentum = False
        if last_batch_iteration == -1:
            self._write()

    def _rates(self) -> list[float]:
        if self.last_batch_iteration >= self.total_steps:
            return [low / (1 + self.decay_lr_rate * self._decays()) for low in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Each group's (beta1, beta2) at the present count; None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < 0:
            return [(low, 0.99) for low in self.min_moms]
        if self.last_batch_iteration >= self.total_steps:
            return [(high * (1 + self.decay_mom_rate * self._decays()), 0.99) for high in self.max_moms]
        height = self._height()
        return [(high - (high - low) * height, 0.99) for low, high in zip(self.min_moms, self.max_moms)]

    def _height(self) -> float:
        """Where the triangle stands one step ahead of the count: 0 at its feet, 1 at its top."""
        position = (self.last_batch_iteration + 1) % self.total_steps
        if position <= self.first_steps:
            done, length, stairs = position, self.first_steps, self.first_stairs
        else:
            done, length, stairs = self.total_steps - position, self.second_steps, self.second_stairs
        return done / length if stairs == 0 else math.floor(done * stairs / length) / stairs

    def _decays(self) -> float:
        """Units of decay since the cycle ended; 0 if decay is off."""
        steps = self.last_batch_iteration - self.total_steps + 1
        return steps / self.decay_steps if self.decay_steps else 0.0

    def _write(self) -> None:
        super()._write()
        for group, betas in zip(
            self.optimizer.param_groups, self.get_mom() or [], strict=self.cycle_momentum
        ):
            if betas[0] >= 1 > group["betas"][0]:
                logger.warning(
                    "OneCycle: beta1 has grown to %.4g; Adam needs < 1, lower decay_mom_rate", betas[0]
                )
            group["betas"] = betas


class LRRangeTest(Schedule):
    """Grow the rate steadily from a small one, to find the largest that trains.

    lr(t) = min (1 + rate i), with i = (t + 1) / step_size, rounded down if staircase.

    Args:
        optimizer: see `Schedule`.
        lr_range_test_min_lr: rate to start from, one or one a group.
        lr_range_test_step_size: steps of one interval, > 0.
        lr_range_test_step_rate: growth per interval, in units of the minimum.
        lr_range_test_staircase: grow once an interval instead of every step.
        last_batch_iteration: see `Schedule`.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        if lr_range_test_step_size <= 0:
            raise ValueError(f"lr_range_test_step_size must be > 0, got {lr_range_test_step_size}")
        self.min_lrs = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._write()

    def _rates(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [low * growth for low in self.min_lrs]


class _WarmUp:
    """The rising part of the three warm-up schedules: count -> share of the way, for count < steps."""

    def __init__(self, steps: int, kind: str):
        if steps <= 0:
            raise ValueError(f"warmup_num_steps must be > 0, got {steps}")
        if kind not in ("log", "linear"):
            raise ValueError(f"warmup_type must be 'log' or 'linear', got {kind!r}")
        self.steps = max(2, steps)  # log(1) = 0 cannot divide
        self.kind = kind

    def __call__(self, count: int) -> float:
        return math.log(count + 1) / math.log(self.steps) if self.kind == "log" else count / self.steps

    def warn_if_longer_than(self, total: int) -> None:
        if total < self.steps:
            logger.warning(
                "total_num_steps %d < warmup_num_steps %d: the rate never peaks", total, self.steps
            )


SCHEDULES = {cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
"""DeepSpeed's `scheduler.type` -> class."""


def build_scheduler(config: Config, optimizer: Any) -> Schedule | None:
    """The schedule that the config's `scheduler` section asks for, on this optimizer.

    Args:
        config: a loaded configuration.
        optimizer: see `Schedule`.

    Returns:
        The schedule, its initial rates already written into the optimizer; None if there is no such section.

    Raises:
        ValueError: a list of rates does not have one value for each of the optimizer's parameter groups.
    """
    if config.scheduler is None:
        return None
    return SCHEDULES[config.scheduler.type](optimizer, **dict(config.scheduler.params))
