"""The command line: estimate and report by their output, launch by what its processes really do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from zero_course.cli import app, remote
from zero_course.cli.hosts import LaunchError, limit, parse_filter, read_hostfile, select
from zero_course.cli.job import free_port, route_to
from zero_course.cli.report import gather

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = [sys.executable, "-m", "zero_course.cli", "launch"]
TIMEOUT = 90  # seconds for a launch on a busy machine


def run(*arguments: str):
    """Run the program inside this process."""
    return CliRunner().invoke(app, list(arguments))


def environment(**variables: str) -> dict[str, str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**clean, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **variables}


def launched(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``zero-course launch`` as a program of its own, to its end."""
    command = [*LAUNCH, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=TIMEOUT
    )


class Running:
    """A launch in the background, the leader of a process group as it would be under a terminal."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        self.process = subprocess.Popen(
            [*LAUNCH, *arguments],
            cwd=cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(
            target=lambda: self.lines.extend(iter(self.process.stdout.readline, "")), daemon=True
        )
        self.reader.start()

    def wait_for(self, text: str, times: int = 1) -> list[str]:
        deadline = time.monotonic() + TIMEOUT
        while len(found := [line for line in self.lines if text in line]) < times:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.lines}"
            assert self.process.poll() is None or self.reader.is_alive(), self.lines
            time.sleep(0.05)
        return found

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(timeout=TIMEOUT)
        self.reader.join(timeout=TIMEOUT)
        return code, "".join(self.lines)


@contextlib.contextmanager
def running(*arguments: str, cwd: Path) -> Iterator[Running]:
    job = Running(*arguments, cwd=cwd)
    try:
        yield job
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(job.process.pid).children(recursive=True):
                process.kill()
        job.process.kill()
        for pid in pids([line for line in job.lines if "up rank" in line]):
            if not _zombie(pid):  # a test of "nothing is left" failed; leave nothing all the same
                os.kill(pid, signal.SIGKILL)


def pids(lines: list[str]) -> list[int]:
    return [int(line.split("pid=")[1].split()[0]) for line in lines]


def assert_all_gone(processes: list[int], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in processes if psutil.pid_exists(pid) and not _zombie(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)


def _zombie(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


SUM = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1 << 18,), float(dist.get_rank() + 1))
dist.all_reduce(x)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")
found = {"sum": x[-1].item(), "argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
sys.stdout.write("FOUND " + json.dumps(found) + "\\n")
dist.barrier()
dist.destroy_process_group()
"""

