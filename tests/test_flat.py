"""Partitions and buckets: every element has one owner, whatever the sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_course.flat import Bucket, BufferPool, make_buckets, padded_numel, partition_bounds

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)
worlds = st.integers(1, 9)


def parameters(numels: list[int]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.arange(float(n)) + 100 * i)) for i, n in enumerate(numels)]


@given(st.integers(0, 10_000), worlds)
def test_slices_are_equal_and_cover_everything_once(numel: int, world: int) -> None:
    bounds = [partition_bounds(numel, world, rank) for rank in range(world)]
    assert bounds[0][0] == 0
    assert all(stop == start for (_, stop), (start, _) in zip(bounds, bounds[1:], strict=False))
    assert len({stop - start for start, stop in bounds}) == 1
    assert numel <= bounds[-1][1] == padded_numel(numel, world) < numel + world


def test_a_rank_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"rank 4 is not one of the 4 ranks 0\.\.3"):
        partition_bounds(10, 4, 4)


@given(sizes, worlds)
def test_pieces_of_all_ranks_are_the_parameters(numels: list[int], world: int) -> None:
    bucket = Bucket(parameters(numels), world)
    flat = bucket.empty()
    for slot in bucket.slots:
        slot.view(flat).copy_(slot.param.data)
    rebuilt = [torch.full((n,), -1.0) for n in numels]
    for rank in range(world):
        for piece in bucket.pieces(rank):
            target = rebuilt[int(piece.name[1:])][piece.start : piece.stop]
            assert (target == -1).all(), "an element has two owners"
            target.copy_(piece.view(bucket.shard(flat, rank)))
    for whole, (_, param) in zip(rebuilt, parameters(numels), strict=True):
        assert torch.equal(whole, param.data)


@given(sizes, st.integers(1, 60), worlds)
def test_buckets_hold_every_parameter_once_in_order_and_keep_to_their_size(
    numels: list[int], bucket_size: int, world: int
) -> None:
    params = parameters(numels)
    buckets = make_buckets(params, bucket_size, world)
    assert [slot.name for bucket in buckets for slot in bucket.slots] == [name for name, _ in params]
    for bucket in buckets:
        assert bucket.padded % world == 0 and 0 <= bucket.padded - bucket.numel < world
        assert bucket.numel <= bucket_size or len([s for s in bucket.slots if s.numel]) == 1


@given(st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), min_size=1, max_size=9))
def test_a_bucket_never_mixes_dtypes(dtypes: list[torch.dtype]) -> None:
    params = [(str(i), nn.Parameter(torch.zeros(3, dtype=dtype))) for i, dtype in enumerate(dtypes)]
    buckets = make_buckets(params, 1000, 2)
    assert len(buckets) == len(set(dtypes))
    for bucket in buckets:
        assert {slot.param.dtype for slot in bucket.slots} == {bucket.dtype}


def test_bucket_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="bucket size 0"):
        make_buckets(parameters([3]), 0, 2)


def test_the_pool_hands_out_the_same_memory_again_and_replaces_what_is_outgrown() -> None:
    pool, cpu = BufferPool(), torch.device("cpu")
    first = pool.take(10, torch.float32, cpu)
    second = pool.take(10, torch.float32, cpu)
    assert first.data_ptr() != second.data_ptr()
    pool.give_back(first)
    assert pool.take(6, torch.float32, cpu).data_ptr() == first.data_ptr()
    pool.give_back(second)
    larger = pool.take(20, torch.float32, cpu)
    assert larger.numel() == 20 and [b.numel() for b in pool.buffers] == [10, 20]
    assert pool.take(4, torch.bfloat16, cpu).dtype == torch.bfloat16


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=40))
def test_the_pool_never_hands_out_memory_that_is_in_use(steps: list[tuple[bool, int]]) -> None:
    pool, cpu = BufferPool(), torch.device("cpu")
    taken: list[tuple[torch.Tensor, int]] = []
    for mark, (take, numel) in enumerate(steps):
        if take:
            taken.append((pool.take(numel, torch.float32, cpu).fill_(mark), mark))
        elif taken:
            pool.give_back(taken.pop(numel % len(taken))[0])
        assert all((buffer == value).all() for buffer, value in taken)
