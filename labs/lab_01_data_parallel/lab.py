"""Lab 01, data parallelism: what goes over the wire, and when.

Three witnesses for each collective: the formula, the ledger, and the kernel's counters of the network interface; with
a negative control that shows that they can disagree. Then the gradients of data parallelism: averaged over the ranks,
sent once a step, and while backward is still running.
"""

from __future__ import annotations

from zero_course.lab import wire

if __name__ == "__main__":
    wire.enter_own_network()

import statistics
import time
from dataclasses import replace

import torch

from zero_course.comm import Communicator
from zero_course.data_parallel import DataParallel
from zero_course.lab import ladder, plots
from zero_course.lab.processes import Tell, run_ranks
from zero_course.lab.report import Options, Report, run_lab
from zero_course.lab.training import Batches, Experiment, make_rung, read_wire, train_step
from zero_course.memory import format_bytes, ring_bytes, ring_seconds
from zero_course.models import GPT, GPTConfig

MIB = 2**20
OPS = ("all_reduce", "reduce_scatter", "all_gather")
MICRO_BATCHES = 4


def experiment(options: Options) -> Experiment:
    """An odd width, so that buckets need padding; about one bucket a layer."""
    width = 99 if options.quick else 195
    model = GPTConfig(n_layer=3, n_head=3, d_model=width, block_size=64)
    return Experiment(model, steps=10, rows=2, bucket_size=12 * width**2, wire_steps=4)


# -- what a rank does ----------------------------------------------------------------------------------------


def everything(tell: Tell, plan: Experiment, size: int, sizes: list[int]) -> dict[str, object]:
    """All measurements but the training, on one rank; name to what was found."""
    own = Communicator()
    todo = {
        "ours": lambda: collectives(own, size),
        "gloo": lambda: (
            collectives(Communicator(transport="native"), size) if own.transport == "peer" else None
        ),
        "times": lambda: times(own, sizes),
        "averages": lambda: averages(own, replace(plan, rows=1)),
        "overlap": lambda: overlap(own, replace(plan, rows=4), True),
        "no overlap": lambda: overlap(own, replace(plan, rows=4), False),
    }
    found = {}
    for name, measure in todo.items():
        if own.rank == 0:
            tell(name)
        found[name] = measure()
    return found


