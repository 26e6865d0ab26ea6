"""Data parallelism: when gradients are sent, how often, and what is refused."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from ladder import RUNGS, Plain, Recomputed, batch, build, loss_of, train
from ranks import fresh_ranks, run_ranks
from torch import nn

import zero_course as zc

SGD = {"optimizer_class": torch.optim.SGD, "lr": 0.01}


def deep(layers: int = 6, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def sent(stage: int, micro: int, sync_each: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes sent in one step of several micro-batches, and the formula for one."""
    rung = RUNGS[stage](deep(), **SGD)
    rung.comm.ledger.clear()
    x = torch.randn(3, 8)
    for i in range(micro):
        if i < micro - 1 and not sync_each:
            with rung.no_sync():
                rung(x).sum().backward()
        else:
            rung(x).sum().backward()
    rung.step()
    return rung.comm.ledger.by_purpose(), rung.predicted_traffic()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_of_a_step_are_the_formula(stage: int, world: int) -> None:
    for measured, predicted in run_ranks(world, sent, stage, 1, True):
        assert measured == predicted


@pytest.mark.parametrize("stage", [0, 1])
def test_accumulation_communicates_once_a_step(stage: int) -> None:
    for measured, predicted in run_ranks(2, sent, stage, 4, False):
        assert measured == predicted


def accumulated(stage: int, sync_each: bool) -> list[torch.Tensor]:
    rung = RUNGS[stage](build("Plain"), **SGD, reduce_bucket_size=40)
    rank, world = rung.comm.rank, rung.comm.world_size
    for step in range(3):
        x, y = batch(step, world * 4)
        x, y = x[rank * 4 :][:4], y[rank * 4 :][:4]
        if sync_each:
            loss_of(rung(x[:2]), y[:2]).backward()
        else:
            with rung.no_sync():
                loss_of(rung(x[:2]), y[:2]).backward()
        loss_of(rung(x[2:]), y[2:]).backward()
        rung.step()
        rung.zero_grad()
    return [p.detach().clone() for p in rung.parameters()]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1])