WAIT = """
import os, sys, time
sys.stdout.write(f"up rank={os.environ['RANK']} pid={os.getpid()} parent={os.getppid()}\\n")
sys.stdout.flush()
if os.environ["RANK"] == "1":
    code = {"exit": 7, "kill": 0}.get(sys.argv[1] if len(sys.argv) > 1 else "", None)
    if code:
        sys.exit(code)
    if code == 0:
        os.kill(os.getpid(), 9)
time.sleep(1000)
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "sum.py").write_text(SUM)
    (tmp_path / "wait.py").write_text(WAIT)
    return tmp_path


def found(output: str) -> list[dict]:
    results = [json.loads(line.split("FOUND ")[1]) for line in output.splitlines() if "FOUND " in line]
    return sorted(results, key=lambda result: int(result["RANK"]))


# ---------------------------------------------------------------------------------------------- the program


def test_help_and_version():
    assert run("--version").output.startswith("zero-course 0.")
    output = run("--help").output
    for command in ("estimate", "launch", "report"):
        assert command in output
        assert "zero-course " + command in run(command, "-h").output  # an example of each


def test_the_command_line_itself_does_not_import_torch():
    code = "import sys, zero_course.cli; print(sorted(m for m in sys.modules if m == 'torch'))"
    # A package whose public face is imported eagerly would hide what this test is about: the commands' files.
    blocked = "import sys, types; p = types.ModuleType('zero_course'); p.__path__ = [sys.argv[1]]; "
    blocked += "p.__version__ = '0'; sys.modules['zero_course'] = p; "
    result = subprocess.run(
        [sys.executable, "-c", blocked + code, str(ROOT / "zero_course")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


# ---------------------------------------------------------------------------------------------- estimate


def test_estimate_prints_a_table_and_the_advice():
    result = run("estimate", "--params", "7e9", "--gpus", "8", "--gpu-memory", "40GB")
    assert result.exit_code == 0
    assert "7B parameters on 8 GPUs of 40.00 GB" in result.output
    assert re.search(r"\* ZeRO-2 .*31\.21", result.output)
    assert "DP does not fit (GPU 78.96 GB short)" in result.output
    assert "K = 12" in result.output


def test_estimate_speaks_json():
    options = ("--params", "13B", "--gpus", "8", "--gpu_memory", "40GB", "--cpu-memory", "1TiB", "--json")
    data = json.loads(run("estimate", *options).output)
    assert data["recommended"] == "ZeRO-3 + optimizer on CPU"
    assert data["cpu_memory"] == 2**40
    assert len(data["strategies"]) == 10
    first = data["strategies"][0]
    assert first["gpu_bytes"] == sum(first["gpu"].values()) > 16 * 13 * 10**9
    assert data["preset"]["name"] == "zero-paper"
    shown = json.loads(run("estimate", *options, "--stage", "2").output)["strategies"]
    assert [strategy["name"] for strategy in shown] == ["ZeRO-2", "ZeRO-2 + optimizer on CPU"]


def test_estimate_takes_a_shape_and_buckets():
    options = ("--params", "100M", "--json", "--layers", "12", "--hidden", "768", "--vocabulary", "256")
    small = json.loads(run("estimate", *options, "--reduce-bucket-size", "4M", "--tokens", "1").output)
    zero2 = small["strategies"][2]["gpu"]
    assert zero2["communication_buffers"] == 2 * 2 * 4 * 10**6
    assert zero2["activations"] == 12 * 2 * 768 + 34 * 768 + 256 * 6
    large = json.loads(run("estimate", *options).output)
    assert "ZeRO-2 takes" in large["notes"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--params", "7GB"], "unknown unit 'GB'"),
        (["--params", "7B", "--gpu-memory", "40G"], "may mean two sizes"),
        (["--params", "7B", "--preset", "zero"], "preset 'zero' is not known"),
        (["--params", "7B", "--layers", "3"], "--layers and --hidden go together"),
        (["--params", "7B", "--layers", "3", "--hidden", "8", "--activations", "1GB"], "one or the other"),
        (["--params", "0"], "parameters must be at least 1"),
        ([], "--params"),
    ],
)
def test_estimate_refuses(options, message):
    result = run("estimate", *options)
    assert result.exit_code == 2
    assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


# ---------------------------------------------------------------------------------------------- report


def test_report_tells_what_is_here():
    facts = gather()
    assert json.loads(run("report", "--json").output).keys() == facts.keys()
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["cpu"]["cores"] >= 1
    assert facts["backends"]["gloo"] is True
    assert (facts["compilers"]["gcc"] is None) == (shutil.which("gcc") is None)
    checks = {check["what"]: check for check in facts["checks"]}
    assert checks["ranks as processes on the CPU, over gloo"]["status"] == "runs"
    on_gpus = checks["ranks on GPUs, over NCCL"]
    if not torch.cuda.is_available():
        assert on_gpus["status"] == "NOT RUN"
        assert on_gpus["why"]
    assert all(check["why"] for check in facts["checks"] if check["status"] != "runs")
    measured = facts["cpu"]["matmul_seconds"]
    slow = measured["bfloat16"] >= 4 * measured["float32"]
    assert checks["bf16 matrix products on the CPU"]["status"] == ("slow" if slow else "runs")


def test_report_prints_it_all():
    result = run("report")
    assert result.exit_code == 0
    for text in (
        "Versions",
        "Devices",
        "Backends",
        "Compilers",
        "What runs here",
        torch.__version__,
        "shared memory",
    ):
        assert text in result.output


# ---------------------------------------------------------------------------------------------- hosts


def test_host_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two hosts\n\nworker-0 slots=4   # the big one\n  worker-1\tslots = 2\n")
    assert read_hostfile(path) == {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb 4\n", "line 2: expected 'host slots=N', found 'b 4'"),
        ("a slots=2\n\n# x\na slots=1\n", "line 4: a is there already, in line 1"),
        ("a slots=0\n", "line 1: a has no slots"),
        ("a slots=2 b slots=2\n", "line 1: expected"),
        ("# nothing\n", "names no host"),
    ],
)
def test_a_bad_host_file_is_named_by_line(tmp_path, text, message):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(LaunchError, match=re.escape(message)):
        read_hostfile(path)


def test_a_missing_host_file():
    with pytest.raises(LaunchError, match="'/nowhere/hosts': No such file"):
        read_hostfile("/nowhere/hosts")


def test_include_and_exclude_as_deepspeed_documents_them():
    pool = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}
    assert select(pool, include="worker-0@worker-1:0,2") == {"worker-0": [0, 1, 2, 3], "worker-1": [0, 2]}
    assert select(pool, exclude="worker-1:0") == {"worker-0": [0, 1, 2, 3], "worker-1": [1, 2, 3]}
    assert select(pool, exclude="worker-1") == {"worker-0": [0, 1, 2, 3]}
    assert select(pool, include="worker-1:3@worker-1:1") == {"worker-1": [1, 3]}
    assert select(pool) == pool
    assert limit(pool, 1, 2) == {"worker-0": [0, 1]}


HOSTS = st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, max_size=4, unique=True)


@st.composite
def pools_and_filters(draw):
    pool = {host: list(range(draw(st.integers(1, 5)))) for host in draw(HOSTS)}
    chosen = {
        host: draw(st.one_of(st.none(), st.sets(st.sampled_from(slots), min_size=1)))
        for host, slots in pool.items()
        if draw(st.booleans())
    }
    specs = []
    for host, slots in chosen.items():
        if slots is not None and draw(st.booleans()):
            specs += [f"{host}:{slot}" for slot in slots]  # one by one
        else:
            specs.append(host if slots is None else f"{host}:{','.join(map(str, slots))}")
    return pool, "@".join(draw(st.permutations(specs)))


@given(pools_and_filters())
def test_include_and_exclude_divide_the_pool(case):
    pool, text = case
    if not text:
        assert select(pool, include=text) == select(pool, exclude=text) == pool
        return
    included = select(pool, include=text)
    if included == pool:
        with pytest.raises(LaunchError, match="leaves no slot"):
            select(pool, exclude=text)
        excluded = {}
    else:
        excluded = select(pool, exclude=text)
    for host, slots in pool.items():
        assert sorted(included.get(host, []) + excluded.get(host, [])) == slots
    assert list(included) == [host for host in pool if host in included]  # in the order of the pool
    for host, slots in parse_filter(text).items():
        assert included[host] == (pool[host] if slots is None else slots)


@given(
    st.dictionaries(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), st.integers(1, 64), min_size=1)
)
def test_a_host_file_says_what_was_written(tmp_path_factory, pool):
    path = tmp_path_factory.mktemp("hosts") / "hosts"
    path.write_text("".join(f"{host} slots={slots} # {slots}\n\n" for host, slots in pool.items()))
    assert read_hostfile(path) == {host: list(range(slots)) for host, slots in pool.items()}


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "cannot be combined"),
        ("c", "", "'c' is not one of a, b"),
        ("a:7", "", "a has slots 0 to 1, not 7"),
        ("a:x", "", "'a:x' is not host or host:slot,slot"),
        ("a@@b", "", "'' is not host"),
        ("a:0,", "", "'a:0,' is not"),
        ("", "a@b", "leaves no slot"),
    ],
)
def test_a_bad_filter_is_refused(include, exclude, message):
    with pytest.raises(LaunchError, match=re.escape(message)):
        select({"a": [0, 1], "b": [0]}, include, exclude)


@pytest.mark.parametrize(
    ("nodes", "gpus", "message"), [(3, None, "there are 2 hosts"), (None, 2, "b has 1 slots")]
)
def test_more_than_there_is(nodes, gpus, message):
    with pytest.raises(LaunchError, match=message):
        limit({"a": [0, 1], "b": [0]}, nodes, gpus)


# ---------------------------------------------------------------------------------------------- launch: the commands


def dry_run(*arguments: str) -> list[list[str]]:
    result = run("launch", "--dry_run", *arguments)
    assert result.exit_code == 0, result.output
    return [shlex.split(line) for line in result.output.splitlines()]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_one_host_is_torchrun_on_a_free_port(no_gpu):
    (command,) = dry_run("--num_gpus", "3", "train.py", "--num_gpus", "9", "--", "-i", "a b")
    assert command[0] == "OMP_NUM_THREADS=1"
    assert command[2:4] == ["-m", "torch.distributed.run"]
    assert "--standalone" in command
    assert command[command.index("--nproc-per-node") + 1] == "3"
    assert command[command.index("train.py") :] == ["train.py", "--num_gpus", "9", "--", "-i", "a b"]


def test_ranks_by_default(no_gpu):
    (command,) = dry_run("train.py")
    assert command[command.index("--nproc-per-node") + 1] == "2"


def test_either_spelling_of_an_option(no_gpu):
    underscores = dry_run("--num_gpus", "1", "--master_port", "29501", "--max_restarts", "3", "x.py")
    assert underscores == dry_run("--num-gpus", "1", "--master-port", "29501", "--max-restarts", "3", "x.py")
    assert dry_run("--num_accelerators", "1", "x.py", "--a_b", "--a-b")[0][-2:] == ["--a_b", "--a-b"]


def test_a_host_started_by_hand(no_gpu):
    options = ("--num_nodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1", "--num_gpus", "2")
    (command,) = dry_run(*options, "train.py")
    text = shlex.join(command)
    assert "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500" in text
    (command,) = dry_run(*options, "--max_restarts", "1", "train.py")
    assert "--rdzv-backend c10d" in shlex.join(command)
    assert "is_host=False" in command


def test_gpus_set_the_default_and_the_limit(four_gpus, monkeypatch):
    (command,) = dry_run("train.py")
    assert command[command.index("--nproc-per-node") + 1] == "4"
    result = run("launch", "--num_gpus", "5", "train.py")
    assert result.exit_code == 2
    assert "5 ranks, but 4 GPUs are visible" in result.output
    (command,) = dry_run("-i", "localhost:1,3", "train.py")
    assert "CUDA_VISIBLE_DEVICES=1,3" in command
    assert command[command.index("--nproc-per-node") + 1] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")  # slots count what is visible
    (command,) = dry_run("-e", "localhost:0", "train.py")
    assert "CUDA_VISIBLE_DEVICES=5,3,1" in command


def test_a_command_for_each_host(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "not to be passed on")
    options = ("--hostfile", "hosts", "-i", "a@b:1,3", "--master_port", "29511", "--max_restarts", "2", "-m")
    first, second = dry_run(*options, "train", "--x", "it's")
    assert first[:-2] == shlex.split(remote.SSH)
    assert (first[-2], second[-2]) == ("a", "b")
    words = shlex.split(second[-1])
    assert words[:2] == ["cd", str(tmp_path)]
    assert "NCCL_DEBUG=INFO" in words
    assert "CUDA_VISIBLE_DEVICES=1,3" in words
    assert "CUDA_VISIBLE_DEVICES" not in first[-1]
    assert "SECRET" not in second[-1]
    assert words[words.index("launch") + 1 :] == shlex.split(
        "--num_nodes 2 --node_rank 1 --num_gpus 2 --master_addr a --master_port 29511 --max_restarts 2 --module "
        'train --x "it\'s"'
    )
    (first, _) = dry_run(
        "--hostfile", "hosts", "--num_gpus", "1", "--ssh", "kubectl exec -i {host} -- sh -c", "x.py"
    )
    assert first[:-1] == ["kubectl", "exec", "-i", "a", "--", "sh", "-c"]
    (only,) = dry_run("--hostfile", "hosts", "--num_nodes", "1", "--ssh", "ssh -p 2222", "x.py")
    assert only[:-1] == ["ssh", "-p", "2222", "a"]


def test_this_host_needs_no_ssh(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("localhost slots=2\n")
    (command,) = dry_run("--hostfile", str(path), "x.py")
    assert command[:2] == ["sh", "-c"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.py"], "no script 'nowhere.py' in"),
        (["--module", "no_such_module"], "no module 'no_such_module'"),
        (["--num_nodes", "2", "x.py"], "needs a --hostfile"),
        (["--num_nodes", "2", "--node_rank", "2", "--master_addr", "a", "x.py"], "not below --num_nodes 2"),
        (["-i", "localhost:0", "--num_gpus", "1", "x.py"], "leave out --num_nodes and --num_gpus"),
        (["-i", "elsewhere", "x.py"], "'elsewhere' is not one of localhost"),
        (["--hostfile", "HOSTS", "--node_rank", "0", "x.py"], "hosts are numbered as in it"),
        (["--hostfile", "HOSTS", "x.py"], "which every host takes for itself"),
        (["--hostfile", "HOSTS", "--ssh", "", "--master_addr", "a", "x.py"], "--ssh is empty"),
        (["--hostfile", "HOSTS", "--ssh", "'", "--master_addr", "a", "x.py"], "No closing quotation"),
        (
            ["--hostfile", "HOSTS", "--ssh", "/nowhere/ssh", "--master_addr", "a", "x.py"],
            "cannot start '/nowhere/ssh'",
        ),
        (["--num_gpu", "1", "x.py"], "No such option: --num_gpu"),
        (["--num_gpus", "0", "x.py"], "num_gpus"),
    ],
)
def test_what_cannot_be_launched(tmp_path, no_gpu, options, message):
    (tmp_path / "hosts").write_text("localhost slots=1\nb slots=1\n")
    result = run("launch", *(str(tmp_path / "hosts") if option == "HOSTS" else option for option in options))
    assert result.exit_code == 2
    assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


def test_free_ports_are_free():
    import socket

    with socket.socket() as taken:
        port = free_port()
        taken.bind(("", port))
        assert 20000 <= port < 30000
    assert route_to("127.0.0.1")[0] == "127.0.0.1"
    assert route_to("no.such.host.invalid") == (None, None)


# ---------------------------------------------------------------------------------------------- launch: the processes


def test_two_launches_at_once_do_not_clash_and_arguments_arrive(scripts):
    # Among the arguments are options of the launcher's own, and --sig, which torchrun would take for one of its.
    arguments = ["--num_gpus", "5", "--", "-i", "a b", "", "--sig", "-h"]
    with running("sum.py", *arguments, cwd=scripts) as first:
        second = launched("--num_gpus", "3", "sum.py", cwd=scripts, OMP_NUM_THREADS="2")
        code, output = first.end()
    assert code == 0, output
    results = found(output)
    assert [result["sum"] for result in results] == [3.0, 3.0]
    assert [result["argv"] for result in results] == [arguments, arguments]
    assert [result["LOCAL_RANK"] for result in results] == ["0", "1"]
    assert {result["OMP_NUM_THREADS"] for result in results} == {"1"}
    assert "2 ranks on the CPU (no GPU; --num_gpus sets how many), OMP_NUM_THREADS=1" in output
    assert second.returncode == 0, second.stderr
    others = found(second.stdout)
    assert [result["sum"] for result in others] == [6.0, 6.0, 6.0]
    assert {result["OMP_NUM_THREADS"] for result in others} == {"2"}  # what the user set stays
    assert {r["MASTER_PORT"] for r in results} != {r["MASTER_PORT"] for r in others}


def test_a_failing_rank_is_named_and_its_exit_code_passed_on(scripts):
    with running("wait.py", "kill", cwd=scripts) as killed:
        failed = launched("wait.py", "exit", cwd=scripts)
        code, output = killed.end()
    assert failed.returncode == 7
    assert re.search(r"rank 1 failed: exit code 7 \(local rank 1, pid \d+", failed.stderr)
    assert "rank 0 failed" not in failed.stderr
    assert "Traceback" not in failed.stderr
    assert code == 128 + 9
    assert "rank 1 failed: killed by SIGKILL (out of memory?)" in output
    assert "rank 0 failed" not in output
    assert_all_gone(pids([line for line in failed.stdout.splitlines() if line.startswith("up")]))


def test_ctrl_c_leaves_nothing_and_prints_no_traceback(scripts):
    with running("wait.py", cwd=scripts) as job:
        ranks = pids(job.wait_for("up rank", times=2))
        job.press_ctrl_c()
        code, output = job.end()
    assert code == 130
    assert "SIGINT: all ranks ended" in output
    assert "Traceback" not in output
    assert "frame #" not in output
    assert_all_gone(ranks)


def test_ranks_that_ignore_sigterm_end_at_the_second_ctrl_c(scripts):
    (scripts / "stubborn.py").write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    )
    with running("stubborn.py", cwd=scripts) as job:
        ranks = pids(job.wait_for("up rank", times=2))
        job.press_ctrl_c()
        time.sleep(0.5)
        job.press_ctrl_c()
        code, output = job.end()
    assert code == 130
    assert "second signal: killing all ranks" in output
    assert_all_gone(ranks)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NOT RUN: PR_SET_PDEATHSIG is Linux's")
def test_killing_the_launcher_kills_the_ranks(scripts):
    with running("wait.py", cwd=scripts) as job:
        ranks = pids(job.wait_for("up rank", times=2))
        job.process.kill()
        assert_all_gone(ranks)
        job.end()


def test_ctrl_c_while_waiting_for_a_host_that_never_comes(scripts):
    port = str(free_port())
    options = ("--num_nodes", "2", "--node_rank", "1", "--master_addr", "127.0.0.1", "--master_port", port)
    with running(*options, "wait.py", cwd=scripts) as job:
        job.wait_for("host 1 of 2: 2 ranks")
        time.sleep(1)
        job.press_ctrl_c()
        started = time.monotonic()
        code, output = job.end()
    assert code == 130
    assert time.monotonic() - started < 20
    assert "Traceback" not in output


def test_a_taken_port_is_said_to_be_taken(scripts):
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = launched("--num_gpus", "1", "--master_port", port, "wait.py", cwd=scripts)
    assert result.returncode == 1
    assert f"port {port} is in use on this host" in result.stderr


def test_a_restart_begins_anew(scripts):
    (scripts / "twice.py").write_text(
        SUM + "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(5)\n"
    )
    result = launched("--max_restarts", "1", "twice.py", cwd=scripts)
    assert result.returncode == 0, result.stderr
    assert [r["sum"] for r in found(result.stdout)] == [3.0] * 4


# ---------------------------------------------------------------------------------------------- launch: several hosts


@pytest.fixture
def fake_hosts(scripts: Path) -> list[str]:
    """Options for two "hosts" that are both this one: an ssh that drops the host's name."""
    ssh = scripts / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    (scripts / "hosts").write_text("a slots=1\nb slots=2\n")
    return ["--hostfile", "hosts", "--ssh", str(ssh), "--master_addr", "127.0.0.1"]


