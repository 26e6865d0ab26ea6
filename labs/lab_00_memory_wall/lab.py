"""Lab 00, the memory wall: what a model costs, predicted and then measured.

The calculator against the ZeRO paper's Table 1; 16 bytes a parameter against the live bytes of a real model with Adam,
on every rank; the activations of the course's GPT by formula, against what autograd saves; where memory goes over a
step; and which strategy fits which hardware.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from zero_course.comm import Communicator
from zero_course.lab import plots
from zero_course.lab.predict import STEP_COUNTER
from zero_course.lab.processes import Tell, run_ranks
from zero_course.lab.report import Options, Report, run_lab
from zero_course.lab.training import alive_bytes, meter_of_everything
from zero_course.memory import (
    PRESETS,
    PeakMeter,
    advise,
    live_bytes,
    live_bytes_by_class,
    model_state_bytes,
    preset_state_bytes,
    zero_table,
)
from zero_course.models import GPT, GPTConfig

GB = 10**9
# arXiv 1910.02054, Table 1, GB = 1e9 bytes on each of N = 1, 4, 16, 64, 256, 1024 GPUs, as printed
RANKS = (1, 4, 16, 64, 256, 1024)
TABLE = {
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
# each shape: layers, width, heads, tokens, rows, vocabulary
SHAPES = ((2, 64, 4, 32, 2, 256), (3, 96, 3, 40, 4, 300), (1, 48, 2, 64, 3, 256))
KINDS = ("fused attention", "plain attention", "recomputed blocks")
# 8 GPUs of 40 GB on one host: parameters up to which each strategy is recommended (zero_course/memory/advice.py)
THRESHOLDS = (
    ("DP", 1.0e9),
    ("ZeRO-1", 2.9e9),
    ("ZeRO-2", 7.2e9),
    ("ZeRO-3", 12.2e9),
    ("ZeRO-3 + offload", 68.4e9),
)
BEYOND = "TP and PP"


# -- what a rank does ----------------------------------------------------------------------------------------


def measure(tell: Tell, shape: GPTConfig) -> dict[str, Any]:
    """Model states in fp32 and in mixed precision, activations, and a step over time, on one rank."""
    device = Communicator().device
    return {
        "fp32": fp32_states(shape, device),
        "mixed": mixed_states(shape, device),
        "activations": [[activations(kind, *size) for size in SHAPES] for kind in KINDS],
        "recomputed_gradients": recomputed_gradients(SHAPES[0]),
        "step": one_step(shape, device),
    }


def batch_for(shape: GPTConfig, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets, (rows, block_size) each."""
    tokens = torch.randint(shape.vocab_size, (2, rows, shape.block_size), device=device)
    return tokens[0].clone(), tokens[1].clone()


def fp32_states(shape: GPTConfig, device: torch.device) -> dict[str, int]:
    """A GPT and AdamW after one step: bytes by class, and everything alive beside what was there before."""
    before = alive_bytes()
    model = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batch_for(shape, 1, device)).backward()
    optimizer.step()
    moments = [v for state in optimizer.state.values() for v in state.values() if v.dim() > 0]
    classes = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer": moments,
    }
    sizes = live_bytes_by_class(classes)
    return {**sizes, "alive": alive_bytes() - before, "tensors": len(list(model.parameters()))}


def mixed_states(shape: GPTConfig, device: torch.device) -> dict[str, int]:
    """The paper's mixed precision: bf16 weights and gradients, fp32 master weights and moments, after one step."""
    before = alive_bytes()
    model = GPT(shape).to(device).bfloat16()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    for master, parameter in zip(masters, model.parameters()):
        master.grad = parameter.grad.float()  # a copy for the moment of its update: no state
        optimizer.step()
        master.grad = None
        parameter.data.copy_(master.data)
    classes = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "master_weights": masters,
        "optimizer": [v for state in optimizer.state.values() for v in state.values() if v.dim() > 0],
    }
    return {**live_bytes_by_class(classes), "alive": alive_bytes() - before, "tensors": len(masters)}


