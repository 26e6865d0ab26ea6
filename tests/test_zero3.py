"""ZeRO-3: parameters are gathered when used, released after, and never more than the window at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ladder import batch, build, loss_of
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import zero_course as zc
from zero_course.models.gpt import GPT, GPTConfig

TINY = {"vocab_size": 32, "n_layer": 3, "n_head": 2, "d_model": 16, "block_size": 8}


def gpt(**other: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, **other}))


def tokens(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 32, (rows, 9), generator=torch.Generator().manual_seed(zc.get_rank()))
    return x[:, :-1], x[:, 1:]


def zero3(model: nn.Module, **args: Any) -> zc.Zero3:
    args = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, "lr": 1e-2, **args}
    return zc.Zero3(model, torch.optim.AdamW, **args)


def traffic(threshold: int, tied: bool) -> tuple[dict[str, int], dict[str, int], int]:
    rung = zero3(gpt(tie_embeddings=tied), stage3_param_persistence_threshold=threshold)
    x, y = tokens()
    for _ in range(2):
        rung.comm.ledger.clear()
        rung(x, y).backward()
        rung.step()
        rung.zero_grad()
    return rung.comm.ledger.by_purpose(), rung.predicted_traffic(), rung.module.num_parameters()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("threshold", [0, 100, 10**6])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_step_are_the_formula(world: int, threshold: int, tied: bool) -> None:
    for measured, predicted, _ in run_ranks(world, traffic, threshold, tied):
        assert {purpose: measured.get(purpose, 0) for purpose in predicted} == predicted


def test_half_as_much_again_as_data_parallelism() -> None:
    """3(N-1)/N · P, but for the embeddings: theirs are not gathered in backward, a tied one also for the head."""
    for measured, _, count in run_ranks(2, traffic, 0, False):
        d, embeddings = TINY["d_model"], TINY["vocab_size"] + TINY["block_size"]
        expected = 3 * count - embeddings * d
        sent = measured["parameters"] + measured["gradients"]
        assert expected * 4 / 2 <= sent <= expected * 4 / 2 * 1.01  # padding


def window(prefetch: int, recompute: bool) -> tuple[int, int, int, int]:
    rung = zero3(gpt(activation_checkpointing=recompute), stage3_prefetch_bucket_size=prefetch)
    x, y = tokens()
    for _ in range(3):
        rung(x, y).backward()
        rung.step()
        rung.zero_grad()
        with torch.no_grad():
            rung(x)
    largest = max(bucket.padded for bucket in rung.sharded)
    return rung.peak_gathered_elements, rung.window_elements, rung.gathered_elements, largest


@pytest.mark.parametrize("prefetch", [0, 300, 1000, 10**6])
def test_never_more_gathered_than_the_window(prefetch: int) -> None:
    for peak, allowed, left, largest in run_ranks(2, window, prefetch, False):
        assert peak <= allowed == largest + prefetch and left == 0
        if prefetch == 0:
            assert peak == largest  # on demand: one module at a time
        elif prefetch == 1000:
            assert peak > largest  # it does prefetch


def test_recomputation_gathers_one_block_at_most() -> None:
    d = TINY["d_model"]
    for peak, allowed, left, _ in run_ranks(2, window, 0, True):
        assert peak <= allowed + 12 * d * d + 13 * d and left == 0


def trained(prefetch: int, steps: int = 4) -> list[torch.Tensor]:
    rung = zero3(gpt(), stage3_prefetch_bucket_size=prefetch)
    x, y = tokens()
    for _ in range(steps):
        rung(x, y).backward()
        rung.step()
        rung.zero_grad()
        with torch.no_grad():
            rung(x)
    return list(rung.full_state_dict().values())


def test_prefetching_changes_no_bit() -> None:
    for a, b in zip(run_ranks(2, trained, 0), run_ranks(2, trained, 1000), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Branching(nn.Module):
    """Goes another way at each step, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        for i in range(3):
            x = torch.tanh(self.ways[(self.step * (i + 1)) % 4](x))
        return x


def branching() -> list[torch.Tensor]:
    torch.manual_seed(0)
    rung = zero3(Branching(), stage3_prefetch_bucket_size=60)
    for step in range(8):
        x, y = batch(step, 8)
        mine = slice(rung.comm.rank * 4, rung.comm.rank * 4 + 4)
        loss_of(rung(x[mine]), y[mine]).backward()
        rung.step()
        rung.zero_grad()
    return list(rung.full_state_dict().values())