def test_syncing_each_micro_batch_costs_bytes_but_gives_the_same_weights(stage: int, world: int) -> None:
    once, each = (run_ranks(world, accumulated, stage, sync_each) for sync_each in (False, True))
    for a, b in zip(once[0], each[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def started_during_backward(overlap: bool) -> tuple[int, float, float]:
    """How many buckets were on their way when the gradient of the first layer came, last of all."""
    model = deep()
    rung = zc.DataParallel(model, **SGD, reduce_bucket_size=80, overlap_comm=overlap)
    rung.comm.ledger.clear()
    posted = []
    model[0].weight.register_hook(lambda grad: posted.extend(rung.comm.ledger.select("gradients")))
    rung(torch.randn(3, 8)).sum().backward()
    entries = list(rung.comm.ledger.select("gradients"))
    return len(posted), entries[1].finished, entries[2].started


def test_buckets_are_reduced_while_backward_goes_on() -> None:
    for posted, second_finished, third_started in run_ranks(2, started_during_backward, True):
        assert posted >= 4 and second_finished > third_started
    for posted, second_finished, third_started in run_ranks(2, started_during_backward, False):
        assert posted >= 4 and second_finished <= third_started


def own_optimizer() -> tuple[list[torch.Tensor], float]:
    """DataParallel without an optimizer leaves averages in .grad, for any optimizer to use."""
    rung = zc.DataParallel(build("Plain", seed=zc.get_rank()), reduce_bucket_size=40)
    optimizer = torch.optim.AdamW(rung.parameters(), lr=1e-2)
    train(rung, optimizer, rank=rung.comm.rank, world=rung.comm.world_size, steps=3)
    with pytest.raises(RuntimeError, match=r"DataParallel\(module, torch.optim.AdamW"):
        rung.step()
    return [p.detach().clone() for p in rung.parameters()], rung.grad_norm()


def test_any_optimizer_can_use_the_averaged_gradients() -> None:
    model = build("Plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank=0, world=1, steps=3, rows=8)
    for params, norm in run_ranks(2, own_optimizer):
        assert norm == 0.0  # nothing left after zero_grad
        for ours, expected in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def norms(stage: int) -> tuple[float, float, float]:
    rung = RUNGS[stage](build("Plain"), **SGD, reduce_bucket_size=40)
    x, y = batch(0, 12)
    mine = slice(rung.comm.rank * 4, rung.comm.rank * 4 + 4)
    loss_of(rung(x[mine]), y[mine]).backward()
    before = rung.grad_norm()
    assert rung.clip_grad_norm_(before / 2) == pytest.approx(before)
    clipped = rung.grad_norm()
    rung.clip_grad_norm_(before)  # already below: nothing to do
    return before, clipped, rung.grad_norm()


@pytest.mark.parametrize("stage", range(4))
def test_the_norm_is_that_of_the_joined_gradient(stage: int) -> None:
    model = build("Plain")
    x, y = batch(0, 12)
    loss_of(model(x), y).backward()
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for before, clipped, after in run_ranks(3, norms, stage):
        assert before == pytest.approx(expected, rel=1e-5)
        assert clipped == pytest.approx(expected / 2, rel=1e-5) and after == pytest.approx(clipped)


def evaluated_between_steps(stage: int) -> list[torch.Tensor]:
    rung = RUNGS[stage](build("Plain"), **SGD)
    for step in range(3):
        x, y = batch(step, 4)
        loss_of(rung(x), y).backward()
        rung.eval()
        with torch.no_grad():
            rung(x)
        rung.train()
        rung.step()
        rung.zero_grad()
    return list(rung.full_state_dict().values())


@pytest.mark.parametrize("stage", range(4))
def test_evaluation_between_backward_and_step_changes_nothing(stage: int) -> None:
    model = build("Plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        x, y = batch(step, 4)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values in run_ranks(2, evaluated_between_steps, stage):
        for ours, expected in zip(values, model.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = deep(4)
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[2](self.layers[3](x))
        if self.fail:
            x.register_hook(lambda grad: 1 / 0)
        return self.layers[0](self.layers[1](x))


def after_an_exception_in_backward(stage: int) -> float:
    model = Failing()
    rung = RUNGS[stage](model, **SGD, reduce_bucket_size=80)
    x = torch.ones(2, 8)
    model.fail = True
    with pytest.raises(ZeroDivisionError):
        rung(x).sum().backward()
    model.fail = False
    rung(x).sum().backward()
    return rung.grad_norm()


@pytest.mark.parametrize("stage", range(4))
def test_an_exception_in_backward_leaves_nothing_behind(stage: int) -> None:
    model = Failing()
    model(torch.ones(2, 8)).sum().backward()
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for norm in run_ranks(2, after_an_exception_in_backward, stage):
        assert norm == pytest.approx(expected, rel=1e-5)


def different_models(how: str) -> str:
    rank = zc.get_rank()
    model = deep(3)
    if how == "shape" and rank == 1:
        model[1] = nn.Linear(8, 9)
    elif how == "count" and rank == 1:
        model = deep(2)
    elif how == "frozen" and rank == 1:
        model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="ranks hold different models") as caught:
        zc.DataParallel(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [("shape", "'1.weight' is (9, 8)"), ("count", "no further parameter"), ("frozen", "frozen")],
)
def test_different_models_are_refused_by_name(how: str, message: str) -> None:
    for text in run_ranks(3, different_models, how):
        assert message in text and "rank 1" in text


def different_rows(stage: int) -> list[torch.Tensor]:
    rung = RUNGS[stage](build("Plain"), **SGD)
    rows = 3 if rung.comm.rank else 5
    x, y = batch(rung.comm.rank, rows)
    loss_of(rung(x), y).backward()
    rung.step()
    return list(rung.full_state_dict().values())


@pytest.mark.parametrize("stage", range(4))
def test_ranks_may_have_batches_of_different_lengths(stage: int) -> None:
    model = build("Plain")
    losses = [loss_of(model(x), y) for x, y in (batch(0, 5), batch(1, 3))]
    (sum(losses) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    for values in run_ranks(2, different_rows, stage):
        for ours, expected in zip(values, model.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def killed_in_mid_step(stage: int) -> None:
    model = deep()
    rung = RUNGS[stage](model, **SGD, reduce_bucket_size=80)
    if rung.comm.rank == 1:
        model[3].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    for _ in range(2):
        rung(torch.ones(2, 8)).sum().backward()
        rung.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_killed_in_mid_step_ends_the_others_with_an_error_that_names_it(stage: int) -> None:
    outcomes = fresh_ranks(3, killed_in_mid_step, stage, env={"ZERO_COURSE_TIMEOUT": "5"}, timeout=60)
    assert outcomes[1].signal == "SIGKILL"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is not None and "CollectiveError" in outcome.error, outcome
        assert "rank 1" in outcome.error


def skips_a_backward() -> None:
    rung = zc.DataParallel(deep(), **SGD)
    for step in range(2):
        if not (rung.comm.rank == 1 and step == 1):
            rung(torch.ones(2, 8)).sum().backward()
        rung.step()
    rung.comm.barrier()


def test_a_rank_that_skips_a_backward_is_named() -> None:
    outcomes = fresh_ranks(2, skips_a_backward, env={"ZERO_COURSE_TIMEOUT": "3"}, timeout=60)
    assert "rank 1 called barrier" in outcomes[0].error


class Shared(nn.Module):
    """One layer in two re-entrant checkpoints."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = nn.Linear(8, 8), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return x


def shared_in_checkpoints(use_reentrant: bool) -> torch.Tensor:
    rung = zc.DataParallel(Shared(use_reentrant), **SGD)
    x = torch.ones(2, 8, requires_grad=True)
    rung(x).sum().backward()
    return rung.module.block.weight.grad


def test_a_layer_in_two_checkpoints_is_reduced_once_or_refused() -> None:
    model = Shared(use_reentrant=False)
    results = run_ranks(1, shared_in_checkpoints, False)
    assert results[0].shape == model.block.weight.shape
    with pytest.raises(
        RuntimeError, match="'block.(weight|bias)' received a second gradient.*use_reentrant=False"
    ):
        run_ranks(1, shared_in_checkpoints, True)


def reentrant(stage: int) -> list[torch.Tensor]:
    args: dict[str, Any] = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    torch.manual_seed(0)
    rung = RUNGS[stage](Recomputed(use_reentrant=True), **SGD, **args, reduce_bucket_size=40)
    for step in range(3):
        x, y = batch(step, 8)
        mine = slice(rung.comm.rank * 4, rung.comm.rank * 4 + 4)
        loss_of(rung(x[mine]), y[mine]).backward()
        rung.step()
        rung.zero_grad()
    return list(rung.full_state_dict().values())


@pytest.mark.parametrize("stage", range(4))
def test_reentrant_recomputation(stage: int) -> None:
    torch.manual_seed(0)
    model = Recomputed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank=0, world=1, steps=3, rows=8)
    for values in run_ranks(2, reentrant, stage):
        for ours, expected in zip(values, model.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_parameters_that_are_not_the_modules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) that is not the module's"):
        zc.DataParallel(deep(), params=[nn.Parameter(torch.ones(3))])
    model = deep(1)
    with pytest.raises(ValueError, match="twice"):
        zc.DataParallel(model, params=[{"params": [model[0].bias]}, {"params": [model[0].bias]}])


def test_a_sparse_gradient_is_refused_by_name() -> None:
    rung = zc.DataParallel(nn.Sequential(nn.Embedding(5, 3, sparse=True)))
    with pytest.raises(RuntimeError, match="'0.weight' has a sparse gradient"):
        rung(torch.tensor([1, 2])).sum().backward()


def normalised(broadcast: bool) -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    rung = zc.DataParallel(nn.BatchNorm1d(4), **SGD, broadcast_buffers=broadcast)
    generator = torch.Generator().manual_seed(rung.comm.rank)
    for _ in range(3):
        rung(torch.randn(6, 4, generator=generator)).sum().backward()
    rung.comm.ledger.clear()
    rung(torch.zeros(6, 4))
    rung(torch.zeros(6, 4))
    return rung.module.running_mean.clone(), len(list(rung.comm.ledger.select("buffers")))


def test_buffers_that_forward_changes_follow_rank_0() -> None:
    (first, calls), (second, _) = run_ranks(2, normalised, True)
    assert torch.equal(first, second) and calls == 6  # three buffers, two forwards
    (first, calls), (second, _) = run_ranks(2, normalised, False)
    assert not torch.equal(first, second) and calls == 0


def constant_buffers() -> int:
    rung = zc.DataParallel(build("Buffers"), **SGD)
    rung.comm.ledger.clear()
    for _ in range(2):
        rung(torch.ones(2, 6))
    return len(list(rung.comm.ledger.select("buffers")))


def test_buffers_that_nobody_writes_are_not_sent() -> None:
    assert run_ranks(2, constant_buffers) == [1, 1]  # "calls" before the second forward; "constant" never


def memory(stage: int, name: str) -> tuple[dict[str, int], dict[str, int]]:
    args: dict[str, Any] = {"stage3_param_persistence_threshold": 10} if stage == 3 else {}
    rung = RUNGS[stage](build(name), torch.optim.AdamW, lr=1e-3, reduce_bucket_size=40, **args)
    x, y = batch(0, 4)
    loss_of(rung(x), y).backward()
    rung.step()
    rung.zero_grad()
    return rung.memory(), rung.predicted_memory()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["Plain", "Tied", "Frozen"])
def test_bytes_kept_are_the_formula(stage: int, name: str, world: int) -> None:
    for measured, predicted in run_ranks(world, memory, stage, name):
        assert {key: measured[key] for key in predicted} == predicted


def shares(stage: int) -> dict[str, int]:
    return memory(stage, "Plain")[0]


def test_each_rung_keeps_less_of_what_it_partitions() -> None:
    by_stage = [run_ranks(4, shares, stage)[0] for stage in range(4)]
    elements = sum(p.numel() for p in Plain().parameters())
    whole, slack = 4 * elements, 4 * 4 * 8  # bytes; padding: at most 8 buckets of 3 elements
    assert by_stage[0]["parameters"] == whole <= by_stage[0]["gradients"] <= whole + slack
    assert by_stage[0]["optimizer"] == 2 * whole and by_stage[1]["optimizer"] <= 2 * whole / 4 + slack
    assert by_stage[1]["gradients"] >= whole and by_stage[2]["gradients"] <= whole / 4 + slack
    # four parameters of at most 10 elements stay whole in stage 3: 1 + 1 + 5 + 0 of them
    assert by_stage[2]["parameters"] >= whole and by_stage[3]["parameters"] <= whole / 4 + 4 * 7 + slack


def norm_of_many() -> tuple[float, float]:
    rung = zc.DataParallel(nn.Linear(1000, 3001, bias=False))
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(3001, 1000, generator=generator) + 1
    rung.module.weight.grad = gradient
    return rung.grad_norm(), gradient.double().norm().item()


def test_the_norm_of_millions_of_elements_keeps_its_digits() -> None:
    norm, expected = run_ranks(1, norm_of_many)[0]
    assert norm == pytest.approx(expected, rel=1e-7)
