"""Chapter 00: predictions against the papers, measurements against known tensors, advice against the rule."""

from __future__ import annotations

import gc
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_course import memory
from zero_course.memory import (
    PRESETS,
    PeakMeter,
    TransformerShape,
    activation_bytes,
    advise,
    format_bytes,
    format_count,
    live_bytes,
    live_bytes_by_class,
    live_tensors,
    model_state_bytes,
    parse_bytes,
    parse_count,
    preset_state_bytes,
    ring_bytes,
    ring_seconds,
    traffic_elements,
    zero_table,
)

# ---------------------------------------------------------------------------------------------- predict

WORLD_SIZES = (1, 4, 16, 64, 256, 1024)
ZERO_TABLE_1 = {  # as printed, GB; arXiv 1910.02054
    (7.5e9, 1): "120 52.5 35.6 31.4 30.4 30.1",
    (7.5e9, 2): "120 41.3 21.6 16.6 15.4 15.1",
    (7.5e9, 3): "120 30 7.5 1.88 .47 .12",
    (128e9, 1): "2048 896 608 536 518 513",
    (128e9, 2): "2048 704 368 284 263 257",
    (128e9, 3): "2048 512 128 32 8 2",
    (1e12, 1): "16000 7000 4750 4187 4046 4011",
    (1e12, 2): "16000 5500 2875 2218 2054 2013",
    (1e12, 3): "16000 4000 1000 250 62.5 15.6",
}
CELLS = [
    (int(size), world_size, stage, printed)
    for (size, stage), row in ZERO_TABLE_1.items()
    for world_size, printed in zip(WORLD_SIZES, row.split())
]


@pytest.mark.parametrize(("size", "world_size", "stage", "printed"), CELLS)
def test_zero_paper_table_1(size, world_size, stage, printed):
    assert len(CELLS) == len(zero_table()) == 54
    computed = zero_table()[size, world_size, stage] / 1e9
    digits = len(printed.partition(".")[2])
    cut = math.floor(computed * 10**digits) / 10**digits
    rounded = math.floor(computed * 10**digits + 0.5) / 10**digits
    assert float(printed) in (cut, rounded)


def test_a_wrong_formula_would_not_pass_table_1():
    # Negative control: ZeRO-2's column is not that of ZeRO-1, and GiB is not GB.
    assert zero_table()[int(7.5e9), 64, 2] / 1e9 < 20 < zero_table()[int(7.5e9), 64, 1] / 1e9
    assert round(zero_table()[int(7.5e9), 1, 1] / 2**30) != 120


def test_limits_of_the_stages_are_4_8_and_n():
    whole = model_state_bytes(10**9, 1, 0).total
    assert whole == 16 * 10**9
    many = 10**6
    assert whole / model_state_bytes(10**9, many, 1).total == pytest.approx(4, rel=1e-4)
    assert whole / model_state_bytes(10**9, many, 2).total == pytest.approx(8, rel=1e-4)
    assert whole / model_state_bytes(10**9, many, 3).total == pytest.approx(many)