def test_another_path_at_each_step() -> None:
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(8):
        x, y = batch(step, 8)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values in run_ranks(2, branching):
        for ours, expected in zip(values, model.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def uses_of_a_partitioned_parameter() -> list[str]:
    rung = zero3(build("Plain"), stage3_param_persistence_threshold=10)
    weight = rung.module.inner.weight
    assert weight.shape == (13, 6) and weight.numel() == 78 and weight.dtype == torch.float32
    assert isinstance(weight, nn.Parameter) and weight.grad is None
    texts = [repr(weight)]
    for use in (
        lambda: weight + 1,
        lambda: weight.sum(),
        lambda: weight.data,
        lambda: F.linear(torch.ones(6), weight),
    ):
        with pytest.raises(RuntimeError) as caught:
            use()
        texts.append(str(caught.value))
    with pytest.raises(RuntimeError) as caught:
        rung.module.state_dict()
    texts.append(str(caught.value))
    return texts


def test_a_released_parameter_says_what_it_is_and_how_to_gather_it() -> None:
    for texts in run_ranks(2, uses_of_a_partitioned_parameter):
        for text in texts:
            assert "'inner.weight'" in text and "GatheredParameters" in text and "(13, 6)" in text
        assert "data on" in texts[3] and "linear on" in texts[4]


def direct_call() -> None:
    rung = zero3(build("Plain"))
    x = torch.ones(2, 6)
    with torch.no_grad():
        direct = rung.module(x)
        torch.testing.assert_close(direct, rung(x))
    with pytest.raises(RuntimeError, match="Plain was called directly with gradients enabled"):
        rung.module(x)


def test_a_call_past_the_wrapper_is_refused_when_it_would_need_gradients() -> None:
    run_ranks(2, direct_call)


def edits() -> list[float]:
    rung = zero3(build("Plain"), stage3_param_persistence_threshold=10)
    big, small = rung.module.inner.weight, rung.module.scale
    with zc.zero.GatheredParameters([big, small], modifier_rank=1), torch.no_grad():
        big.fill_(10.0 + rung.comm.rank)
        small.fill_(20.0 + rung.comm.rank)
    with zc.zero.GatheredParameters(big), torch.no_grad():
        seen = big.mean().item()
        big.fill_(-1.0)  # without a modifier rank, edits are lost
    state = rung.full_state_dict()
    return [seen, state["inner.weight"].mean().item(), state["scale"].mean().item()]


def test_edits_of_the_modifier_rank_reach_every_rank() -> None:
    assert run_ranks(3, edits) == [[11.0, 11.0, 21.0]] * 3


def round_trip(stage_from: int) -> bool:
    from ladder import RUNGS

    source = RUNGS[stage_from](build("Tied"), torch.optim.AdamW, lr=1e-2)
    state = {key: value.clone() for key, value in source.full_state_dict().items()}
    target = zero3(build("Tied", seed=5))
    target.load_full_state_dict(state)
    loaded = target.full_state_dict()
    with pytest.raises(KeyError, match="embed.weight"):
        target.load_full_state_dict({k: v for k, v in state.items() if k != "embed.weight"})
    with pytest.raises(ValueError, match=r"twice.bias: shape \(2,\), expected \(7,\)"):
        target.load_full_state_dict({**state, "twice.bias": torch.ones(2)})
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()  # tied, copied once
    return state.keys() == loaded.keys() and all(torch.equal(state[k], loaded[k]) for k in state)


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_state_dicts_go_in_and_out(stage: int) -> None:
    assert all(run_ranks(3, round_trip, stage))


def built_in_pieces(how: str) -> tuple[list[torch.Tensor], int, int]:
    """A GPT built under zero.Init by each rank from another seed; rank 0's must win."""
    torch.manual_seed(zc.get_rank())
    with zc.zero.Init(stage3_param_persistence_threshold=0) as init:
        model = GPT(GPTConfig(**TINY))
        if how == "apply":
            model.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
    rung = zero3(model)
    kept = sum(bucket.shard_values.numel() for bucket in rung.sharded)
    x, y = tokens()
    rung(x, y).backward()
    rung.step()
    rung.zero_grad()
    assert init.comm.world_size == rung.comm.world_size
    return list(rung.full_state_dict().values()), kept, sum(b.numel() for b in init.pool.buffers)


def built_whole(how: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY))
    if how == "apply":
        model.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
    rung = zero3(model)
    x, y = tokens()
    rung(x, y).backward()
    rung.step()
    return list(rung.full_state_dict().values())


@pytest.mark.parametrize("how", ["plain", "apply"])
def test_a_model_built_in_pieces_is_the_one_rank_0_would_have_built(how: str) -> None:
    expected = run_ranks(3, built_whole, how)[0]
    for values, kept, pooled in run_ranks(3, built_in_pieces, how):
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
        count = GPTConfig(**TINY).num_parameters()
        assert kept <= count / 3 * 1.05  # padding
        assert pooled <= 3 * max(v.numel() for v in values)


def initialiser_of_a_view() -> None:
    with zc.zero.Init(stage3_param_persistence_threshold=0):
        model = nn.Sequential(nn.Linear(4, 4))
        with pytest.raises(RuntimeError, match="view of a partitioned parameter"):
            model[0].weight.data.normal_()


def test_an_initialiser_that_would_be_lost_is_refused() -> None:
    run_ranks(2, initialiser_of_a_view)


def frozen_backbone() -> tuple[bool, int, int]:
    """LoRA-like: everything frozen but the last layer. Frozen layers are gathered and released too."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    model[:4].requires_grad_(False)
    rung = zero3(model)
    x = torch.ones(2, 8, requires_grad=True)
    for _ in range(2):
        rung(x).sum().backward()
        rung.step()
        rung.zero_grad()
    return x.grad is not None, rung.peak_gathered_elements, rung.gathered_elements


def test_frozen_layers_are_released_in_backward() -> None:
    for has_grad, peak, left in run_ranks(2, frozen_backbone):
        assert has_grad and peak == 64 and left == 0


def read_after_a_step() -> float:
    """A forward without its backward leaves prefetched parameters behind, which the step makes stale."""
    rung = zero3(gpt(), stage3_prefetch_bucket_size=10**6)
    x, y = tokens()
    rung(x, y).backward()
    rung.zero_grad()
    rung(x, y).backward()
    rung(x, y)
    assert rung.gathered_elements > 0
    rung.step()
    state = rung.full_state_dict()
    return max(
        (values - state[piece.name].reshape(-1)[piece.start : piece.stop]).abs().max().item()
        for piece, values in rung.owned_pieces()
    )


def test_a_step_leaves_nothing_stale_behind() -> None:
    assert run_ranks(2, read_after_a_step) == [0.0, 0.0]