def activations(
    kind: str, layers: int, width: int, heads: int, tokens: int, rows: int, vocabulary: int
) -> tuple[int, int]:
    """Bytes that a forward on the CPU keeps for backward, by two witnesses: autograd's hooks and the meter."""
    shape = GPTConfig(vocabulary, layers, heads, width, tokens, activation_checkpointing=kind == KINDS[2])
    model = GPT(shape)
    x, y = batch_for(shape, rows, torch.device("cpu"))
    backend = SDPBackend.MATH if kind == KINDS[1] else SDPBackend.FLASH_ATTENTION
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), sdpa_kernel(backend):
        loss = model(x, y)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    by_hooks = live_bytes(t for t in kept if t.untyped_storage().data_ptr() not in weights)
    del loss
    kept.clear()
    with PeakMeter() as meter, sdpa_kernel(backend):
        loss = model(x, y)
        # the loss itself is alive and not saved, the batch is saved and older than the meter
        by_meter = meter.current - live_bytes([loss]) + live_bytes([x, y])
    return by_hooks, by_meter


def recomputed_gradients(size: tuple[int, ...]) -> int:
    """Elements of gradients that differ when blocks are recomputed."""
    layers, width, heads, tokens, rows, vocabulary = size
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        shape = GPTConfig(vocabulary, layers, heads, width, tokens, activation_checkpointing=recompute)
        model = GPT(shape)
        model(*batch_for(shape, rows, torch.device("cpu"))).backward()
        gradients.append([p.grad for p in model.parameters()])
    return sum(int((a != b).sum()) for a, b in zip(*gradients))


def one_step(shape: GPTConfig, device: torch.device) -> dict[str, Any]:
    """Everything alive over the second step of training, with the ends of forward, backward and update."""
    before = alive_bytes()
    model = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = batch_for(shape, 8, device)
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    before += live_bytes(batch)
    ends, sizes = [], []
    with meter_of_everything() as meter:
        loss = model(*batch)
        for phase in (loss.backward, optimizer.step):
            ends.append(meter.timeline[-1][0])
            sizes.append(meter.current - before)
            phase()
        del loss
        ends.append(meter.timeline[-1][0])
        sizes.append(meter.current - before)
    timeline = [(moment, size - before) for moment, size in meter.timeline]
    return {"timeline": timeline, "ends": ends, "sizes": sizes, "peak": meter.peak - before}


# -- the lab -------------------------------------------------------------------------------------------------


def run(report: Report, options: Options) -> None:
    """The whole lab."""
    shape = GPTConfig(n_layer=2, d_model=64 if options.quick else 192, n_head=4, block_size=64)
    found = run_ranks(options.nproc, measure, shape)
    check_table(report)
    check_states(report, shape, found)
    check_activations(report, found)
    check_step(report, shape, found)
    check_advice(report)
    draw(report, shape, found[0]["step"])
    report.cannot(
        "CUDA: activations kept by its fused kernels", "needs a GPU; they keep other tensors than the CPU's"
    )
    report.cannot("CUDA: allocator peaks and fragmentation", "needs torch's CUDA allocator")


def check_table(report: Report) -> None:
    """The calculator and the paper, within what the paper prints."""
    report.section = "Table 1 of the ZeRO paper (K = 12): cells that agree within the printed digits"
    table = zero_table()
    for (parameters, stage), printed in TABLE.items():
        agree = 0
        for ranks, text in zip(RANKS, printed.split()):
            last_digit = 10.0 ** -len(text.partition(".")[2])  # some cells are rounded, some cut
            agree += abs(table[int(parameters), ranks, stage] / GB - float(text)) < last_digit
        report.check(f"{parameters / GB:g}B parameters, ZeRO-{stage}, N = 1 to 1024", 6, agree, "cells")
    largest = 32 * GB / model_state_bytes(10**9, 64, 1).total
    report.check("largest model for ZeRO-1 on 64 GPUs of 32 GB", 7.6, round(largest, 1), "billion")
    report.section = "Bytes a parameter depend on what is counted"
    for name, size in (("zero-paper", 16), ("fp32", 16), ("megatron", 18), ("zero-infinity", 20)):
        report.check(f"preset {name}", size, PRESETS[name].bytes_per_parameter, "bytes")


