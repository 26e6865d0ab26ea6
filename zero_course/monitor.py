"""Where the figures of a training run go: TensorBoard and CSV files, as the config asks.

A figure is an event: (tag, value, samples so far). Tags, file names and keys are DeepSpeed's where it has the
thing ("Monitoring" page of its documentation; ``monitor/tensorboard.py``, ``monitor/csv_monitor.py``):

    Train/Samples/train_loss   mean over the step's micro-batches of rank 0
    Train/Samples/lr           learning rate of the first parameter group in this step
    Train/Samples/elapsed_time_ms_forward, _backward, _step    with wall_clock_breakdown

and ours beside them: ``Train/Samples/grad_norm`` and ``grad_norm_clipped``, ``samples_per_second``,
``tokens_per_second``, ``sent_bytes`` (to other ranks, by rank 0, in the step), ``resident_bytes`` and, on a
GPU, ``device_bytes``. Only rank 0 writes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .config import Config

DEFAULT_OUTPUT = "runs"  # where a monitor without output_path writes
Event = tuple[str, float, int]


class TensorBoardMonitor:
    """Writes events for ``tensorboard --logdir``.

    Args:
        output_path: folder of all runs; empty for `DEFAULT_OUTPUT`.
        job_name: folder of this run in it.
    """

    def __init__(self, output_path: str = "", job_name: str = "DeepSpeedJobName") -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and few runs need it

        self.folder = Path(output_path or DEFAULT_OUTPUT, job_name)
        self._writer = SummaryWriter(str(self.folder))

    def write_events(self, events: Iterable[Event]) -> None:
        """Write (tag, value, samples so far) triples and flush, so that a crash loses nothing."""
        for tag, value, step in events:
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class CSVMonitor:
    """Writes one file a tag, two columns each: ``step`` (samples so far) and the tag's last part.

    The tag ``Train/Samples/lr`` goes to ``Train_Samples_lr.csv``. A resumed run appends.

    Args:
        output_path, job_name: as for :class:`TensorBoardMonitor`.
    """

    def __init__(self, output_path: str = "", job_name: str = "DeepSpeedJobName") -> None:
        self.folder = Path(output_path or DEFAULT_OUTPUT, job_name)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, Any] = {}

    def write_events(self, events: Iterable[Event]) -> None:
        """Append (tag, value, samples so far) triples and flush, so that a crash loses nothing."""
        for tag, value, step in events:
            if tag not in self._files:
                name = tag.replace("/", "_").replace(" ", "_") + ".csv"
                file = self._files[tag] = open(self.folder / name, "a", newline="")  # noqa: SIM115 - until close()
                if file.tell() == 0:
                    csv.writer(file).writerow(["step", tag.rpartition("/")[2]])
            csv.writer(self._files[tag]).writerow([step, value])
            self._files[tag].flush()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()


class MonitorMaster:
    """All monitors that a config enables; on ranks other than 0 there are none.

    Args:
        config: its ``tensorboard`` and ``csv_monitor`` sections.
        rank: this rank.
    """

    def __init__(self, config: Config, rank: int = 0) -> None:
        kinds = [(TensorBoardMonitor, config.tensorboard), (CSVMonitor, config.csv_monitor)]
        self.monitors = [
            kind(section.output_path, section.job_name)
            for kind, section in kinds
            if section.enabled and rank == 0
        ]

    @property
    def enabled(self) -> bool:
        """Whether an event goes anywhere."""
        return bool(self.monitors)

    def write_events(self, events: Iterable[Event]) -> None:
        """Give the events to every monitor."""
        events = list(events)
        for monitor in self.monitors:
            monitor.write_events(events)

    def close(self) -> None:
        """Close every monitor."""
        for monitor in self.monitors:
            monitor.close()
