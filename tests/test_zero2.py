"""ZeRO-2: whole gradients are gone as soon as their bucket is reduced."""

from __future__ import annotations

import pytest
import torch
from ladder import RUNGS
from ranks import run_ranks
from torch import nn

import zero_course as zc

LAYERS, WIDTH = 8, 16


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def gradients_alive(stage: int, bucket_layers: int) -> tuple[int, int]:
    """Elements of gradients, buckets included, alive when backward reaches the first layer; and of .grad after."""
    model = deep()
    size = WIDTH * WIDTH
    args = {"reduce_bucket_size": bucket_layers * size, "lr": 0.1}
    rung = RUNGS[stage](model, torch.optim.SGD, **args)
    alive: list[int] = []

    def count(grad: torch.Tensor) -> None:
        tensors = [p.grad for p in model.parameters() if p.grad is not None]
        tensors += [*rung.pool.buffers, *rung._gradients.values()]
        alive.append(
            sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()) // 4
        )

    model[0].weight.register_hook(count)
    rung(torch.randn(2, WIDTH)).sum().backward()
    left = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
    return alive[0], left


def test_full_gradients_never_pile_up() -> None:
    size = WIDTH * WIDTH
    for stage in (0, 1):
        assert run_ranks(2, gradients_alive, stage, 1)[0][0] == LAYERS * size
    for alive, left in run_ranks(2, gradients_alive, 2, 1):
        assert alive <= 2 * size and left == 0  # one bucket that fills, one on its way


def test_a_large_bucket_undoes_the_saving() -> None:
    for alive, _ in run_ranks(2, gradients_alive, 2, LAYERS):
        assert alive >= LAYERS * WIDTH * WIDTH


def without_sync(stage: int) -> str:
    rung = RUNGS[stage](deep(), torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="leave it out.*or use stage 1") as caught, rung.no_sync():
        pass
    return str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_says_what_to_do_instead(stage: int) -> None:
    assert f"stage {stage}" in run_ranks(2, without_sync, stage)[0]


def buffers_after(steps: int) -> list[int]:
    rung = zc.Zero2(deep(), torch.optim.SGD, lr=0.1, reduce_bucket_size=WIDTH * WIDTH)
    for _ in range(steps):
        rung(torch.randn(2, WIDTH)).sum().backward()
        rung.step()
        rung.zero_grad()
    return [buffer.data_ptr() for buffer in rung.pool.buffers + rung.comm.pool.buffers]


def test_buffers_are_allocated_once() -> None:
    for one, five in zip(run_ranks(2, buffers_after, 1), run_ranks(2, buffers_after, 5), strict=True):
        assert len(one) == len(five)
