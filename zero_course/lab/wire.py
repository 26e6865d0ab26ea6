"""What really went over the wire: the kernel's own counters, in a network of our own.

Ranks on one host talk over the loopback interface, which everybody on the host uses. In a network namespace of their
own they have a loopback to themselves, and its counters (/proc/net/dev) are a witness that knows no ledger and no
formula. A counter sees headers too: TCP/IP adds about 52 bytes to a segment of up to 64 KiB on the loopback, and as
much for each acknowledgement, so for large messages it reads a little above the payload, within 1 %.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

INSIDE = (
    "ZERO_COURSE_OWN_NETWORK"  # set in the environment once inside; holds a reason if it was not possible
)
LOOPBACK = "lo"
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP


def enter_own_network() -> None:
    """Start this program anew (same process, same arguments) in a network namespace of its own, where permitted.

    Call it first thing in a script. Returns at once when inside already, or when it is not possible; why not is
    then what :func:`reason_outside` says.
    """
    if INSIDE in os.environ:
        return
    os.environ[INSIDE] = reason = ""
    if not sys.platform.startswith("linux"):
        reason = "network namespaces are Linux's"
    elif shutil.which("unshare") is None:
        reason = "the command unshare (util-linux) was not found"
    else:
        for options in (["--net"], ["--net", "--map-root-user"]):  # as root, else as root of a user namespace
            probe = subprocess.run(["unshare", *options, "true"], capture_output=True, text=True)
            if probe.returncode == 0:
                os.environ[INSIDE] = "yes"
                # c10d would warn that it cannot look up names, which it does not need
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
                os.execvp("unshare", ["unshare", *options, sys.executable, *sys.argv])
            reason = probe.stderr.strip() or f"unshare ended with status {probe.returncode}"
    os.environ[INSIDE] = f"no: {reason}"


def reason_outside() -> str | None:
    """Why the counters cannot be used; None when this process is in a network of its own."""
    state = os.environ.get(INSIDE, "no: enter_own_network() was not called")
    return None if state == "yes" else f"no own network namespace ({state.removeprefix('no: ')})"


def bring_loopback_up() -> None:
    """A new namespace has its loopback down; needs to be done once inside."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sH14x", LOOPBACK.encode(), 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(handle, _GET_FLAGS, request))[1]
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("16sH14x", LOOPBACK.encode(), flags | _UP))


def loopback_bytes() -> int:
    """Bytes that the loopback interface of this process's network has sent, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == LOOPBACK:
            return int(counters.split()[8])  # the first 8 columns are of what was received
    raise OSError(f"/proc/net/dev has no interface {LOOPBACK}")
