"""Collectives with a byte ledger: the one door through which the engine talks to other ranks.

The idea: count what is sent. For a vector of S bytes on N ranks, each rank sends

    reduce-scatter, all-gather, all-to-all   (N-1)/N · S
    all-reduce = reduce-scatter + all-gather  2(N-1)/N · S

which is the lower bound that the ring algorithm also reaches (Patarasuk and Yuan, 2009, section 4). Sums are
taken in rank order on the rank that owns the slice, so every rank holds the same bits, and so do runs that
cut the same gradients into other buckets.

Each call is entered in a ledger (``ledger.py``) and watched (``watchdog.py``): a collective on which ranks
disagree, or that a rank never reaches, ends in a :class:`CollectiveError` that names the rank and the line.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .flat import BufferPool
from .ledger import Entry, Ledger
from .transport import TRANSPORTS, Call, bytes_of, message
from .watchdog import Watchdog

_PACKAGE = str(Path(__file__).resolve().parent) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep


class CollectiveError(RuntimeError):
    """A collective failed: ranks disagreed on it, one never reached it, or one is gone."""


def get_rank() -> int:
    """This process's rank in the whole job, 0 when there is only one process."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def get_world_size() -> int:
    """Number of processes in the job."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def get_local_rank() -> int:
    """This process's rank on its own host, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def default_device() -> torch.device:
    """This rank's GPU when there is one, else the CPU."""
    return torch.device("cuda", get_local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def default_timeout() -> float:
    """Seconds a collective may take: the environment's ``ZERO_COURSE_TIMEOUT``, else 300."""
    text = os.environ.get("ZERO_COURSE_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(f"ZERO_COURSE_TIMEOUT={text!r} is not a number of seconds above 0")
    return seconds


def init_distributed(backend: str | None = None, timeout: float | None = None) -> None:
    """Join the job that the launcher described in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Does nothing when already joined, or when there is only one process.

    Args:
        backend: ``"nccl"`` or ``"gloo"``; by default NCCL with GPUs, gloo without.
        timeout: seconds to wait for the other ranks; by default :func:`default_timeout`.

    Raises:
        RuntimeError: more ranks than GPUs on this host (NCCL refuses two ranks on one GPU).
    """
    if dist.is_initialized() or get_world_size() == 1:
        return
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        gpus = torch.cuda.device_count()
        if get_local_rank() >= gpus:
            raise RuntimeError(
                f"local rank {get_local_rank()} has no GPU of its own: this host shows {gpus}, and NCCL wants "
                f"one for each rank; launch at most {gpus} ranks here, or init_distributed(backend='gloo')"
            )
        torch.cuda.set_device(get_local_rank())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout or default_timeout()))


class Work:
    """A collective on its way.

    A collective is a generator: it posts sends and receives, yields their handles, and goes on (sums, posts
    the next phase) once they are done. So a collective can be posted in the middle of backward and finished
    later, and its phases can be moved along one at a time.
    """

    def __init__(
        self, comm: Communicator, entry: Entry, fingerprint: str, phases: Iterator[list[Any]]
    ) -> None:
        self._comm, self._entry, self._fingerprint = comm, entry, fingerprint
        self._phases = phases
        self._number = comm._number
        self._handles: list[Any] = []
        self.done = False
        self._run(first=True)

    def advance(self) -> None:
        """Finish the phase under way and post the next one; blocks only for the phase under way."""
        if not self.done:
            self._run()

    def wait(self) -> None:
        """Finish the collective. Its output may be read and its input overwritten afterwards."""
        while not self.done:
            self._run()

    def _run(self, first: bool = False) -> None:
        begin = time.perf_counter()
        try:
            if not first:
                for handle in self._handles:
                    handle.wait(*self._comm._wait_limit)
            self._handles = next(self._phases)
        except StopIteration:
            self.done, self._handles = True, []
            self._entry.finished = time.perf_counter()
        except RuntimeError as error:
            self.done = True
            raise self._comm._failure(self._number, self._fingerprint, self._entry.site, error) from error
        finally:
            self._entry.seconds += time.perf_counter() - begin