def test_two_hosts_meet(scripts, fake_hosts):
    result = launched(*fake_hosts, "sum.py", "it's", "$HOME", cwd=scripts)
    assert result.returncode == 0, result.stderr
    results = found(result.stdout)
    assert [r["sum"] for r in results] == [6.0] * 3
    assert [r["LOCAL_RANK"] for r in results] == ["0", "0", "1"]
    assert results[2]["argv"] == ["it's", "$HOME"]
    hosts = [line.split(":")[0] for line in result.stdout.splitlines() if "FOUND" in line]
    assert sorted(hosts) == ["a", "b", "b"]
    assert "2 hosts (a, b), meeting at 127.0.0.1:" in result.stderr


def test_a_failing_host_ends_the_other(scripts, fake_hosts):
    with running(*fake_hosts, "wait.py", "exit", cwd=scripts) as job:
        ranks = pids(job.wait_for("up rank", times=3))
        code, output = job.end()
    assert code == 7
    assert "b: zero-course launch: rank 1 failed: exit code 7" in output
    assert "host b failed with exit code 7; ending the others" in output
    assert_all_gone(ranks)


def test_ctrl_c_ends_all_hosts(scripts, fake_hosts):
    with running(*fake_hosts, "wait.py", cwd=scripts) as job:
        ranks = pids(job.wait_for("up rank", times=3))
        job.press_ctrl_c()
        code, output = job.end()
    assert code == 130
    assert "SIGINT: all hosts ended" in output
    assert "Traceback" not in output
    assert_all_gone(ranks)


