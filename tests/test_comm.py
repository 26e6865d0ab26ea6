"""Collectives: right results, the bytes the formula says, and an error that names the culprit."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import fresh_ranks, run_ranks

import zero_course as zc

WORLDS = [1, 2, 3, 4]
QUICK = {"ZERO_COURSE_TIMEOUT": "3"}


def collectives(transport: str, dtype: torch.dtype, n: int) -> dict[str, Any]:
    """Every collective on slices of n elements; sums of small integers are exact in every dtype."""
    comm = zc.Communicator(transport=transport)
    rank, world = comm.rank, comm.world_size
    whole = (torch.arange(n * world) % 5 + rank).to(dtype)
    reduced = whole.clone()
    comm.all_reduce(reduced)
    part = torch.empty(n, dtype=dtype)
    comm.reduce_scatter(part, whole.clone())
    in_place = whole.clone()
    own = in_place[rank * n :][:n]
    comm.reduce_scatter(own, in_place)
    gathered = torch.empty(n * world, dtype=dtype)
    comm.all_gather(gathered, part)
    in_place_gathered = torch.zeros(n * world, dtype=dtype)
    in_place_gathered[rank * n :][:n] = part
    comm.all_gather(in_place_gathered, in_place_gathered[rank * n :][:n])
    exchanged = torch.empty(n * world, dtype=dtype)
    comm.all_to_all(exchanged, torch.full((n * world,), rank, dtype=dtype))
    sent = torch.full((n,), rank, dtype=dtype)
    comm.broadcast(sent, world - 1)
    comm.barrier()
    return {
        "all_reduce": reduced,
        "reduce_scatter": part,
        "in_place": own.clone(),
        "all_gather": gathered,
        "in_place_gathered": in_place_gathered,
        "all_to_all": exchanged,
        "broadcast": sent,
        "objects": comm.all_gather_object({"rank": rank, "pad": "x" * rank * 100}),
    }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("transport", ["peer", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_results(world: int, transport: str, dtype: torch.dtype) -> None:
    n = 7
    base = torch.arange(n * world) % 5
    total = (world * base + sum(range(world))).to(dtype)
    for rank, got in enumerate(run_ranks(world, collectives, transport, dtype, n)):
        own = total[rank * n :][:n]
        assert torch.equal(got["all_reduce"], total)
        assert torch.equal(got["reduce_scatter"], own) and torch.equal(got["in_place"], own)
        assert torch.equal(got["all_gather"], total) and torch.equal(got["in_place_gathered"], total)
        assert torch.equal(got["all_to_all"], torch.arange(world).repeat_interleave(n).to(dtype))
        assert torch.equal(got["broadcast"], torch.full((n,), world - 1).to(dtype))
        assert [o["rank"] for o in got["objects"]] == list(range(world))


def uneven(numel: int) -> list[float]:
    x = torch.arange(float(numel)) * (zc.get_rank() + 1)
    zc.Communicator().all_reduce(x, average=True)
    return x.tolist()


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 10])
def test_an_all_reduce_needs_no_multiple_of_the_ranks_and_averages_by_their_number(numel: int) -> None:
    for result in run_ranks(3, uneven, numel):
        assert result == [2.0 * i for i in range(numel)]


def rank_ordered(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    x = torch.tensor([values[zc.get_rank()]] * 3, dtype=dtype)
    zc.Communicator().all_reduce(x)
    return x


def test_sums_are_taken_in_rank_order_on_every_slice() -> None:
    values = [1e8, -1e8, 1.0]  # (1e8 - 1e8) + 1 is 1; in other orders fp32 gives 0
    for result in run_ranks(3, rank_ordered, values, torch.float32):
        assert result.tolist() == [1.0] * 3


def test_sixteen_bit_sums_keep_their_bits_until_the_end() -> None:
    values = [256.0, 1.0, 1.0]  # 256 + 1 rounds back to 256 in bfloat16; 258 is exact
    for result in run_ranks(3, rank_ordered, values, torch.bfloat16):
        assert result.tolist() == [258.0] * 3


def wire(transport: str, n: int) -> dict[str, int]:
    comm = zc.Communicator(transport=transport)
    world = comm.world_size
    flat, part = torch.ones(n * world), torch.empty(n)
    comm.all_reduce(flat)
    comm.reduce_scatter(part, flat)
    comm.all_gather(flat, part)
    comm.all_to_all(flat.clone(), flat)
    return {
        op: comm.ledger.wire_bytes(op=op)
        for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    }


@pytest.mark.parametrize("world", WORLDS)
def test_bytes_are_the_ring_formulas(world: int) -> None:
    n = 11
    half = 4 * n * (world - 1)
    for sent in run_ranks(world, wire, "peer", n):
        assert sent == {
            "all_reduce": 2 * half,
            "reduce_scatter": half,
            "all_gather": half,
            "all_to_all": half,
        }


def test_the_ledger_admits_that_gloos_own_reduce_scatter_moves_twice_as_much() -> None:
    for sent in run_ranks(2, wire, "native", 11):
        assert sent["reduce_scatter"] == 2 * 4 * 11


def overlapped() -> tuple[list[float], list[tuple[str, float, bool]]]:
    comm = zc.Communicator()
    world = comm.world_size
    tensors = [torch.full((world * 5,), float(i)) for i in range(4)]
    works = [comm.all_reduce(t, average=True, purpose=f"t{i}", async_op=True) for i, t in enumerate(tensors)]
    for work in reversed(works):  # finished in another order than posted
        work.wait()
    entries = [(e.purpose, e.seconds, e.finished >= e.started) for e in comm.ledger.entries]
    return [t.mean().item() for t in tensors], entries


def test_collectives_in_flight_do_not_mix() -> None:
    for means, entries in run_ranks(3, overlapped):
        assert means == [0.0, 1.0, 2.0, 3.0]
        assert [purpose for purpose, _, _ in entries] == ["t0", "t1", "t2", "t3"]
        assert all(seconds > 0 and done for _, seconds, done in entries)


def ring(numel: int) -> torch.Tensor:
    comm = zc.Communicator()
    received = torch.empty(numel)
    work = comm.recv(received, (comm.rank - 1) % comm.world_size, async_op=True)
    comm.send(torch.full((numel,), float(comm.rank)), (comm.rank + 1) % comm.world_size)
    work.wait()
    assert comm.ledger.wire_bytes() == 4 * numel
    return received


def test_send_and_receive() -> None:
    for rank, received in enumerate(run_ranks(3, ring, 6)):
        assert received.tolist() == [float((rank - 1) % 3)] * 6


def subgroups() -> tuple[list[float], str]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    comm = zc.Communicator(groups[zc.get_rank() % 2])
    x = torch.full((3,), float(zc.get_rank()))
    comm.all_reduce(x)
    part = torch.empty(1)
    comm.reduce_scatter(part, torch.tensor([1.0, 10.0]))
    return [*x.tolist(), *part.tolist()], comm.ledger.entries[0].group


def test_groups_of_some_of_the_ranks() -> None:
    results = run_ranks(4, subgroups)
    assert [values for values, _ in results] == [
        [2.0] * 4,
        [4.0] * 3 + [2.0],
        [2.0] * 3 + [20.0],
        [4.0] * 3 + [20.0],
    ]
    assert results[0][1] == results[2][1] != results[1][1]


def test_the_call_site_is_the_callers_line() -> None:
    comm = zc.Communicator()
    comm.all_reduce(torch.ones(2))
    assert comm.ledger.entries[0].site.startswith(__file__)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.reduce_scatter(torch.empty(3), torch.empty(4)), "input has 4 elements.*output 3"),
        (lambda c: c.all_gather(torch.empty(4), torch.empty(4, dtype=torch.int32)), "same dtype"),
        (lambda c: c.broadcast(torch.empty(4), 5), "rank 5 is not a rank of this group of 1"),
        (lambda c: c.send(torch.empty(4), 0), "rank 0 is not another rank"),
        (lambda c: c.all_reduce(torch.empty(4, 4).t()[1:]), "not contiguous"),
        (lambda c: c.all_reduce(torch.ones(3, dtype=torch.int32), average=True), "an average of torch.int32"),
        (lambda c: zc.Communicator(transport="pigeon"), "'pigeon' is not one of peer, native"),
        (lambda c: zc.Communicator(timeout=0), "timeout 0"),
    ],
)
def test_bad_arguments_are_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(zc.Communicator())


def disagree(how: str) -> None:
    comm = zc.Communicator()
    comm.barrier()
    odd = comm.rank == 1
    if how == "shape":
        comm.all_reduce(torch.zeros(4 if odd else 5))
    elif how == "dtype":
        comm.all_reduce(torch.zeros(4, dtype=torch.float64 if odd else torch.float32))
    elif how == "op":
        comm.broadcast(torch.zeros(4)) if odd else comm.all_reduce(torch.zeros(4))
    elif how == "order":
        a, b = torch.zeros(4), torch.zeros(6)
        for tensor in (b, a) if odd else (a, b):
            comm.all_reduce(tensor)
    elif how == "absent" and not odd:
        comm.all_reduce(torch.zeros(4))
    elif how == "absent":
        time.sleep(7)
    elif how == "killed" and odd:
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "killed":
        comm.all_reduce(torch.zeros(4))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", "rank 1 called all_reduce(4 x float32) instead"),
        ("dtype", "rank 1 called all_reduce(4 x float64) instead"),
        ("op", "rank 1 called broadcast from 0(4 x float32) instead"),
        ("order", "rank 1 called all_reduce(6 x float32) instead"),
        ("absent", "rank 1 has not called it; its latest is number 1, barrier"),
        ("killed", "rank 1 has given no sign of life"),
    ],
)
def test_a_collective_on_which_ranks_disagree_names_rank_collective_and_line(how: str, message: str) -> None:
    outcomes = fresh_ranks(3, disagree, how, env=QUICK, timeout=60)
    for outcome in outcomes[::2]:
        assert not outcome.hung, outcome.output
        assert outcome.error is not None and "CollectiveError" in outcome.error.split(":")[0], outcome
        assert message in outcome.error
        assert f"{os.path.basename(__file__)}:" in outcome.error
        assert outcome.seconds < 20


def after_a_failure() -> str:
    comm = zc.Communicator(timeout=1)
    if comm.rank == 0:
        with pytest.raises(zc.CollectiveError, match="did not complete within 1 s"):
            comm.all_reduce(torch.zeros(3))
        with pytest.raises(zc.CollectiveError, match="unusable after an earlier failure"):
            comm.all_reduce(torch.zeros(3))
    else:
        time.sleep(4)
    return "done"


def test_a_communicator_that_failed_says_so_from_then_on() -> None:
    assert fresh_ranks(2, after_a_failure, timeout=60)[0].result == "done"


def the_timeout_variable() -> str:
    with pytest.raises(ValueError, match="ZERO_COURSE_TIMEOUT='soon'"):
        zc.Communicator()
    return "done"


def test_a_timeout_that_is_no_number_is_named() -> None:
    outcomes = fresh_ranks(1, the_timeout_variable, env={"ZERO_COURSE_TIMEOUT": "soon"}, init=False)
    assert outcomes[0].result == "done", outcomes[0]


def soak(rounds: int) -> None:
    """Random collectives, posted ahead and finished in random order, against what they must give."""
    comm = zc.Communicator()
    rank, world = comm.rank, comm.world_size
    dice = torch.Generator().manual_seed(7)  # the same on every rank
    pending: list[Any] = []
    for _ in range(rounds):
        kind, n, late = (int(v) for v in torch.randint(0, 1000, (3,), generator=dice))
        n = n % 50 + 1
        if kind % 3 == 0:
            x = torch.arange(float(n)) + rank
            pending.append(
                (comm.all_reduce(x, async_op=True), x, world * torch.arange(float(n)) + sum(range(world)))
            )
        elif kind % 3 == 1:
            x, out = torch.arange(float(n * world)) * (rank + 1), torch.empty(n)
            expected = torch.arange(float(n * world))[rank * n :][:n] * sum(range(1, world + 1))
            pending.append((comm.reduce_scatter(out, x, async_op=True), out, expected))
        else:
            out = torch.empty(n * world)
            expected = torch.arange(world).repeat_interleave(n).float()
            pending.append(
                (comm.all_gather(out, torch.full((n,), float(rank)), async_op=True), out, expected)
            )
        if late % 3 == 0:
            while pending:
                work, got, expected = pending.pop(late % len(pending))
                work.wait()
                assert torch.equal(got, expected)


@pytest.mark.parametrize("world", [2, 3])
def test_soak(world: int) -> None:
    run_ranks(world, partial(soak, 400))


def input_kept() -> bool:
    comm = zc.Communicator()
    whole, part = torch.arange(6.0), torch.empty(2)
    comm.reduce_scatter(part, whole, average=True)
    return torch.equal(whole, torch.arange(6.0))


def test_a_reduce_scatter_into_another_tensor_leaves_its_input_alone() -> None:
    assert all(run_ranks(3, input_kept))