class Communicator:
    """The ranks of one process group, and every collective the engine uses.

    Args:
        group: a torch.distributed process group; ``None`` is the whole job, or this process alone when
            torch.distributed has not been initialised.
        transport: ``"peer"`` builds collectives from send and receive (the default over gloo), ``"native"``
            calls the library's own (the default over NCCL). The environment's ``ZERO_COURSE_TRANSPORT``
            is used when the argument is ``None``.
        timeout: seconds after which a collective is given up; by default :func:`default_timeout`.

    Raises:
        ValueError: an unknown transport, or a timeout that is not positive.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        transport: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.group = group
        joined = dist.is_initialized()
        self.rank = dist.get_rank(group) if joined else 0
        self.world_size = dist.get_world_size(group) if joined else 1
        self.backend = dist.get_backend(group) if joined else "none"
        self.device = default_device() if self.backend != "gloo" else torch.device("cpu")
        self.transport = (
            transport
            or os.environ.get("ZERO_COURSE_TRANSPORT")
            or ("native" if self.backend == "nccl" else "peer")
        )
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport {self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        self.timeout = default_timeout() if timeout is None else timeout
        if self.timeout <= 0:
            raise ValueError(f"timeout {timeout} is not a number of seconds above 0")
        # NCCL's wait() only orders streams, and with a limit it would block the host; it has its own watchdog
        self._wait_limit = (timedelta(seconds=self.timeout),) if self.backend == "gloo" else ()
        self.ledger = Ledger()
        self._group_name = "world" if group is None else str(group.group_name)
        self._number = 0  # collectives posted so far: the same on every rank, or the watchdog says where not
        self._pairs: dict[tuple[str, int], int] = {}  # messages posted to and from each peer
        self.pool = BufferPool()  # receive buffers
        self._transport = TRANSPORTS[self.transport](
            group, self.rank, self.world_size, self.backend, self.pool
        )
        self._broken: str | None = None
        self._watchdog: Watchdog | None = None
        if self.world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            name = _instance_name(self._group_name)
            self._watchdog = Watchdog(store, name, self.rank, self.world_size)

    # -- collectives ---------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: torch.Tensor, *, average: bool = False, purpose: str = "", async_op: bool = False
    ) -> Work:
        """Sum ``tensor`` over all ranks, in place, in rank order.

        Args:
            tensor: contiguous, any shape, the same shape and dtype on every rank.
            average: divide the sum by the number of ranks (floating dtypes only).
            purpose: label for the ledger.
            async_op: return at once; the result is there after ``wait()``.
        """
        return self._start(
            "all_reduce", tensor, tensor.numel(), average, purpose, async_op, self._transport.all_reduce
        )

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        average: bool = False,
        purpose: str = "",
        async_op: bool = False,
    ) -> Work:
        """Sum ``input`` over all ranks and keep this rank's slice of the sum.

        Args:
            output: (n,), this rank's slice; may be that slice of ``input`` itself.
            input: (N·n,) for N ranks; unchanged, but for ``output`` where they overlap.
            average, purpose, async_op: as in :meth:`all_reduce`.
        """
        self._check_sizes("reduce_scatter", "input", input, "output", output)
        args = ("reduce_scatter", input, input.numel(), average, purpose, async_op)
        return self._start(*args, self._transport.reduce_scatter, output)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str = "", async_op: bool = False
    ) -> Work:
        """Put the slices of all ranks together on every rank.

        Args:
            output: (N·n,) for N ranks.
            input: (n,), this rank's slice; may be that slice of ``output`` itself.
            purpose, async_op: as in :meth:`all_reduce`.
        """
        self._check_sizes("all_gather", "output", output, "input", input)
        args = ("all_gather", output, output.numel(), False, purpose, async_op)
        return self._start(*args, self._transport.all_gather, input)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str = "", async_op: bool = False
    ) -> Work:
        """Send slice j of ``input`` to rank j; slice i of ``output`` comes from rank i. Both (N·n,)."""
        if output.numel() != input.numel() or input.numel() % self.world_size:
            raise ValueError(
                f"all_to_all: output ({output.numel()}) and input ({input.numel()}) want the same number of "
                f"elements, a multiple of {self.world_size} ranks"
            )
        args = ("all_to_all", input, input.numel(), False, purpose, async_op)
        return self._start(*args, self._transport.all_to_all, output)

    def broadcast(
        self, tensor: torch.Tensor, src: int = 0, *, purpose: str = "", async_op: bool = False
    ) -> Work:
        """Copy ``tensor`` of rank ``src`` into ``tensor`` on every rank, in place."""
        self._check_rank(src)
        return self._start(
            f"broadcast from {src}",
            tensor,
            tensor.numel(),
            False,
            purpose,
            async_op,
            self._transport.broadcast,
            src,
        )

    def barrier(self) -> None:
        """Return when every rank has called it."""
        token = torch.zeros(self.world_size, dtype=torch.uint8, device=self.device)
        self._start(
            "barrier",
            token,
            self.world_size,
            False,
            "control",
            False,
            self._transport.all_gather,
            token[self.rank :][:1],
        )

    def send(self, tensor: torch.Tensor, dst: int, *, purpose: str = "", async_op: bool = False) -> Work:
        """Send ``tensor`` to rank ``dst``, which calls :meth:`recv` on the same shape and dtype."""
        self._check_rank(dst, peer=True)
        return self._message("send", tensor, dst, purpose, async_op)

    def recv(self, tensor: torch.Tensor, src: int, *, purpose: str = "", async_op: bool = False) -> Work:
        """Receive into ``tensor`` what rank ``src`` sends."""
        self._check_rank(src, peer=True)
        return self._message("recv", tensor, src, purpose, async_op)

    def all_gather_object(self, value: Any, purpose: str = "setup") -> list[Any]:
        """Every rank's picklable ``value``, in rank order."""
        if self.world_size == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = data.numel()
        self.all_gather(sizes, sizes[self.rank :][:1], purpose=purpose)
        longest = int(sizes.max())
        everything = torch.zeros(self.world_size * longest, dtype=torch.uint8, device=self.device)
        mine = everything[self.rank * longest :][:longest]
        mine[: data.numel()] = data
        self.all_gather(everything, mine, purpose=purpose)
        rows = everything.view(self.world_size, longest).cpu()
        return [
            pickle.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes.tolist(), strict=True)
        ]

    # -- bookkeeping -----------------------------------------------------------------------------------------

    def _start(
        self,
        op: str,
        tensor: torch.Tensor,
        numel: int,
        average: bool,
        purpose: str,
        async_op: bool,
        body: Any,
        *args: Any,
    ) -> Work:
        """Enter the collective in the ledger and post its first phase."""
        if self._broken:
            raise CollectiveError(f"this communicator is unusable after an earlier failure: {self._broken}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op}: tensor of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()"
            )
        if average and not tensor.is_floating_point():
            raise ValueError(
                f"{op}: an average of {tensor.dtype} would be rounded; sum it and divide yourself"
            )
        self._number += 1
        op_name = op.split(" ")[0]
        entry = Entry(
            op_name,
            purpose,
            self._group_name,
            self.transport,
            bytes_of(tensor),
            0,
            _call_site(),
            time.perf_counter(),
        )
        fingerprint = f"{op}({numel} x {str(tensor.dtype).removeprefix('torch.')})"
        self.ledger.entries.append(entry)
        if self.world_size == 1 and op_name in ("all_reduce", "broadcast", "barrier"):
            return Work(self, entry, fingerprint, iter(()))
        if self.world_size == 1:  # one slice: the output is the input
            output, input = (tensor, args[0]) if op == "all_gather" else (args[0], tensor)
            if output.data_ptr() != input.data_ptr():
                output.copy_(input)
            return Work(self, entry, fingerprint, iter(()))
        if self._watchdog:
            self._watchdog.note(self._number, fingerprint, entry.site)
        # The tag carries the fingerprint, so that messages of different collectives never meet: a mismatch
        # ends in a timeout that the watchdog explains, not in wrong numbers.
        tag = (self._number % 2**15) << 15 | zlib.crc32(fingerprint.encode()) % 2**15
        work = Work(self, entry, fingerprint, body(tensor, Call(entry, average, tag), *args))
        if not async_op:
            work.wait()
        return work

    def _message(self, op: str, tensor: torch.Tensor, peer: int, purpose: str, async_op: bool) -> Work:
        """A single send or receive; numbered by pair, since the other ranks take no part."""
        if self._broken:
            raise CollectiveError(f"this communicator is unusable after an earlier failure: {self._broken}")
        count = self._pairs[op, peer] = self._pairs.get((op, peer), 0) + 1
        fingerprint = f"message {count} ({tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')})"
        tag = 2**30 | (count % 2**15) << 15 | zlib.crc32(fingerprint.encode()) % 2**15
        wire = bytes_of(tensor) if op == "send" else 0
        entry = Entry(
            op,
            purpose,
            self._group_name,
            self.transport,
            bytes_of(tensor),
            wire,
            _call_site(),
            time.perf_counter(),
        )
        self.ledger.entries.append(entry)

        work = Work(
            self,
            entry,
            f"{op} of {fingerprint}, peer rank {peer}",
            message(op, tensor, self.group, peer, tag),
        )
        if not async_op:
            work.wait()
        return work

    def _failure(self, number: int, fingerprint: str, site: str, error: RuntimeError) -> CollectiveError:
        """The error that says which collective failed, where, and what the other ranks were doing."""
        reasons = self._watchdog.explain(number, fingerprint) if self._watchdog else []
        self._broken = f"collective {number}, {fingerprint}, at {site}"
        head = f"rank {self.rank}: collective {number}, {fingerprint}, called at {site}, did not complete"
        if "imed out" in str(error):
            head += f" within {self.timeout:g} s"
        reasons = reasons or ["every rank called it; the connection failed"]
        return CollectiveError("\n  ".join([head + ":", *reasons, f"(below: {str(error).splitlines()[0]})"]))

    def _check_sizes(
        self, op: str, whole_name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor
    ) -> None:
        if whole.numel() != part.numel() * self.world_size or whole.dtype != part.dtype:
            raise ValueError(
                f"{op}: {whole_name} has {whole.numel()} elements of {whole.dtype}, {part_name} {part.numel()} of "
                f"{part.dtype}; with {self.world_size} ranks {whole_name} must have {self.world_size} x "
                f"{part.numel()} = {self.world_size * part.numel()} of the same dtype"
            )

    def _check_rank(self, rank: int, peer: bool = False) -> None:
        if not 0 <= rank < self.world_size or (peer and rank == self.rank):
            raise ValueError(
                f"rank {rank} is not {'another' if peer else 'a'} rank of this group of {self.world_size}"
            )


_instances: dict[str, int] = {}


def _instance_name(group_name: str) -> str:
    """A name of its own for each Communicator of a group; ranks create them in the same order."""
    _instances[group_name] = _instances.get(group_name, 0) + 1
    return f"{group_name}/{_instances[group_name]}"


def _call_site() -> str:
    """``file:line`` of the first frame that is neither this package's nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, _TORCH)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