def test_a_lost_connection_ends_the_hosts(scripts, fake_hosts):
    with running(*fake_hosts, "wait.py", cwd=scripts) as job:
        ranks = pids(job.wait_for("up rank", times=3))
        job.process.kill()  # as if this machine had gone: nobody is left to say anything
        assert_all_gone(ranks)
        job.end()


def _own_networks() -> str | None:
    """Why this machine does not let us make network namespaces; None if it does."""
    if shutil.which("ip") is None:
        return "no ip command"
    name = f"zc-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return made.stderr.strip() or "ip netns add failed"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@pytest.fixture
def two_networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable: hosts as far as the network can tell."""
    refused = _own_networks()
    if refused:
        pytest.skip(f"NOT RUN: network namespaces: {refused}")
    names = (f"zc-{os.getpid()}-a", f"zc-{os.getpid()}-b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def sent(network: str) -> int:
    """Bytes that left a network namespace by its cable, as the kernel counts them."""
    lines = subprocess.run(
        ["ip", "netns", "exec", network, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def test_two_hosts_over_a_real_network(scripts, two_networks):
    first, second = two_networks
    (scripts / "hosts").write_text(f"{first} slots=1\n{second} slots=1\n")
    options = ["--hostfile", "hosts", "--ssh", "ip netns exec {host} sh -c", "--master_addr", "10.77.0.1"]
    result = launched(*options, "sum.py", cwd=scripts)
    assert result.returncode == 0, result.stderr
    assert [r["sum"] for r in found(result.stdout)] == [3.0, 3.0]
    assert "GLOO_SOCKET_IFNAME=eth0" in result.stderr
    assert sent(first) > 2**20  # an all-reduce of 1 MiB on 2 ranks sends 1 MiB a rank, here over this cable
    assert sent(second) > 2**20