def check_states(report: Report, shape: GPTConfig, found: list[dict[str, Any]]) -> None:
    """16 bytes a parameter, on each rank: without ZeRO, more ranks do not help."""
    parameters, n = shape.num_parameters(), report.world_size
    for key, preset, title in (
        ("fp32", "fp32", "fp32 and AdamW: 4 + 4 + 8 = 16 bytes a parameter"),
        ("mixed", "zero-paper", "bf16 with fp32 master weights and AdamW: 2 + 2 + 12 = 16 bytes a parameter"),
    ):
        report.section = f"A GPT of {parameters:,} parameters in {title}"
        expected = preset_state_bytes(parameters, n, 0, preset)
        for name, size in expected.as_dict().items():
            if size:
                report.check_ranks(name, [size] * n, [rank[key][name] for rank in found], "bytes")
        total = [16 * parameters + STEP_COUNTER * rank[key]["tensors"] for rank in found]
        report.check_ranks(
            "all live tensors, Adam's step counters too", total, [r[key]["alive"] for r in found], "bytes"
        )


def activation_formula(kind: str, size: tuple[int, ...]) -> int:
    """Bytes that the course's GPT keeps for backward in fp32 on a CPU, without dropout, with rows, heads > 1.

    With b rows of t tokens, width d, h heads, V words, each of L blocks keeps

        2 norms: input and output 4btd each, mean and deviation 2 x 4bt     16btd + 16bt
        q, k, v                                                             12btd
        attention's result; the fused kernel's log-sum 4bht                  4btd + 4bht
        GELU's input and output, four times as wide                         32btd

    A plain attention keeps its probabilities, 4bht², where the fused one keeps 4bht and computes them again; that is
    what selective recomputation is about. With all blocks recomputed a block keeps its input alone, 4btd. Around the
    blocks there are the last norm (8btd + 8bt), the log-probabilities (4btV and a weight of 4 bytes), tokens and
    targets (16bt) and positions (8t).
    """
    layers, width, heads, tokens, rows, vocabulary = size
    b, t, d, h = rows, tokens, width, heads
    if kind == KINDS[2]:
        block = 4 * b * t * d
    else:
        attention = 4 * b * h * t * (t if kind == KINDS[1] else 1)
        block = 64 * b * t * d + 16 * b * t + attention
    around = 8 * b * t * d + 8 * b * t + 4 * b * t * vocabulary + 4 + 16 * b * t + 8 * t
    return layers * block + around


def check_activations(report: Report, found: list[dict[str, Any]]) -> None:
    """Saved activations, exactly, by two witnesses."""
    report.section = (
        "Activations the course's GPT keeps (fp32, CPU); witnesses: autograd's hooks, a meter of storages"
    )
    for number, kind in enumerate(KINDS):
        for place, size in enumerate(SHAPES):
            expected = activation_formula(kind, size)
            layers, width, heads, tokens, rows, _ = size
            label = f"{kind}, L={layers} d={width} h={heads} t={tokens} b={rows}"
            for witness, name in enumerate(("hooks", "meter")):
                measured = [rank["activations"][number][place][witness] for rank in found]
                report.check_ranks(f"{label}: {name}", [expected] * len(found), measured, "bytes")
    other = [rank["recomputed_gradients"] for rank in found]
    report.check_ranks(
        "gradients that differ when blocks are recomputed", [0] * len(found), other, "elements"
    )


def check_step(report: Report, shape: GPTConfig, found: list[dict[str, Any]]) -> None:
    """A step: forward adds activations, backward trades them for gradients, the update needs a little."""
    report.section = "Over a step of 8 rows: everything alive"
    n, parameters = report.world_size, shape.num_parameters()
    tensors = found[0]["fp32"]["tensors"]
    size = (shape.n_layer, shape.d_model, shape.n_head, shape.block_size, 8, shape.vocab_size)
    kept = 12 * parameters + STEP_COUNTER * tensors
    if report.device == "cpu":
        batch = 16 * 8 * shape.block_size  # in the formula, and here counted as data
        after_forward = kept + activation_formula(KINDS[0], size) - batch + 4  # the loss
        report.check_ranks(
            "after forward", [after_forward] * n, [r["step"]["sizes"][0] for r in found], "bytes"
        )
    after_backward = kept + 4 * parameters + 4
    report.check_ranks(
        "after backward", [after_backward] * n, [r["step"]["sizes"][1] for r in found], "bytes"
    )
    report.check_ranks(
        "after the update", [after_backward - 4] * n, [r["step"]["sizes"][2] for r in found], "bytes"
    )
    peaks = [rank["step"]["peak"] for rank in found]
    report.check_ranks(
        "peak: at least what is alive after backward", [after_backward] * n, peaks, "bytes", relation=">="
    )