def collectives(comm: Communicator, size: int) -> dict[str, dict[str, object]]:
    """Run each collective on a vector of about ``size`` bytes and read ledger, interface and clock."""
    repeats = 3 if comm.world_size <= 2 else 2
    n, rank = comm.world_size, comm.rank
    numel = size // 4 // n * n
    readable = wire.reason_outside() is None
    found: dict[str, dict[str, object]] = {}
    for op in OPS:
        seen, seconds, wrong, sent = [], [], 0, 0
        for _ in range(repeats):
            whole = torch.full((numel,), float(rank + 1), device=comm.device)
            own = whole[: numel // n].clone()
            begin = read_wire(comm) if readable else 0
            comm.ledger.clear()
            started = time.perf_counter()
            run_collective(comm, op, whole, own)
            seconds.append(time.perf_counter() - started)
            sent = comm.ledger.wire_bytes(op=op)
            if readable:
                seen.append(read_wire(comm) - begin)
            total = n * (n + 1) // 2
            expected = {"all_reduce": (whole, total), "reduce_scatter": (own, total)}
            if op == "all_gather":
                wrong += sum(int((part != r + 1).sum()) for r, part in enumerate(whole.chunk(n)))
            else:
                result, value = expected[op]
                wrong += int((result != value).sum())
        found[op] = {"sent": sent, "seen": seen, "seconds": min(seconds), "wrong": wrong, "size": 4 * numel}
    return found


def run_collective(comm: Communicator, op: str, whole: torch.Tensor, own: torch.Tensor) -> None:
    """One of `OPS`, by name."""
    if op == "all_reduce":
        comm.all_reduce(whole)
    elif op == "reduce_scatter":
        comm.reduce_scatter(own, whole)
    else:
        comm.all_gather(whole, own)


def times(comm: Communicator, sizes: list[int]) -> dict[str, list[float]]:
    """Seconds of each collective for each size in bytes: the median of several, the slowest rank's."""
    n = comm.world_size
    found: dict[str, list[float]] = {}
    for op in OPS:
        found[op] = []
        for size in sizes:
            whole = torch.zeros(max(1, size // 4 // n) * n, device=comm.device)
            own = whole[: whole.numel() // n].clone()
            taken = []
            for _ in range(9 if size <= MIB else 5):
                comm.barrier()
                started = time.perf_counter()
                run_collective(comm, op, whole, own)
                if comm.device.type == "cuda":
                    torch.cuda.synchronize()
                taken.append(time.perf_counter() - started)
            found[op].append(max(comm.all_gather_object(statistics.median(taken))))
    return found


def averages(comm: Communicator, plan: Experiment) -> dict[str, object]:
    """Gradients of one step and of one accumulated over micro-batches, against one process on the joined batch."""
    torch.manual_seed(plan.seed)
    alone = GPT(plan.model).to(comm.device)
    torch.manual_seed(plan.seed + comm.rank)  # other weights on other ranks: rank 0's must win
    rung = make_rung(0, GPT(plan.model).to(comm.device), plan, comm)
    batches = Batches(plan, comm)
    found: dict[str, object] = {"buckets": len(rung.buckets)}
    for name, count in (("one", 1), ("accumulated", MICRO_BATCHES)):
        rung.zero_grad()
        alone.zero_grad()
        comm.ledger.clear()
        parts = [batches.next() for _ in range(count)]
        for part in parts[:-1]:
            with rung.no_sync():
                (rung(*part) / count).backward()
        (rung(*parts[-1]) / count).backward()
        found[f"{name}_sent"] = comm.ledger.wire_bytes("gradients")
        found[f"{name}_calls"] = sum(1 for _ in comm.ledger.select("gradients"))
        for part in parts:
            joined = [
                torch.cat([row.to(comm.device) for row in comm.all_gather_object(side.cpu())])
                for side in part
            ]
            (alone(*joined) / count).backward()
        found[f"{name}_error"] = max(
            float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max())
            for ours, theirs in zip(rung.module.parameters(), alone.parameters())
        )
    return found


def overlap(comm: Communicator, plan: Experiment, on: bool) -> dict[str, object]:
    """When each bucket was posted and when it was done, in one backward; seconds since its beginning."""
    torch.manual_seed(plan.seed)
    rung: DataParallel = make_rung(0, GPT(plan.model).to(comm.device), plan, comm, overlap_comm=on)
    batches = Batches(plan, comm)
    for step in range(2):
        train_step(rung, batches.next(), plan.rate(step))
        rung.zero_grad()
    arrived: list[float] = []
    for param in rung.module.parameters():
        param.register_post_accumulate_grad_hook(lambda _: arrived.append(time.perf_counter()))
    loss = rung(*batches.next())
    comm.ledger.clear()
    comm.barrier()
    begin = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    entries = list(comm.ledger.select("gradients"))
    # The rung's own hook runs first, so the last bucket is posted just before the last of our times.
    last_gradient = max(arrived)
    before_last = sorted(arrived)[-2]
    return {
        "buckets": [(e.started - begin, e.finished - begin, e.payload_bytes) for e in entries],
        "posted_before": sum(e.started < before_last for e in entries),
        "in_flight": sum(a.finished > b.started for a, b in zip(entries, entries[1:])),
        "exposed": sum(e.seconds for e in entries),
        "under_way": sum(e.finished - e.started for e in entries),
        "last_gradient": last_gradient - begin,
        "end": end - begin,
    }


# -- the lab -------------------------------------------------------------------------------------------------


def run(report: Report, options: Options) -> None:
    """The whole lab."""
    plan, n = experiment(options), options.nproc
    size = (8 if options.quick else 64) * MIB
    sizes = [2**k for k in range(10, 22 if options.quick else 25, 2)]
    with ladder.progress_bar(report.console) as bar:
        task = bar.add_task("measuring", total=6, note="starting")
        found = run_ranks(
            n,
            everything,
            plan,
            size,
            sizes,
            on_event=lambda rank, name: bar.update(task, advance=1, note=name),
        )
        bar.update(task, note="")
    runs = ladder.train_each(report, {"DP": (0, plan)})["DP"]
    expected = ladder.predictions(plan, 0, n)

    check_collectives(report, [rank["ours"] for rank in found], [rank["gloo"] for rank in found])
    check_averages(report, [rank["averages"] for rank in found], [p.traffic["gradients"] for p in expected])
    ladder.check_traffic(report, runs, expected)
    ladder.check_memory(report, runs, expected)
    report.section = "The same weights everywhere, DP"
    report.check("ranks that hold other weights than rank 0", 0, sum(run.digest != runs[0].digest for run in runs),
                 "ranks")  # fmt: skip
    ladder.check_own_formula(report, runs, expected)
    check_overlap(report, [rank["overlap"] for rank in found], [rank["no overlap"] for rank in found])
    if n > 1:
        draw_times(report, sizes, found[0]["times"])
    else:
        report.cannot("alpha-beta fit", "one rank sends nothing")
    draw_buckets(report, found[0]["overlap"], found[0]["no overlap"])
    report.cannot("NCCL: bus bandwidth, kernels that overlap on streams, scaling", "needs several GPUs")


def check_collectives(report: Report, ours: list, native: list) -> None:
    """Formula, ledger, interface."""
    n = report.world_size
    size = ours[0]["all_reduce"]["size"]
    report.section = f"Collectives on {size / MIB:.0f} MiB: (N-1)/N of it, twice for an all-reduce"
    for op in OPS:
        ideal = ring_bytes(op, size, n)
        report.check_ranks(f"{op}: ledger", [ideal] * n, [rank[op]["sent"] for rank in ours], "bytes")
        ladder.check_wire(report, f"{op}: loopback interface, all ranks", n * ideal, ours[0][op]["seen"])
        report.check_ranks(f"{op}: wrong elements", [0] * n, [rank[op]["wrong"] for rank in ours], "elements")
        report.measurements[f"{op}, {size / MIB:.0f} MiB, seconds"] = max(
            rank[op]["seconds"] for rank in ours
        )
    report.section = "Negative control: gloo's own reduce-scatter sends twice the ideal"
    if native[0] is None:
        report.cannot("negative control", "it is gloo's; NCCL's reduce-scatter sends the ideal")
        return
    for op, factor in (("all_reduce", 1), ("reduce_scatter", 2), ("all_gather", 1)):
        expected = factor * ring_bytes(op, size, n)
        label = f"gloo {op}, {factor}x the ideal"
        report.check_ranks(f"{label}: ledger", [expected] * n, [rank[op]["sent"] for rank in native], "bytes")
        ladder.check_wire(
            report, f"{label}: loopback interface, all ranks", n * expected, native[0][op]["seen"]
        )
        report.measurements[f"gloo {op}, {size / MIB:.0f} MiB, seconds"] = max(
            rank[op]["seconds"] for rank in native
        )


def check_averages(report: Report, averaged: list, expected: list[int]) -> None:
    """Divided by N, and sent once a step."""
    report.section = "Gradients: averaged over the ranks, sent once a step"
    for name, label in (("one", "1 micro-batch"), ("accumulated", f"{MICRO_BATCHES} micro-batches")):
        report.check_ranks(f"{label}: sent", expected, [rank[f"{name}_sent"] for rank in averaged], "bytes")
        report.check_ranks(
            f"{label}: all-reduces",
            [rank["buckets"] for rank in averaged],
            [rank[f"{name}_calls"] for rank in averaged],
            "calls",
        )
        worst = max(rank[f"{name}_error"] for rank in averaged)
        report.check(f"{label}: off one process's, joined batch", 1e-5, worst, "relative", relation="<=")


def check_overlap(report: Report, overlapped: list, waited: list) -> None:
    """Buckets are posted while backward runs; how much that hides is printed, not promised."""
    n = report.world_size
    report.section = "Overlap: every bucket but the last is on its way before backward has its last gradient"
    buckets = len(overlapped[0]["buckets"])
    report.check_ranks("posted before the last gradient", [buckets - 1] * n,
                       [rank["posted_before"] for rank in overlapped], "buckets")  # fmt: skip
    report.check_ranks("under way as the next was posted", [buckets - 1 if n > 1 else 0] * n,
                       [rank["in_flight"] for rank in overlapped], "buckets")  # fmt: skip
    report.check_ranks("overlap_comm=False: under way as the next was posted", [0] * n,
                       [rank["in_flight"] for rank in waited], "buckets")  # fmt: skip
    for name, ranks in (("overlap", overlapped), ("no overlap", waited)):
        exposed = statistics.mean(rank["exposed"] for rank in ranks)
        under_way = statistics.mean(rank["under_way"] for rank in ranks)
        backward = statistics.mean(rank["end"] for rank in ranks)
        report.measurements[name] = {
            "backward, seconds": backward,
            "buckets under way, seconds": under_way,
            "of it spent in communication calls, seconds": exposed,
        }
        report.console.print(
            f"{name:<10}: backward {1e3 * backward:.1f} ms; buckets under way for {1e3 * under_way:.1f} ms in sum, "
            f"of which backward spent {1e3 * exposed:.1f} ms on them",
            highlight=False,
        )


def draw_times(report: Report, sizes: list[int], taken: dict[str, list[float]]) -> None:
    """Time against size, and the alpha-beta model fitted to it."""
    n = report.world_size
    figure, (panel,) = plots.new_figure(1, f"Collectives between {report.ranks}: T = messages · α + bytes sent / B",
                                        width=7.5)  # fmt: skip
    for number, op in enumerate(OPS):
        alpha, beta = fit(op, sizes, taken[op], n)
        fitted = [ring_seconds(op, size, n, latency=alpha, bandwidth=beta) for size in sizes]
        colour = plots.LINES[number]
        panel.loglog(sizes, [1e3 * t for t in taken[op]], "o", color=colour)
        panel.loglog(sizes, [1e3 * t for t in fitted], "-", color=colour,
                     label=f"{op}: α = {1e6 * alpha:.0f} µs, B = {beta / 1e9:.2f} GB/s")  # fmt: skip
        report.measurements[f"{op}, alpha-beta"] = {"alpha, seconds": alpha, "B, bytes a second": beta}
    panel.set_xlabel("vector, bytes")
    panel.set_ylabel("time, ms (median; dots measured, lines fitted)")
    panel.grid(True, which="major", alpha=0.3)
    panel.legend(fontsize=9)
    plots.save(figure, report.figure("alpha_beta.png"))


def fit(op: str, sizes: list[int], seconds: list[float], n: int) -> tuple[float, float]:
    """Latency (s) and bandwidth (bytes/s) that fit best, each time weighted by itself: small ones count too."""
    rows = [
        [ring_seconds(op, size, n, latency=1.0, bandwidth=float("inf")) / t, ring_bytes(op, size, n) / t]
        for size, t in zip(sizes, seconds)
    ]
    solution = torch.linalg.lstsq(
        torch.tensor(rows, dtype=torch.float64), torch.ones(len(rows), 1).double()
    ).solution
    alpha, inverse = solution.flatten().tolist()
    return max(alpha, 1e-9), 1 / max(inverse, 1e-15)


def draw_buckets(report: Report, overlapped: dict, waited: dict) -> None:
    """Which bucket was on its way when, with overlap and without."""
    figure, panels = plots.new_figure(
        2, f"All-reduces of gradient buckets in one backward, rank 0 of {report.ranks}"
    )
    longest = 1e3 * max(overlapped["end"], waited["end"])
    for panel, rank, title in zip(panels, (overlapped, waited), ("overlap_comm=True", "overlap_comm=False")):
        for number, (started, finished, size) in enumerate(rank["buckets"]):
            colour = plots.LINES[number % len(plots.LINES)]
            panel.barh(number, 1e3 * (finished - started), left=1e3 * started, color=colour, height=0.7)
            label = format_bytes(size, binary=True, digits=1)
            panel.text(1e3 * finished + 0.01 * longest, number, label, va="center", fontsize=7)
        panel.axvline(1e3 * rank["last_gradient"], color="black", linestyle=":", label="last gradient")
        panel.axvline(1e3 * rank["end"], color="black", linestyle="-", linewidth=1, label="backward returns")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("ms since backward began")
        panel.set_ylabel("bucket, in the order of backward")
        panel.set_xlim(0, 1.15 * longest)
        panel.set_yticks(range(len(rank["buckets"])))
        panel.invert_yaxis()
        panel.legend(fontsize=8, loc="lower left")
    plots.save(figure, report.figure("buckets.png"))


if __name__ == "__main__":
    run_lab("lab_01_data_parallel", __file__, __doc__, run)
