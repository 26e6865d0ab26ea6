"""The rank pool itself: results in rank order, failures named, hangs ended, processes reused and replaced."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, fresh_ranks, run_ranks


def _identity(tag: str) -> tuple[str, int, int]:
    return tag, int(os.environ["RANK"]), os.getpid()


def _all_sum(length: int) -> torch.Tensor:
    x = torch.full((length,), float(os.environ["RANK"]))
    dist.all_reduce(x)
    return x


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def _raise_on(culprit: int) -> None:
    if int(os.environ["RANK"]) == culprit:
        raise ValueError(f"wrong bucket on rank {culprit}")
    time.sleep(60)


class _Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} is not {second}")


def _raise_unpicklable() -> None:
    raise _Unpicklable(1, 2)


def _sleep_on(culprit: int, seconds: float) -> None:
    if int(os.environ["RANK"]) == culprit:
        time.sleep(seconds)


def _die_on(culprit: int, how: int) -> str:
    if int(os.environ["RANK"]) == culprit:
        print("last words", flush=True)
        os.kill(os.getpid(), how)
    return "alive"


def _random() -> float:
    return torch.rand(()).item()


def _environment_value(name: str) -> str | None:
    return os.environ.get(name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order(world_size: int) -> None:
    results = run_ranks(world_size, _identity, "a")
    assert [rank for _, rank, _ in results] == list(range(world_size))
    assert len({pid for _, _, pid in results}) == world_size
    assert os.getpid() not in {pid for _, _, pid in results}


def test_processes_are_reused() -> None:
    assert run_ranks(2, _identity, "a") == run_ranks(2, _identity, "a")


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_have_joined_one_group(world_size: int) -> None:
    for x in run_ranks(world_size, _all_sum, 4):
        assert x.tolist() == [sum(range(world_size))] * 4


def test_keyword_arguments_by_partial() -> None:
    for x in run_ranks(2, functools.partial(_scaled, factor=3.0), torch.ones(2)):
        assert x.tolist() == [3.0, 3.0]


def test_seed_is_repeatable_and_differs_between_ranks() -> None:
    first, second = run_ranks(2, _random), run_ranks(2, _random)
    assert first == second
    assert first[0] != first[1]


def test_exception_keeps_its_type_and_names_the_rank() -> None:
    before = run_ranks(2, _identity, "a")
    started = time.monotonic()
    with pytest.raises(ValueError, match="wrong bucket on rank 1") as caught:
        run_ranks(2, _raise_on, 1)
    assert time.monotonic() - started < 20, "the other rank was waited for"
    cause = str(caught.value.__cause__)
    assert "rank 1 of 2 failed in _raise_on" in cause
    assert 'raise ValueError(f"wrong bucket' in cause
    assert "rank 0 of 2 was still busy" in cause
    assert "time.sleep" in cause or "_raise_on" in cause.split("rank 0 wrote")[1]
    after = run_ranks(2, _identity, "a")
    assert {pid for _, _, pid in before}.isdisjoint({pid for _, _, pid in after})


def test_exception_that_cannot_be_pickled_keeps_its_text() -> None:
    with pytest.raises(RankFailure, match="1 is not 2"):
        run_ranks(2, _raise_unpicklable)


def test_hang_ends_in_an_error_with_the_stack() -> None:
    with pytest.raises(RankFailure, match="no answer from rank 1 of 2 in _sleep_on within 2 s") as caught:
        run_ranks(2, _sleep_on, 1, 100.0, timeout=2.0)
    assert "in _sleep_on" in str(caught.value).split("rank 1 wrote")[1]
    assert run_ranks(2, _identity, "again")[1][:2] == ("again", 1)


def test_death_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2 was ended by SIGKILL in _die_on") as caught:
        run_ranks(2, _die_on, 0, signal.SIGKILL)
    assert "last words" in str(caught.value)


def test_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="move it to module level"):
        run_ranks(2, lambda: 1)


def test_fresh_ranks_report_every_ending() -> None:
    killed, alive = fresh_ranks(2, _die_on, 0, signal.SIGKILL)
    assert (killed.signal, killed.exit_code, killed.ok) == ("SIGKILL", -9, False)
    assert "last words" in killed.output
    assert (alive.result, alive.exit_code, alive.ok, alive.hung) == ("alive", 0, True, False)

    fine, failed = fresh_ranks(2, _raise_on_and_return, 1)
    assert fine.ok
    assert failed.error == "ValueError: wrong bucket on rank 1"
    assert failed.exit_code == 1
    assert "_raise_on" in failed.traceback


def _raise_on_and_return(culprit: int) -> None:
    if int(os.environ["RANK"]) == culprit:
        _raise_on(culprit)


def test_fresh_ranks_end_a_hang() -> None:
    awake, asleep = fresh_ranks(2, _sleep_on, 1, 100.0, timeout=3.0, init=False)
    assert awake.ok
    assert asleep.hung
    assert not asleep.ok
    assert "in _sleep_on" in asleep.output
    assert 3.0 <= asleep.seconds < 20.0


def test_fresh_ranks_take_an_environment() -> None:
    outcomes = fresh_ranks(
        1, _environment_value, "ZERO_COURSE_TIMEOUT", env={"ZERO_COURSE_TIMEOUT": "5"}, init=False
    )
    assert outcomes[0].result == "5"


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="looks for processes in /proc, which only Linux has"
)
def test_ranks_end_when_their_session_is_killed() -> None:
    """Even in the middle of a task, as when a test hangs and its pytest is killed."""
    program = (
        "import os, threading, time, ranks, test_ranks\n"
        "print(*[pid for _, _, pid in ranks.run_ranks(2, test_ranks._identity, 'a')], flush=True)\n"
        "ranks.run_ranks(2, test_ranks._sleep_on, 1, 300.0, timeout=300)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    session = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    pids = [int(pid) for pid in session.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)
    assert all(_runs(pid) for pid in pids)
    session.kill()
    session.wait()
    session.stdout.close()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
