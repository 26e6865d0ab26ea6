"""Measure: the bytes that are really alive, so that no figure of this course rests on a formula alone.

Three measures, each independent of the others:

- :func:`live_bytes` and :func:`live_bytes_by_class` count the storages behind given tensors. A view costs
  nothing and an alias is counted once, so a parameter that lies in a flat bucket is not counted again.
- :func:`live_tensors` asks the garbage collector for every tensor in the process, and so finds what a ledger
  has forgotten.
- :class:`PeakMeter` watches storages being made and freed, activations held by autograd included, and keeps the
  peak and a timeline. :func:`resident_bytes` and :func:`peak_resident_bytes` ask the operating system.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

Span = tuple[str, int, int]  # device, first address, address after the last


def live_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of memory behind ``tensors``, each byte once.

    The whole storage counts even if only a slice of it is given, because the whole of it stays alive. Storages
    are told apart by their addresses; memory that several of them share (views, ``from_numpy`` twice on one
    array) counts once. ``None``, empty and meta tensors are 0 bytes; wrappers (DTensor) count as the tensors in
    them, sparse tensors as their indices and values.
    """
    return live_bytes_by_class({"all": tensors})["all"]


def live_bytes_by_class(classes: Mapping[str, Iterable[torch.Tensor | None]]) -> dict[str, int]:
    """Bytes of each class of tensors; memory that two classes claim belongs to the first.

    Args:
        classes: class name to its tensors, e.g. ``{"parameters": model.parameters(), ...}``.

    Returns:
        class name to bytes; their sum is the bytes of all.
    """
    kept: list[torch.UntypedStorage] = []  # none may die while we count: its address would be used again
    spans: list[Span] = []
    sizes: dict[str, int] = {}
    counted = 0
    for name, tensors in classes.items():
        for tensor in tensors:
            for storage in storages(tensor):
                kept.append(storage)
                spans.append((str(storage.device), storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        total = _union(spans)
        sizes[name] = total - counted
        counted = total
    return sizes


def live_tensors(*, collect: bool = True) -> list[torch.Tensor]:
    """Every tensor that Python can reach in this process, and their ``.grad``.

    Found by walking the garbage collector's objects, so it knows nothing of any ledger:
    ``live_bytes(live_tensors())`` is what an honest ledger must add up to. Activations that only the autograd
    graph holds are C++ objects and do not show here; :class:`PeakMeter` sees them.

    Args:
        collect: collect unreachable cycles first, so that only what is in use is found.
    """
    if collect:
        gc.collect()
    found: dict[int, torch.Tensor] = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor):  # not isinstance: a proxy's __class__ may run code
            found[id(candidate)] = candidate
            if candidate.is_leaf and candidate.grad is not None:
                found[id(candidate.grad)] = candidate.grad
    return list(found.values())


def storages(tensor: torch.Tensor | None) -> Iterator[torch.UntypedStorage]:
    """The storages behind one tensor that hold memory: none, one, or several for wrappers and sparse tensors."""
    if tensor is None:
        return
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from storages(tensor._indices())
        yield from storages(tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield from storages(part)
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            yield from storages(part)
    elif tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        if storage.device.type != "meta" and storage.nbytes() > 0:
            yield storage


def _union(spans: list[Span]) -> int:
    """Bytes covered by the spans, each byte once."""
    total = 0
    device, end = "", 0
    for next_device, start, stop in sorted(spans):
        if next_device != device:
            device, end = next_device, start
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


class PeakMeter(TorchDispatchMode):
    """Bytes of storages made while the ``with`` block runs: now, at the peak, and over time.

        with PeakMeter() as meter:
            loss = model(x).sum()
            loss.backward()
        print(meter.peak, meter.current)

    Every operation's result is looked at; a storage seen for the first time is added, and taken away at the
    moment it is freed (a weak reference on it says so). So the sums are exact for what torch's operations
    return, activations and gradients in backward included. Not seen: scratch space inside an operation, what
    other threads do, the inside of a compiled graph. It slows operations down; do not time inside it.

    Args:
        alive: tensors that exist already and are to be counted too, e.g. ``model.parameters()``; their release
            shows as well.

    Attributes:
        current: bytes of counted storages alive now (also after the block).
        peak: the most that ``current`` was within the block.
        timeline: (seconds since the block began, bytes) after each change, for plots.
    """

    def __init__(self, alive: Iterable[torch.Tensor | None] = ()) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.timeline: list[tuple[float, int]] = []
        self._sizes: dict[int, int] = {}  # StorageImpl address to bytes counted
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lock = threading.RLock()  # a storage may be freed by another thread
        self._started = time.perf_counter()
        self._active = False
        for tensor in alive:
            for storage in storages(tensor):
                self._count(storage)
        self.peak = self.current

    def __enter__(self) -> PeakMeter:
        self._started = time.perf_counter()
        self._active = True
        self.timeline.append((0.0, self.current))
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._watched_resize()  # not an operation, so the mode would miss it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize
        self._active = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then count the storages that it made."""
        kwargs = kwargs or {}
        known = {storage._cdata for leaf in tree_leaves((args, kwargs)) for storage in _storages_of(leaf)}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            for storage in _storages_of(leaf):
                # An input's storage is older than this block, unless it is counted: then it may have grown.
                if storage._cdata not in known or storage._cdata in self._sizes:
                    self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key not in self._sizes:
                self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._change(size - self._sizes.get(key, 0))
            self._sizes[key] = size

    def _forget(self, key: int) -> None:
        with self._lock:
            del self._references[key]
            self._change(-self._sizes.pop(key))

    def _change(self, difference: int) -> None:
        self.current += difference
        if self._active and difference:
            self.peak = max(self.peak, self.current)
            self.timeline.append((time.perf_counter() - self._started, self.current))

    def _watched_resize(self) -> Any:
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = original(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage)
            return result

        return resize_


def _storages_of(leaf: Any) -> Iterator[torch.UntypedStorage]:
    return storages(leaf) if isinstance(leaf, torch.Tensor) else iter(())


def resident_bytes() -> int | None:
    """Bytes of this process in RAM, as the kernel counts pages (VmRSS); None where /proc does not tell."""
    return _from_proc_status("VmRSS")


def peak_resident_bytes(*, reset: bool = False) -> int | None:
    """The most that :func:`resident_bytes` was since the process began or the last reset (VmHWM).

    Args:
        reset: begin a new peak after reading, at what is resident now.

    Returns:
        bytes; None where /proc does not tell.

    Raises:
        OSError: the kernel forbids the reset; a peak that includes earlier work would be read next.
    """
    peak = _from_proc_status("VmHWM")
    if reset and peak is not None:
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError as error:
            raise OSError(
                f"cannot reset the peak resident size (/proc/self/clear_refs: {error}); "
                "measure in a fresh process instead"
            ) from error
    return peak


def device_bytes(device: torch.device | int | None = None) -> int | None:
    """Bytes that torch's CUDA allocator has handed out on ``device``; None without a GPU."""
    return torch.cuda.memory_allocated(device) if torch.cuda.is_available() else None


def peak_device_bytes(device: torch.device | int | None = None, *, reset: bool = False) -> int | None:
    """The most that :func:`device_bytes` was since the last reset; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    peak = torch.cuda.max_memory_allocated(device)
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return peak


def _from_proc_status(field: str) -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024  # the kernel's "kB" are 1024 bytes
    except OSError:
        pass
    return None