def recommended(parameters: float) -> str:
    """The advice for 8 GPUs of 40 GB on one host."""
    strategy = advise(parameters, 8, 40 * GB).recommended
    return strategy.name.replace("optimizer on CPU", "offload") if strategy else BEYOND


def check_advice(report: Report) -> None:
    """Computed from bytes, the course's rule of thumb comes out; and where one strategy ends and the next begins."""
    report.section = "Which strategy, on 8 GPUs of 40 GB"
    for parameters, expected in ((0.5e9, "DP"), (2e9, "ZeRO-1"), (5e9, "ZeRO-2"), (10e9, "ZeRO-3"),
                                 (30e9, "ZeRO-3 + offload"), (175e9, BEYOND)):  # fmt: skip
        report.check(f"{parameters / GB:g}B parameters", expected, recommended(parameters), "")
    for strategy, end in THRESHOLDS:
        low, high = 0.8 * end, 1.2 * end
        while high - low > 1e-4 * end:
            middle = (low + high) / 2
            low, high = (middle, high) if recommended(middle) == strategy else (low, middle)
        report.check(f"{strategy}: up to", end / GB, round(low / GB, 3), "billion", tolerance=0.02)
    alone = advise(5e9, 8, 40 * GB)["DP"].gpu
    states = sum(alone[name] for name in ("parameters", "gradients", "master_weights", "optimizer"))
    report.check("states of 5B parameters under DP", 16 * 5 * GB, states, "bytes")


def draw(report: Report, shape: GPTConfig, step: dict[str, Any]) -> None:
    """What ZeRO leaves on a GPU; memory over a step; activations against batch."""
    figure, (wall, time) = plots.new_figure(2, "The memory wall", width=6.8)
    for stage, name in enumerate(("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        sizes = [model_state_bytes(7.5e9, ranks, stage).total / GB for ranks in RANKS]
        wall.plot(RANKS, sizes, "o-", color=plots.LINES[stage], label=name)
    wall.axhline(40, color="black", linestyle=":", label="a GPU of 40 GB")
    wall.set_xscale("log", base=2)
    wall.set_yscale("log")
    wall.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    wall.set_yticks([0.1, 1, 10, 40, 120], ["0.1", "1", "10", "40", "120"])
    wall.minorticks_off()
    wall.set_xlabel("GPUs")
    wall.set_ylabel("model states on each GPU, GB (1e9 bytes)")
    wall.set_title("7.5 billion parameters, K = 12", fontsize=10)
    wall.legend(fontsize=9)

    last = step["timeline"][-1][0]
    time.step(
        [moment / last for moment, _ in step["timeline"]],
        [size / plots.MIB for _, size in step["timeline"]],
        where="post",
        color=plots.LINES[0],
    )
    begin = 0.0
    for number, (name, end) in enumerate(zip(("forward", "backward", "update"), step["ends"])):
        time.axvspan(begin / last, end / last, color=plots.LINES[number], alpha=0.12, label=name)
        begin = end
    states = 12 * shape.num_parameters() / plots.MIB
    time.axhline(states, color="black", linestyle=":", label="weights and moments, 12 bytes a parameter")
    time.set_ylim(0, 1.2 * step["peak"] / plots.MIB)
    time.set_xlabel("one step, part of its time")
    time.set_ylabel("everything alive on rank 0, MiB (2^20 bytes)")
    time.set_title(f"A step of a GPT of {shape.num_parameters():,} parameters, measured", fontsize=10)
    time.legend(fontsize=8, loc="lower right")
    plots.save(figure, report.figure("memory_wall.png"))


if __name__ == "__main__":
    run_lab("lab_00_memory_wall", __file__, __doc__, run)