def test_classes_and_padding():
    stage1 = model_state_bytes([10, 7], 4, 1, padded=True)  # buckets of 12 and 8, shards of 3 and 2
    assert stage1.as_dict() == {"parameters": 40, "gradients": 40, "master_weights": 20, "optimizer": 40}
    assert stage1.total == 140
    assert model_state_bytes([10, 7], 4, 1).as_dict() == stage1.as_dict() | {
        "parameters": 34,
        "gradients": 34,
    }
    assert model_state_bytes(17, 4, 3).total == 5 * 16  # one bucket: a shard of 5
    fp32 = model_state_bytes(100, 2, 2, parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    assert fp32.as_dict() == {"parameters": 400, "gradients": 200, "master_weights": 0, "optimizer": 400}
    assert model_state_bytes(100, 2, 2, optimizer_bytes=0).total == 200 + 100  # SGD without momentum


@given(st.lists(st.integers(0, 10**6), max_size=5), st.integers(1, 9), st.sampled_from((0, 1, 2, 3)))
def test_shards_add_up_to_the_padded_whole(sizes, world_size, stage):
    states = model_state_bytes(sizes, world_size, stage, padded=True)
    whole = sum(-(-size // world_size) * world_size for size in sizes)
    for name, size, sharded_from in (("parameters", 2, 3), ("gradients", 2, 2), ("master_weights", 4, 1)):
        share = world_size if stage >= sharded_from else 1
        assert getattr(states, name) * share == size * whole


@pytest.mark.parametrize(
    "bad",
    [
        {"parameters": 1.5},
        {"parameters": -1},
        {"world_size": 0},
        {"stage": 4},
        {"master_bytes": 13},
    ],
)
def test_nonsense_is_refused(bad):
    arguments = {"parameters": 10, "world_size": 2, "stage": 1} | bad
    with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
        model_state_bytes(arguments.pop("parameters"), **arguments)


def test_presets_count_what_their_source_counts():
    counts = {name: preset.bytes_per_parameter for name, preset in PRESETS.items()}
    assert counts == {"zero-paper": 16, "fp32": 16, "megatron": 18, "deepspeed-docs": 20, "zero-infinity": 20}
    p, n = 10**9, 8
    assert preset_state_bytes(p, n, 2, "deepspeed-docs").total == 2 * p + 18 * p // n
    assert preset_state_bytes(p, n, 3, "deepspeed-docs").total == 18 * p // n
    assert preset_state_bytes(p, n, 3, "zero-infinity").total == 20 * p // n
    assert preset_state_bytes(p, n, 0, "megatron").total == 18 * p
    with pytest.raises(ValueError, match="zero-papr.*zero-paper"):
        preset_state_bytes(p, n, 2, "zero-papr")


def test_traffic_is_twice_and_three_times_the_parameters():
    p, n = 8 * 1000, 8
    ring = p * (n - 1) // n
    assert [traffic_elements(p, n, stage) for stage in range(4)] == [2 * ring, 2 * ring, 2 * ring, 3 * ring]
    assert [traffic_elements(p, 1, stage) for stage in range(4)] == [0] * 4
    # Accumulation over 4 micro-batches: once a step, once a step, 4 reductions, 4 reductions and 8 gathers.
    accumulated = [traffic_elements(p, n, stage, micro_batches=4) for stage in range(4)]
    assert accumulated == [2 * ring, 2 * ring, 5 * ring, 12 * ring]
    assert traffic_elements([5, 5], 4, 3) == 3 * 3 * 4  # buckets padded to 8
    assert traffic_elements(p, n, 0) * 4 == ring_bytes("all_reduce", 4 * p, n)


def test_ring_formulas():
    assert ring_bytes("all_reduce", 400, 4) == 600
    assert ring_bytes("reduce_scatter", 400, 4) == ring_bytes("all_gather", 400, 4) == 300
    assert ring_bytes("all_to_all", 401, 4) == 303
    assert ring_bytes("all_reduce", 400, 1) == 0
    # T = 2(N-1) alpha + 2(N-1)/N S/B
    assert ring_seconds("all_reduce", 400, 4, latency=1.0, bandwidth=100.0) == 6 + 6
    with pytest.raises(ValueError, match="gossip"):
        ring_bytes("gossip", 400, 4)


# ---------------------------------------------------------------------------------------------- activations


def test_megatron_activations():
    s, b, h, a, n_layers = 2048, 4, 6144, 64, 48  # the 22B model of arXiv 2205.05198
    one = s * b * h
    arguments = (b, s, h, a, n_layers)
    assert activation_bytes(*arguments) == n_layers * (34 * one + 5 * a * s * s * b)
    assert activation_bytes(*arguments, tensor_parallel=8) == n_layers * (13 * one + 5 * a * s * s * b // 8)
    parallel = activation_bytes(*arguments, tensor_parallel=8, sequence_parallel=True)
    assert parallel == n_layers * (34 * one // 8 + 5 * a * s * s * b // 8)
    selective = activation_bytes(*arguments, tensor_parallel=8, sequence_parallel=True, recompute="selective")
    assert selective == n_layers * 34 * one // 8
    assert activation_bytes(*arguments, recompute="full") == n_layers * 2 * one
    with pytest.raises(ValueError, match="megatron"):
        activation_bytes(*arguments, kind="torch-fp32", tensor_parallel=2)


class Block(nn.Module):
    """A GPT block in plain torch: what the torch-fp32 formulas count."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        weights = ((q * (h // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(-1)
        mixed = (self.drop(weights) @ v).transpose(1, 2).reshape(b, s, h)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


@pytest.mark.parametrize(
    ("batch", "sequence", "hidden", "heads"), [(2, 32, 48, 4), (1, 64, 32, 2), (3, 16, 96, 8)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_torch_activations_are_predicted_exactly(batch, sequence, hidden, heads, dropout):
    model = nn.Sequential(Block(hidden, heads, dropout), Block(hidden, heads, dropout))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            saved.append(tensor.detach())
        return tensor

    x = torch.randn(batch, sequence, hidden, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    kind = "torch-fp32" if dropout else "torch-fp32-no-dropout"
    predicted = activation_bytes(batch, sequence, hidden, heads, 2, kind=kind)
    if batch == 1:  # no copies of q, k, v for the batched product: the whole of qkv stays, and the scaled q
        predicted += 2 * 4 * sequence * hidden
    assert live_bytes(saved) == predicted
    del y


@pytest.mark.parametrize(("size", "layers", "hidden"), [(13e9, 40, 5120), (175e9, 96, 12288)])
def test_shape_of_a_size_is_that_of_gpt3(size, layers, hidden):
    shape = TransformerShape.of_size(int(size))
    assert shape.layers == layers
    assert shape.hidden == pytest.approx(hidden, rel=0.03)
    assert shape.layers * shape.layer_parameters == pytest.approx(size, rel=0.01)


# ---------------------------------------------------------------------------------------------- DeepSpeed's estimators


def test_deepspeed_estimators(capsys):
    model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 32), nn.Linear(16, 1000, bias=False))
    model[2].weight = model[0].weight  # tied: counted once
    p, largest = 16000 + 16 * 32 + 32, 16000
    zero2 = memory.estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=2)
    assert [(e.cpu_bytes, e.gpu_bytes) for e in zero2] == [
        (int(p * 64 * 1.5), 2 * p),
        (int(p * 32 * 1.5), 2 * p + 18 * p // 16),
    ]
    printed = capsys.readouterr().out
    assert "offload_optimizer=cpu" in printed
    assert "18P/N" in printed
    assert "GiB" in printed or "KB" in printed or "KiB" in printed

    zero3 = memory.estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=2)
    # The options and figures of DeepSpeed 0.19.8, in its order.
    assert [(e.cpu_bytes, e.gpu_bytes) for e in zero3] == [
        (int(p * 18 / 2 * 1.5), 4 * largest),
        (int(p * max(32, 9) * 1.5), 4 * largest),
        (int(p * 16 / 2 * 1.5), 4 * largest + 2 * p // 16),
        (int(p * max(32, 8) * 1.5), 4 * largest + 2 * p // 16),
        (int(largest * 32 * 1.5), 4 * largest + 18 * p // 16),
        (int(p * 32 * 1.5), 4 * largest + 18 * p // 16),
    ]
    printed = capsys.readouterr().out
    assert printed.count("zero_init=1") == 3
    assert "4 x largest layer + 18P/N" in printed


# ---------------------------------------------------------------------------------------------- meter


def test_views_aliases_and_empty_tensors_count_once_or_not_at_all():
    base = torch.zeros(100)
    assert live_bytes([base, base[10:20], base.view(10, 10), base.detach()]) == 400
    assert live_bytes([base[10:20]]) == 400  # the whole storage stays alive
    assert live_bytes([None, torch.empty(0), torch.empty(1000, device="meta")]) == 0
    assert (
        live_bytes(torch.zeros(25) for _ in range(3)) == 300
    )  # temporaries must not be mistaken for each other


def test_memory_shared_by_two_storages_counts_once():
    import numpy

    array = numpy.zeros(1000, dtype=numpy.float32)
    first, second = torch.from_numpy(array), torch.from_numpy(array[500:])
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert live_bytes([second, first]) == 4000


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_wrappers_and_sparse_tensors_count_what_is_in_them():
    dense = torch.eye(10)
    sparse = dense.to_sparse()
    assert live_bytes([sparse]) == 10 * 4 + 2 * 10 * 8
    rows = torch.sparse_csr_tensor(torch.arange(11), torch.arange(10), torch.ones(10), check_invariants=True)
    assert live_bytes([rows]) == 10 * 4 + 10 * 8 + 11 * 8
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert live_bytes([torch.empty(1000)]) == 0  # it has a shape and no memory


def test_classes_share_nothing():
    flat = torch.zeros(100)
    parameters = [flat[:60], flat[60:]]
    other = torch.zeros(10)
    sizes = live_bytes_by_class({"parameters": parameters, "buffers": [flat, other], "optimizer": []})
    assert sizes == {"parameters": 400, "buffers": 40, "optimizer": 0}
    sizes = live_bytes_by_class({"buffers": [flat, other], "parameters": parameters})
    assert sizes == {"buffers": 440, "parameters": 0}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_classes_add_up_to_all(slices):
    bases = [torch.zeros(50, dtype=torch.uint8) for _ in range(4)]
    tensors = [bases[which][min(a, b) : max(a, b)] for which, a, b in slices]
    by_class = live_bytes_by_class({"first": tensors[::2], "second": tensors[1::2]})
    assert sum(by_class.values()) == live_bytes(tensors) == 50 * len({which for which, _, _ in slices})


def test_live_tensors_finds_what_nobody_listed():
    before = live_bytes(live_tensors())
    hidden = {"somewhere": [torch.zeros(12345)]}
    leaf = torch.zeros(100, requires_grad=True)
    (leaf * 2).sum().backward()
    assert live_bytes(live_tensors()) - before == 4 * 12345 + 2 * 400  # the leaf and its .grad
    hidden["somewhere"].append(hidden)  # a cycle keeps it alive until collected
    del hidden, leaf
    assert live_bytes(live_tensors()) == before


def test_model_states_measured_are_model_states_predicted():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    measured = live_bytes_by_class(
        {
            "parameters": model.parameters(),
            "gradients": [p.grad for p in model.parameters()],
            "master_weights": [],
            "optimizer": [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")],
        }
    )
    p = sum(p.numel() for p in model.parameters())
    assert measured == preset_state_bytes(p, 1, 0, "fp32").as_dict()


def test_peak_meter_is_exact():
    with PeakMeter() as meter:
        a = torch.zeros(1000)  # 4000
        b = a + 1  # 8000
        del a  # 4000
        c = b.view(10, 100)  # a view is free
        d = c.t().contiguous()  # 8000
        d.add_(1)  # in place is free
        e = [torch.ones(3000)]  # 20000
        e.clear()  # 8000
    assert (meter.current, meter.peak) == (8000, 20000)
    assert [size for _, size in meter.timeline] == [0, 4000, 8000, 4000, 8000, 20000, 8000]
    times = [seconds for seconds, _ in meter.timeline]
    assert times == sorted(times)
    assert times[0] == 0
    del b
    assert meter.current == 8000  # c still holds it
    del c, d
    assert meter.current == 0  # also counted down after the block
    assert meter.peak == 20000


def test_peak_meter_counts_only_what_is_new_unless_asked():
    old = torch.zeros(1000)
    with PeakMeter() as meter:
        old.add_(1)
        view = old[:10]
    assert (meter.current, meter.peak) == (0, 0)
    del view
    with PeakMeter([old, old[:5]]) as meter:
        assert meter.current == 4000
        del old
        torch.zeros(10)
    assert (meter.current, meter.peak) == (0, 4000)
    assert [size for _, size in meter.timeline] == [4000, 0, 40, 0]


def test_peak_meter_sees_activations_held_by_autograd():
    x = torch.randn(100, 100, requires_grad=True)
    with PeakMeter() as meter:
        y = x.exp().exp().exp().sum()
        held = meter.current
        assert held == 3 * 40000 + 4  # each exp keeps its result, though no variable does
        y.backward()
    assert meter.peak > held
    del y
    assert meter.current == 40000  # x.grad
    x.grad = None
    assert meter.current == 0


def test_peak_meter_agrees_with_predicted_activations_of_a_model():
    hidden, heads, batch, sequence = 64, 4, 2, 32
    model = nn.Sequential(Block(hidden, heads, 0.0), Block(hidden, heads, 0.0))
    x = torch.randn(batch, sequence, hidden)
    with PeakMeter([x]) as meter:
        y = model(x)
        gc.collect()
        kept = meter.current
    predicted = activation_bytes(batch, sequence, hidden, heads, 2, kind="torch-fp32-no-dropout")
    assert kept == predicted + 4 * batch * sequence * hidden  # and the output y itself
    del y


def test_peak_meter_follows_resized_storages():
    with PeakMeter() as meter:
        a = torch.zeros(1000)
        a.untyped_storage().resize_(0)
        assert meter.current == 0
        a.untyped_storage().resize_(8000)
        assert meter.current == 8000
        a.resize_(4000)
        assert meter.current == 16000
    a.untyped_storage().resize_(0)
    del a
    assert meter.current == 0
    assert meter.peak == 16000


def test_peak_meters_nest_and_survive_errors():
    original = torch.UntypedStorage.resize_
    with PeakMeter() as outer:
        kept = torch.zeros(10)
        with pytest.raises(RuntimeError), PeakMeter() as inner:
            torch.zeros(20) @ torch.zeros(30)
        assert inner.peak == 200
        assert outer.peak == 240
    del kept
    assert torch.UntypedStorage.resize_ is original


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NOT RUN: /proc is Linux's")
def test_resident_bytes_and_their_peak():
    memory.peak_resident_bytes(reset=True)
    before = memory.resident_bytes()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    grown = memory.resident_bytes() - before
    assert 0.9 * 2**26 < grown < 1.2 * 2**26
    del block
    assert memory.resident_bytes() - before < 2**25
    assert memory.peak_resident_bytes(reset=True) - before > 0.9 * 2**26
    assert memory.peak_resident_bytes() - before < 2**25  # a new peak began


def test_device_bytes_are_none_without_a_gpu():
    if torch.cuda.is_available():
        block = torch.zeros(2**20, device="cuda")
        assert memory.device_bytes() >= block.nbytes
        assert memory.peak_device_bytes(reset=True) >= block.nbytes
    else:
        assert memory.device_bytes() is None
        assert memory.peak_device_bytes(reset=True) is None


# ---------------------------------------------------------------------------------------------- advise


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (0.35e9, "DP"),
        (0.9e9, "DP"),
        (1.5e9, "ZeRO-1"),
        (3e9, "ZeRO-2"),
        (6e9, "ZeRO-2"),
        (7e9, "ZeRO-2"),
        (8e9, "ZeRO-3"),
        (13e9, "ZeRO-3 + optimizer on CPU"),
        (30e9, "ZeRO-3 + optimizer on CPU"),
        (65e9, "ZeRO-3 + optimizer on CPU"),
        (70e9, None),
        (175e9, None),
    ],
)
def test_the_rule_of_thumb_is_computed(size, name):
    advice = advise(size, 8, 40e9)
    assert (advice.recommended and advice.recommended.name) == name
    if name is None:
        assert "TP and PP" in advice.reason
        assert advice.minimum_gpus > 8
        # On that many GPUs the states do fit: the number is not a guess.
        assert advise(size, advice.minimum_gpus, 40e9)["ZeRO-3"].roomy
        assert not advise(size, advice.minimum_gpus - 8, 40e9)["ZeRO-3"].roomy
    else:
        assert advice.recommended.roomy
        assert advice.reason.startswith(name + ":")


def test_the_documented_thresholds_are_the_computed_ones():
    names = ["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 + optimizer on CPU"]

    def rank(size):
        chosen = advise(size, 8, 40e9).recommended
        return names.index(chosen.name) if chosen else len(names)

    ranks = [rank(0.05e9 * 1.03**i) for i in range(300)]
    assert ranks == sorted(ranks)  # a larger model never gets a simpler answer
    thresholds = []
    for index in range(len(names)):
        low, high = 1e7, 1e12
        while high / low > 1.00002:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if rank(middle) <= index else (low, middle)
        thresholds.append(f"{low / 1e9:.1f}B")
    assert thresholds == ["1.0B", "2.9B", "7.2B", "12.2B", "68.4B"]
    from zero_course.memory import advice

    for threshold in thresholds:
        assert threshold in advice.__doc__


def test_the_reserve_reproduces_what_the_zero_paper_measured():
    # Pos on 64 GPUs of 32 GB: 7.6B by the bare formula, 6.2B measured [1910.02054, table 2].
    assert model_state_bytes(7.6e9, 64, 1).total < 32e9 < model_state_bytes(7.7e9, 64, 1).total

    def largest(**options):
        size = 1e9
        while advise(size, 64, 32e9, gpus_per_node=16, **options)["ZeRO-1"].fits:
            size *= 1.002
        return size

    assert largest() == pytest.approx(6.2e9, rel=0.01)
    assert largest(reserve=0.0, activations=1) == pytest.approx(7.6e9, rel=0.01)


def test_bytes_of_a_strategy_add_up():
    p = 7 * 10**9
    advice = advise(p, 8, 40e9, activations=10**9, largest_layer=10**8, reduce_bucket_size=10**8)
    dp, z2, z3 = advice["DP"], advice["ZeRO-2"], advice["ZeRO-3"]
    assert dp.gpu_bytes == 16 * p + 10**9
    assert z2.gpu_bytes == 2 * p + 14 * p // 8 + 10**9 + 2 * 2 * 10**8
    assert z3.gpu_bytes == 16 * p // 8 + 10**9 + 2 * 2 * 10**8 + 2 * 10**9  # up to 1e9 parameters gathered
    assert z2.gpu_spare == 36 * 10**9 - z2.gpu_bytes
    assert [advice[name].traffic_ratio for name in ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")] == [1, 1, 1, 1.5]
    assert z3.traffic_elements == 3 * p * 7 // 8
    offload = advice["ZeRO-2 + optimizer on CPU"]
    assert offload.gpu_bytes == 2 * p + 10**9 + 4 * 10**8  # ZeRO-Offload: 2M on the GPU
    assert offload.cpu_bytes == 14 * p + 8 * 2 * 4 * 10**8  # 14M on the host, and staging
    everything = advice["ZeRO-3 + all states on CPU"]
    assert everything.gpu["parameters"] == everything.gpu["gradients"] == 0
    assert everything.cpu_bytes - offload.cpu_bytes == 2 * p
    # DP would keep the optimizer's states eight times on the host.
    assert advice["DP + optimizer on CPU"].cpu_bytes == 8 * (14 * p + 2 * 4 * 10**8)


def test_two_hosts_halve_what_a_host_holds():
    one = advise(10e9, 8, 40e9)["ZeRO-3 + optimizer on CPU"]
    two = advise(10e9, 16, 40e9)["ZeRO-3 + optimizer on CPU"]
    staging = 8 * 2 * 4 * 5 * 10**8
    assert two.cpu_bytes - staging == (one.cpu_bytes - staging) // 2


def test_nvme_takes_what_neither_gpu_nor_host_can():
    advice = advise(175e9, 8, 40e9, nvme=8e12)
    assert advice.recommended.name == "ZeRO-3 + all states on NVMe"
    assert advice.recommended.nvme_bytes == 16 * 175 * 10**9
    assert "NVMe" in advise(175e9, 8, 40e9)["ZeRO-3 + all states on NVMe"].verdict


def test_a_slow_network_or_a_small_host_changes_the_answer():
    assert advise(13e9, 8, 40e9, cpu_memory=100e9).recommended is None
    assert advise(8e9, 8, 40e9, cpu_memory=1).recommended.name == "ZeRO-3"
    assert advise(8e9, 8, 80e9).recommended.name == "ZeRO-2"
    # Between hosts at 1 GB/s an extra gather of the parameters costs more than an update on the host.
    slow = memory.Bandwidths(network_between_hosts=1e9)
    assert advise(10e9, 16, 40e9).recommended.name == "ZeRO-3"
    assert advise(10e9, 16, 40e9, bandwidths=slow).recommended.name == "ZeRO-2 + optimizer on CPU"


def test_one_gpu_shards_nothing_and_offload_still_helps():
    advice = advise(5e9, 1, 32e9)
    assert advice["ZeRO-3"].gpu_bytes == advice["DP"].gpu_bytes
    assert all(strategy.traffic_elements == 0 for strategy in advice.strategies)
    assert "on CPU" in advice.recommended.name


def test_why_zero2_can_take_more_than_zero1():
    small = advise(100e6, 8, 40e9)
    assert small["ZeRO-2"].gpu_bytes > small["ZeRO-1"].gpu_bytes
    note = small.notes[0]
    assert note.startswith("ZeRO-2 takes 225.00 MB more on a GPU than ZeRO-1")
    assert "gradients -175.00 MB" in note
    assert "communication buffers +400.00 MB (sized by reduce_bucket_size" in note
    small_buckets = {"reduce_bucket_size": 2**22, "stage3_max_live_parameters": 1e6, "largest_layer": 10**6}
    assert not advise(100e6, 8, 40e9, **small_buckets).notes
    assert "as much on a GPU as" in small.explain("DP", "DP")


def test_stated_counts_change_with_the_preset():
    paper, infinity = advise(7e9, 8, 40e9), advise(7e9, 8, 40e9, preset="zero-infinity")
    assert infinity["ZeRO-1"].gpu_bytes - paper["ZeRO-1"].gpu_bytes == 4 * 7 * 10**9 // 8
    assert paper.assumptions[0].startswith("zero-paper: 16 B a parameter (2+2+12), K = 12")
    docs = advise(7e9, 8, 40e9, preset="deepspeed-docs", largest_layer=10**9)["ZeRO-3"]
    states = ("parameters", "gradients", "master_weights", "optimizer")
    assert sum(docs.gpu[name] for name in states) == 18 * 7 * 10**9 // 8
    assert docs.gpu["gathered_parameters"] == 2 * 10**9 + 4 * 10**9


def test_advice_speaks():
    advice = advise(7e9, 8, 40e9)
    table = advice.table()
    assert "* ZeRO-2 " in table
    assert "DP does not fit (GPU 78.96 GB short)" in table
    with pytest.raises(KeyError, match="ZeRO-9.*ZeRO-1"):
        advice["ZeRO-9"]
    huge_layer = advise(1e12, 512, 32e9, gpus_per_node=16)
    assert huge_layer.minimum_gpus is None
    assert "one layer with its activations is too large" in huge_layer.reason


@pytest.mark.parametrize(
    "bad",
    [{"parameters": 0}, {"gpus": 0}, {"gpu_memory": 0.5}, {"reserve": 1.0}, {"margin": -0.1}, {"tokens": 0}],
)
def test_advise_refuses_nonsense(bad):
    arguments = {"parameters": 1e9, "gpus": 8, "gpu_memory": 40e9} | bad
    with pytest.raises(ValueError, match=next(iter(bad))):
        advise(**arguments)


# ---------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GB", 40 * 10**9),
        ("40GiB", 40 * 2**30),
        ("40 gib", 40 * 2**30),
        ("80e9", 80 * 10**9),
        ("1.5TB", 1_500_000_000_000),
        (".5KiB", 512),
        ("1_000", 1000),
        (80e9, 80 * 10**9),
        (7, 7),
        ("0.1GB", 10**8),  # exact, where 0.1 * 1e9 in floats only happens to be
        ("12345678901.234567891TB", 12345678901234567891000),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("40G", "40GB .decimal. or 40GiB .binary."),
        ("40 gigs", "unknown unit 'gigs'"),
        ("-1GB", "not a size"),
        ("GB", "not a size"),
        ("nan", "not a size"),
        ("1e999", "slip"),
        ("0.3B", "not a whole number"),
        (True, "not a size"),
    ],
)
def test_parse_bytes_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "count"), [("7B", 7 * 10**9), ("7e9", 7 * 10**9), ("350m", 350_000_000), ("1.5T", 15 * 10**11)]
)
def test_parse_count(text, count):
    assert parse_count(text) == count


def test_parse_count_refuses():
    with pytest.raises(ValueError, match="unknown unit 'GB'"):
        parse_count("7GB")


def test_format_bytes_always_has_a_label():
    assert format_bytes(40 * 10**9) == "40.00 GB"
    assert format_bytes(40 * 10**9, binary=True) == "37.25 GiB"
    assert format_bytes(999) == "999 B"
    assert format_bytes(999_999_999) == "1.00 GB"
    assert format_bytes(-5_000_000, digits=1) == "-5.0 MB"
    assert [format_count(n) for n in (7 * 10**9, 1_500_000, 999, 100_000)] == ["7B", "1.5M", "999", "100K"]


@given(st.integers(0, 10**15), st.booleans())
def test_what_is_formatted_says_what_it_was(size, binary):
    number, unit = format_bytes(size, binary=binary, digits=12).split()
    assert float(number) * parse_bytes(f"1{unit}") == pytest.approx(size, rel=1e-11)
    assert unit == "B" or unit.endswith("iB" if binary else "B")
