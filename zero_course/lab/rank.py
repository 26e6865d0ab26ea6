"""A rank's main program: ``python -m zero_course.lab.rank``, started by :func:`.processes.run_ranks`."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from ..comm import init_distributed
from .processes import connect, wait_for_end_of_line


def main() -> int:
    """Join the others, run the function, send what it returned or how it failed; returns the exit code."""
    line = connect()
    lock = threading.Lock()

    def send(kind: str, value: Any) -> None:
        message = pickle.dumps(
            (kind, value)
        )  # not line.send(), which would share tensors instead of sending them
        with lock:
            line.send_bytes(message)

    try:
        reference, args = pickle.loads(line.recv_bytes())
        wait_for_end_of_line(line)
        fn = find(*reference)
        init_distributed()
        send("result", fn(lambda event: send("event", event), *args))
    except Exception:
        send("error", traceback.format_exc().rstrip())
        return 1
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def find(kind: str, where: str, name: str) -> Callable[..., Any]:
    """The function that a reference of :mod:`.processes` means."""
    if kind == "module":
        module = importlib.import_module(where)
    else:
        spec = importlib.util.spec_from_file_location("lab", where)
        module = importlib.util.module_from_spec(spec)
        sys.modules["lab"] = module  # where dataclasses look for their own module
        spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    sys.exit(main())
