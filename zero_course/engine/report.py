"""What a run tells of itself: a line on the console every ``steps_per_print`` steps, and events for monitors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..config import Config
from ..data_parallel import DataParallel
from ..ledger import Entry
from ..memory import device_bytes, format_bytes, resident_bytes
from ..monitor import Event, MonitorMaster

PHASES = ("forward", "backward", "step")
LEDGER_ENTRIES = (
    200_000  # about 100 MB; a long run forgets its oldest collectives, or it would fill the memory
)


@dataclass
class Step:
    """One optimizer step, as it went.

    Attributes:
        number: steps so far, this one included.
        samples_so_far: samples of all ranks in all steps so far.
        samples: samples of all ranks in this step.
        tokens: tokens of all ranks in this step, 0 where the model's input is not of tokens.
        losses: of this rank, one a micro-batch.
        lr: learning rate of the first parameter group.
        norm: of the gradients over the whole model, before clipping.
        clipped_norm: after clipping; the same where it was not needed.
        skipped: the norm was not finite, and the weights are as before.
    """

    number: int
    samples_so_far: int
    samples: int
    tokens: int
    losses: list[torch.Tensor]
    lr: float
    norm: float
    clipped_norm: float
    skipped: bool

    @property
    def loss(self) -> float:
        """Mean of this rank's micro-batches."""
        return (
            torch.stack([loss.float() for loss in self.losses]).mean().item() if self.losses else float("nan")
        )


class Reporter:
    """Keeps times and writes them down; on ranks other than 0 it only keeps the ledger short.

    Throughput is counted from the end of one step to the end of the next, so loading data is in it. The time
    of the first step, which allocates, is not.

    Args:
        config: its steps_per_print, wall_clock_breakdown, memory_breakdown, comms_logger and monitor sections.
        rung: the model whose memory and traffic are reported.
    """

    def __init__(self, config: Config, rung: DataParallel) -> None:
        self.config, self.rung = config, rung
        self.speaks = rung.comm.rank == 0
        self.monitor = MonitorMaster(config, rung.comm.rank)
        self._seconds = dict.fromkeys(PHASES, 0.0)  # in this step
        self._step_ended: float | None = None
        self._since_print = [0.0, 0, 0]  # seconds, samples, tokens
        self._printed_seconds = dict.fromkeys(PHASES, 0.0)
        self._entries_seen = 0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time inside as ``forward``, ``backward`` or ``step``."""
        self._wait_for_device()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._wait_for_device()
            self._seconds[phase] += time.perf_counter() - begin

    def _wait_for_device(self) -> None:
        if self.config.wall_clock_breakdown and self.rung.comm.device.type == "cuda":
            torch.cuda.synchronize()  # kernels run behind the program; without this, their time shows elsewhere

    def report(self, step: Step) -> None:
        """A step is over: write what is due."""
        now = time.perf_counter()
        entries = self._new_entries()
        if self.speaks:
            seconds = 0.0 if self._step_ended is None else now - self._step_ended
            if self._step_ended is not None:
                self._since_print[0] += seconds
                self._since_print[1] += step.samples
                self._since_print[2] += step.tokens
            for phase in PHASES:
                self._printed_seconds[phase] += self._seconds[phase]
            if self.monitor.enabled:
                self.monitor.write_events(self._events(step, seconds, sum(e.wire_bytes for e in entries)))
            self._print_traffic(entries)
            every = self.config.steps_per_print
            if every and step.number % every == 0:
                self._print(step, every)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._step_ended = time.perf_counter()

    def _events(self, step: Step, seconds: float, sent: int) -> list[Event]:
        figures = {
            "train_loss": step.loss,
            "lr": step.lr,
            "grad_norm": step.norm,
            "grad_norm_clipped": step.clipped_norm,
            "sent_bytes": sent,
        }
        if seconds:
            figures["samples_per_second"] = step.samples / seconds
            if step.tokens:
                figures["tokens_per_second"] = step.tokens / seconds
        for name, size in (("resident_bytes", resident_bytes()), ("device_bytes", device_bytes())):
            if size is not None:
                figures[name] = size
        if self.config.wall_clock_breakdown:
            figures |= {f"elapsed_time_ms_{phase}": 1e3 * self._seconds[phase] for phase in PHASES}
        return [(f"Train/Samples/{name}", value, step.samples_so_far) for name, value in figures.items()]

    def _print(self, step: Step, every: int) -> None:
        norm = f"grad norm {step.norm:.4g}"
        if step.skipped:
            norm += " (step skipped)"
        elif step.clipped_norm < step.norm:
            norm += f", clipped to {step.clipped_norm:.4g}"
        parts = [f"step {step.number}", f"loss {step.loss:.4f}", f"lr {step.lr:.3e}", norm]
        seconds, samples, tokens = self._since_print
        if seconds:
            parts.append(f"{samples / seconds:.1f} samples/s")
            if tokens:
                parts.append(f"{tokens / seconds:.0f} tokens/s")
        memory = self.rung.memory()
        parts.append(f"model states {format_bytes(sum(memory.values()))}")
        if (resident := resident_bytes()) is not None:
            parts.append(f"resident {format_bytes(resident)}")
        if (on_device := device_bytes()) is not None:
            parts.append(f"GPU {format_bytes(on_device)}")
        print(" | ".join(parts), flush=True)
        if self.config.wall_clock_breakdown:
            times = (f"{phase} {1e3 * self._printed_seconds[phase] / every:.2f} ms" for phase in PHASES)
            print("  time a step: " + ", ".join(times), flush=True)
        if self.config.memory_breakdown:
            print("  memory: " + ", ".join(f"{k} {format_bytes(v)}" for k, v in memory.items()), flush=True)
        if self.config.comms_logger.enabled:
            print(self.rung.comm.ledger.table(), flush=True)
        self._since_print = [0.0, 0, 0]
        self._printed_seconds = dict.fromkeys(PHASES, 0.0)

    def _print_traffic(self, entries: list[Entry]) -> None:
        logger = self.config.comms_logger
        if logger.enabled and logger.verbose:
            for entry in entries:
                if logger.prof_all or entry.op in logger.prof_ops:
                    print(
                        f"comm: {entry.op} | {entry.purpose} | {entry.payload_bytes} bytes, {entry.wire_bytes} sent | "
                        f"{1e3 * entry.seconds:.2f} ms | {entry.site}",
                        flush=True,
                    )

    def _new_entries(self) -> list[Entry]:
        """The ledger's entries since the last step."""
        entries = self.rung.comm.ledger.entries
        if self._entries_seen > len(entries):  # someone cleared the ledger
            self._entries_seen = 0
        new = entries[self._entries_seen :]
        if len(entries) > LEDGER_ENTRIES:
            del entries[: len(entries) // 2]
        self._entries_seen = len(entries)
        return new
