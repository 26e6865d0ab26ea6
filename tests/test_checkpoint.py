"""Checkpoints: nothing is lost, on any number of ranks and at any stage, whatever breaks and whenever."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Everything, Tokens, config, difference, everything, snapshot, train
from ranks import fresh_ranks, run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import zero_course as zc
from zero_course.checkpoint import (
    convert_zero_checkpoint_to_fp32_state_dict,
    files,
    load_state_dict_from_zero_checkpoint,
    loading,
)
from zero_course.checkpoint.contents import owned_keys

STAGES = range(4)


def saved(folder: str, stage: int = 1, **more: Any) -> dict[str, Any]:
    """Train an engine for a while and save it; what the checkpoint must bring back."""
    engine = everything(stage, **more)
    train(engine, 16)
    engine.save_checkpoint(folder)
    return snapshot(engine)


def load_all(folders: list[str], stage: int) -> list[dict[str, Any]]:
    """Load each checkpoint into the same engine, and train on; what was loaded."""
    engine = everything(stage, seed=9)
    train(engine, 3)  # whatever was there before must be gone
    found = []
    for folder in folders:
        engine.load_checkpoint(folder)
        found.append(snapshot(engine))
        train(engine, 2)
    return found


# -- resuming ------------------------------------------------------------------------------------------------


def resumed(stage: int, folder: str) -> tuple[list[float], list[float], list[str]]:
    engine = everything(stage, accumulation=2)
    train(engine, 10)
    engine.save_checkpoint(folder, client_state={"note": "half way"})
    straight = train(engine, 10)  # from one epoch into the next, on any number of ranks
    after = snapshot(engine)
    engine = everything(stage, seed=5, accumulation=2)
    train(engine, 3)  # leaves a micro-batch's gradients, and a random generator that has gone on
    path, client_state = engine.load_checkpoint(folder)
    assert path == str(Path(folder, "global_step5"))
    assert client_state == {"note": "half way"}
    interrupted = train(engine, 10)
    return straight, interrupted, difference(after, snapshot(engine))


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 1), (3, 3)])
def test_resuming_changes_nothing(world: int, stage: int, tmp_path: Path) -> None:
    """The same losses, bit for bit, with dropout, shuffled data and accumulation."""
    for straight, interrupted, different in run_ranks(world, resumed, stage, str(tmp_path)):
        assert len(set(straight)) == 10
        assert interrupted == straight
        assert different == []


def test_any_number_of_ranks_and_any_stage_loads_any_other(tmp_path: Path) -> None:
    expected: dict[str, dict[str, Any]] = {}
    for world, stage in [(1, 3), (2, 1), (3, 0), (3, 3)]:
        folder = str(tmp_path / f"{world}-{stage}")
        expected[folder] = run_ranks(world, saved, folder, stage)[0]
    for world, stage in [(1, 1), (2, 0), (2, 3), (3, 2)]:
        for rank, loaded in enumerate(run_ranks(world, load_all, list(expected), stage)):
            for folder, ours in zip(expected, loaded, strict=True):
                where = f"{folder} on rank {rank} of {world}, stage {stage}"
                assert difference(ours, expected[folder]) == [], where


def with_another_optimizer(stage: int, folder: str, which: str) -> list[str]:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        if which == "SGD":
            return torch.optim.SGD(params, lr=1e-2, momentum=0.9)
        return getattr(torch.optim, which)(params, lr=1e-2)

    def engine() -> zc.Engine:
        torch.manual_seed(0)
        settings = {**config(stage, scheduler=None, seed=1), "optimizer": None}
        return zc.initialize(
            model=Everything(), optimizer=optimizer, config=settings, training_data=Tokens()
        )[0]

    def states(engine: zc.Engine) -> dict[str, Any]:
        found = engine.rung.full_state_dict()
        for name, _, key in owned_keys(engine.rung):
            if key.numel() == 0:  # has state at stage 0 only, which means nothing
                continue
            found |= {
                f"{kind} of {name}": value for kind, value in engine.optimizer.state.get(key, {}).items()
            }
        return found

    first = engine()
    train(first, 5)
    first.optimizer.param_groups[0]["lr"] = 0.02  # by hand, not by a schedule
    first.save_checkpoint(folder)
    straight = train(first, 5)
    assert len(states(first)) > len(first.rung.full_state_dict())
    second = engine()
    second.load_checkpoint(folder)
    assert train(second, 5) == straight
    return difference(states(first), states(second))


@pytest.mark.parametrize("which", ["SGD", "Adagrad", "NAdam", "ASGD"])
@pytest.mark.parametrize("stage", [0, 3])
def test_optimizers_with_other_states(stage: int, which: str, tmp_path: Path) -> None:
    for different in run_ranks(2, with_another_optimizer, stage, str(tmp_path), which):
        assert different == []


class Branches(nn.Module):
    """Takes one way or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.second(self.first(x)) if both else self.first(x)


def test_what_stage_3_has_gathered_ahead_is_not_kept(tmp_path: Path) -> None:
    x = torch.ones(2, 6)
    torch.manual_seed(0)
    saver, loader = (zc.initialize(model=Branches(), config=config(3))[0] for _ in range(2))
    saver.save_checkpoint(tmp_path)
    with torch.no_grad():
        loader(x, True)
        loader(x, False)  # the second layer was fetched for nothing
    assert loader.rung.gathered_elements > 0
    loader.load_checkpoint(tmp_path)
    assert loader.rung.gathered_elements == 0
    weights = [zc.safe_get_full_fp32_param(engine.module.second.weight) for engine in (saver, loader)]
    assert torch.equal(*weights)


def built_in_pieces(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    engines = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with zc.zero.Init(stage3_param_persistence_threshold=15):
            model = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 13), nn.Linear(13, 11))
        engines.append(zc.initialize(model=model, config=config(3), training_data=Tokens())[0])
    train(engines[0], 5)
    engines[0].save_checkpoint(folder)
    engines[1].load_checkpoint(folder)
    return tuple(engine.rung.full_state_dict() for engine in engines)


def test_a_model_that_was_built_in_pieces(tmp_path: Path) -> None:
    for one, two in run_ranks(2, built_in_pieces, str(tmp_path)):
        assert difference(one, two) == []


def in_the_middle_of_a_step(folder: str) -> tuple[list[float], list[float], list[str]]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("zero_course").addHandler(handler)
    engine = everything(1, accumulation=4)
    engine.module.dropout.p = 0.0  # the random generators have gone on by two micro-batches
    train(engine, 10)
    engine.save_checkpoint(folder)
    losses = train(engine, 6)
    engine = everything(1, accumulation=4)
    engine.module.dropout.p = 0.0
    engine.load_checkpoint(folder)
    assert (engine.global_steps, engine.accumulated) == (2, 0)
    again = train(engine, 8)
    return losses, again, warnings


def test_saving_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    """The checkpoint is of the last step; its micro-batches are taken again."""
    for rank, (losses, again, warnings) in enumerate(run_ranks(2, in_the_middle_of_a_step, str(tmp_path))):
        assert again[2:] == losses
        assert any("after 2 of 4 micro-batches" in text for text in warnings) == (rank == 0)


# -- the files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_each_element_is_saved_once(stage: int, tmp_path: Path) -> None:
    whole = run_ranks(3, saved, str(tmp_path), stage)[0]
    folder = tmp_path / "global_step16"
    model = Everything()
    names = [name for name, _ in model.named_parameters()]
    assert sorted(path.name for path in folder.iterdir()) == [
        "metadata.json", "rank_00000.safetensors", "rank_00001.safetensors", "rank_00002.safetensors", "state.pt",
    ]  # fmt: skip
    seen: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                kind, _, rest = key.partition("/")
                name, _, start = rest.rpartition("/")
                if kind not in ("parameters", "exp_avg", "exp_avg_sq"):
                    continue
                assert name in names
                values = file.get_tensor(key)
                assert values.dim() == 1
                expected = whole[name if kind == "parameters" else f"{kind} of {name}"]
                flat = seen.setdefault(f"{kind} {name}", torch.full((expected.numel(),), float("nan")))
                place = flat[int(start) : int(start) + values.numel()]
                assert place.isnan().all(), f"{key} is saved twice"
                place.copy_(values)
                assert torch.equal(values, expected.reshape(-1)[int(start) : int(start) + values.numel()])
        data = sum(tensor.numel() * tensor.element_size() for tensor in load_file(path).values())
        assert path.stat().st_size < data + 8000  # no bytes of the flat buffers around the pieces
    assert not any(flat.isnan().any() for flat in seen.values())
    trained = [n for n, p in model.named_parameters() if p.requires_grad and p.numel()]
    kept = [n for n, p in model.named_parameters() if p.numel()]
    assert sorted(seen) == sorted(
        [f"parameters {n}" for n in kept]
        + [f"{kind} {n}" for kind in ("exp_avg", "exp_avg_sq") for n in trained]
    )
    metadata = json.loads((folder / "metadata.json").read_text())
    owned = [len(metadata["files"][f"rank_0000{rank}.safetensors"]["pieces"]) for rank in range(3)]
    assert owned == [len(kept), 0, 0] if stage == 0 else min(owned) > 1
    assert metadata["aliases"] == {"head.weight": "embed.weight"}
    assert metadata["parameters"]["inner.weight"]["numbers"] == {"step": {"dtype": "float32", "value": 16.0}}
    assert (tmp_path / "latest").read_text() == "global_step16"


def elements_read(folder: str, stage: int) -> tuple[int, int]:
    engine = everything(stage)
    count = 0
    read = loading.Reader.read

    def counting(reader: Any, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        nonlocal count
        values = read(reader, kind, name, start, stop)
        assert values.numel() == stop - start
        count += stop - start
        return values

    loading.Reader.read = counting
    try:
        engine.load_checkpoint(folder)
    finally:
        loading.Reader.read = read
    held = sum(p.numel() for p in engine.module.parameters()) if stage < 3 else 0
    if stage == 3:
        sharded = sum(bucket.shard_values.numel() for bucket in engine.rung.sharded)
        held = sharded + sum(p.numel() for p in engine.module.parameters() if not hasattr(p, "_zero_bucket"))
    owned = sum(values.numel() for _, values in engine.rung.owned_pieces())
    return count, held + 2 * owned


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_reads_what_it_holds_and_no_more(stage: int, tmp_path: Path) -> None:
    run_ranks(2, saved, str(tmp_path), 3)
    for count, holds in run_ranks(3, elements_read, str(tmp_path), stage):
        assert 0 < count <= holds  # less by the padding at the end of buckets
        assert count > holds - 20


# -- crashes -------------------------------------------------------------------------------------------------


class Crash:
    """Kills this process at the ``moment``-th change of the file system, before it happens or half-way."""

    def __init__(self, moment: int) -> None:
        self.left = moment
        self.passed: list[str] = []
        for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self._before(name, getattr(os, name)))
        self._fsync, os.fsync = os.fsync, self.fsync

    def _before(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            self._pass()
            return function(*args, **kwargs)

        return change

    def fsync(self, handle: int) -> None:
        """Until it is flushed, only a part of a file may be on the disk."""
        if self.left == 0 and not os.path.isdir(f"/proc/self/fd/{handle}"):
            os.truncate(f"/proc/self/fd/{handle}", os.fstat(handle).st_size // 2)
        self._pass()
        self._fsync(handle)

    def _pass(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def crashes_while_saving(folder: str, same_tag: bool) -> list[str]:
    """Save with a crash at each moment in turn; what is loaded afterwards, "old" or "new"."""
    base, work = Path(folder, "base"), Path(folder, "work")
    tag = "same" if same_tag else None
    engine = everything(1)
    train(engine, 3)
    engine.save_checkpoint(base, tag)
    old = snapshot(engine)
    train(engine, 3)
    new = snapshot(engine)
    reader = everything(1, seed=3)
    found = []
    for moment in range(100):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        child = os.fork()
        if child == 0:
            Crash(moment)
            engine.save_checkpoint(work, tag)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        reader.load_checkpoint(work)
        loaded = snapshot(reader)
        found.append(
            "old" if not difference(loaded, old) else "new" if not difference(loaded, new) else "neither"
        )
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return found
        assert os.WTERMSIG(status) == signal.SIGKILL
        engine.save_checkpoint(work, tag)  # the next attempt is not in the way of the last
        assert sorted(path.name for path in work.iterdir()) == sorted(
            ["latest", "same"] if same_tag else ["latest", "global_step3", "global_step6"]
        )
    return ["no end"]


@pytest.mark.parametrize("same_tag", [False, True])
def test_a_crash_at_any_moment_of_saving(tmp_path: Path, same_tag: bool) -> None:
    found = run_ranks(1, crashes_while_saving, str(tmp_path), same_tag)[0]
    assert len(found) > 10  # moments
    assert found[0] == "old"
    assert found[-1] == "new"
    assert found == sorted(found, reverse=True)  # old, old, ..., new: never neither, and never back
    assert found.count("new") < 8 if not same_tag else True


def killed(folder: str, where: str) -> None:
    engine = everything(2)
    train(engine, 2)
    engine.save_checkpoint(folder)
    train(engine, 2)
    rank = engine.global_rank

    def end(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "writing" and rank == 1:
        files.write_tensors = end
    if where == "naming" and rank == 0:
        files.point_latest_at = end
    engine.save_checkpoint(folder)


@pytest.mark.parametrize(("where", "victim"), [("writing", 1), ("naming", 0)])
def test_a_rank_that_dies_while_saving(tmp_path: Path, where: str, victim: int) -> None:
    outcomes = fresh_ranks(2, killed, str(tmp_path), where, env={"ZERO_COURSE_TIMEOUT": "3"}, timeout=60)
    assert outcomes[victim].signal == "SIGKILL"
    assert "CollectiveError" in outcomes[1 - victim].error
    assert f"rank {victim} " in outcomes[1 - victim].error
    engine = everything(0)
    path, _ = engine.load_checkpoint(tmp_path)
    assert path.endswith("global_step2")
    assert engine.global_steps == 2
    if where == "naming":  # complete already, only not the latest
        engine.load_checkpoint(tmp_path, "global_step4")
    engine.save_checkpoint(tmp_path, "global_step4")
    assert (tmp_path / "latest").read_text() == "global_step4"


def disk_full(folder: str) -> tuple[str, list[str]]:
    engine = everything(1)
    train(engine, 1)
    engine.save_checkpoint(folder)
    train(engine, 1)
    write = files.save_file

    def fails(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if engine.global_rank == 1:
        files.save_file = fails
    try:
        engine.save_checkpoint(folder)
    except zc.CheckpointError as error:
        engine.comm.barrier()
        return str(error), sorted(path.name for path in Path(folder).iterdir())
    finally:
        files.save_file = write
    return "", []


def test_a_disk_that_is_full_on_one_rank(tmp_path: Path) -> None:
    for text, left in run_ranks(2, disk_full, str(tmp_path)):
        assert "No space left on device (on rank 1)" in text.replace("[Errno 28] ", "")
        assert left == ["global_step1", "latest"]


def only_rank_0_saves(folder: str) -> None:
    engine = everything(2)
    train(engine, 1)
    if engine.global_rank == 0:
        engine.save_checkpoint(folder)
    train(engine, 1)


def test_saving_on_rank_0_alone_names_the_others(tmp_path: Path) -> None:
    zero, one = fresh_ranks(2, only_rank_0_saves, str(tmp_path), env={"ZERO_COURSE_TIMEOUT": "2"}, timeout=60)
    assert "CollectiveError" in zero.error
    assert "CollectiveError" in one.error
    assert "rank 1 called" in zero.error
    assert "engines.py:" in zero.error  # where rank 1 is
    assert "test_checkpoint.py:" in zero.error  # where rank 0 is
    assert "save_checkpoint is for every rank" in zero.error
    assert "save_checkpoint is for every rank" not in one.error


def test_files_are_on_the_disk_before_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the changes: a file that is not flushed may be empty after a power cut, whatever its name."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def logged_fsync(handle: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def logged_move(move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Any, target: Any) -> None:
            events.append(("name", str(target)))
            move(source, target)

        return moved

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_move(rename))
    monkeypatch.setattr(os, "replace", logged_move(replace))
    everything(1).save_checkpoint(tmp_path, "tag")
    folder = str(tmp_path / ".tag.saving")
    written = [f"{folder}/{path.name}" for path in (tmp_path / "tag").iterdir()]
    named = events.index(("name", str(tmp_path / "tag")))
    assert {("fsync", path) for path in [*written, folder]} <= set(events[:named])
    assert len(written) == 3
    assert events[named + 1 :] == [
        ("fsync", str(tmp_path)),
        ("fsync", str(tmp_path / ".latest.saving")),
        ("name", str(tmp_path / "latest")),
        ("fsync", str(tmp_path)),
    ]


# -- damage --------------------------------------------------------------------------------------------------


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x04
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def refused(folder: str, stage: int, **how: Any) -> tuple[str, list[str]]:
    engine = everything(stage, seed=4)
    train(engine, 2)
    before = snapshot(engine)
    generator = torch.get_rng_state()
    try:
        engine.load_checkpoint(folder, **how)
    except zc.CheckpointError as error:
        changed = difference(before, snapshot(engine))
        if not torch.equal(generator, torch.get_rng_state()):
            changed.append("random generator")
        train(engine, 1)
        return str(error), changed
    return "", []


DAMAGE = {
    "values": ("rank_00001.safetensors", lambda path: flip(path, 0.9)),
    "header": ("rank_00000.safetensors", lambda path: flip(path, 0.0)),
    "names": ("rank_00000.safetensors", lambda path: flip(path, 0.05)),
    "cut off": ("rank_00001.safetensors", truncate),
    "empty": ("rank_00001.safetensors", lambda path: path.write_bytes(b"")),
    "missing": ("rank_00001.safetensors", Path.unlink),
    "state": ("state.pt", lambda path: flip(path, 0.5)),
    "no state": ("state.pt", Path.unlink),
    "metadata": ("metadata.json", lambda path: flip(path, 0.6)),
    "metadata cut off": ("metadata.json", truncate),
    "a number": (
        "metadata.json",
        lambda path: path.write_text(path.read_text().replace('"global_steps": 16', '"global_steps": 17')),
    ),
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with global_step8 and, the latest, global_step16, saved by two ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(2, partial(saved, str(folder), 2, accumulation=2))
    run_ranks(2, saved, str(folder), 2)
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_nothing_is_loaded(two_checkpoints: Path, tmp_path: Path, damage: str) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    name, spoil = DAMAGE[damage]
    spoil(folder / "global_step16" / name)
    for text, changed in run_ranks(2, refused, str(folder), 3):
        assert str(folder / "global_step16" / name) in text
        assert "Nothing was loaded" in text
        assert "global_step8" in text  # what to load instead
        assert changed == []
    if "metadata" not in name:
        with pytest.raises(zc.CheckpointError, match=name):
            zc.get_fp32_state_dict_from_zero_checkpoint(folder)
    zc.get_fp32_state_dict_from_zero_checkpoint(folder, "global_step8")


def rewrite(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change a rank's file, and the metadata accordingly, as a faulty program might have written it."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)
    metadata = files.read_metadata(folder)
    metadata["files"][name] |= {
        "bytes": (folder / name).stat().st_size,
        "sha256": files.sha256_of(folder / name),
    }
    files.write_metadata(folder, metadata)


def some_key(tensors: dict[str, torch.Tensor], kind: str) -> str:
    return next(key for key in sorted(tensors) if key.startswith(f"{kind}/") and tensors[key].numel() > 1)


def cut_short(tensors: dict[str, torch.Tensor]) -> None:
    key = some_key(tensors, "exp_avg")
    tensors[key] = tensors[key][:-1].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(some_key(tensors, "parameters")), r"it lacks 'parameters/"),
        (lambda tensors: tensors.pop(some_key(tensors, "exp_avg")), r"it lacks 'exp_avg/"),
        (cut_short, r"'exp_avg/.*' has shape"),
    ],
)
def test_missing_keys_are_named(two_checkpoints: Path, tmp_path: Path, change: Any, message: str) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy")
    rewrite(folder / "global_step16", "rank_00000.safetensors", change)
    engine = everything(0)
    with pytest.raises(zc.CheckpointError, match=message):
        engine.load_checkpoint(folder)
    assert engine.global_steps == 0


def test_a_gap_between_pieces_is_found(two_checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy") / "global_step16"
    metadata = files.read_metadata(folder)
    pieces = metadata["files"]["rank_00001.safetensors"]["pieces"]
    name = next(name for name in pieces if pieces[name]["start"] > 0)
    start = pieces.pop(name)["start"]
    files.write_metadata(folder, metadata)
    with pytest.raises(
        zc.CheckpointError, match=f"elements of '{name}' those from {start} on are in no file"
    ):
        everything(0).load_checkpoint(folder.parent)


def test_a_format_of_the_future_is_refused(two_checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(two_checkpoints, tmp_path / "copy") / "global_step16"
    files.write_metadata(folder, {**files.read_metadata(folder), "version": 2})
    with pytest.raises(
        zc.CheckpointError, match="version 2; this program reads zero_course checkpoint version 1"
    ):
        everything(0).load_checkpoint(folder.parent)


def changed_model(how: str) -> nn.Module:
    model = Everything()
    if how == "shape":
        model.inner = nn.Linear(7, 14)
        model.norm = nn.BatchNorm1d(14)
        model.frozen = nn.Linear(14, 7).requires_grad_(False)
    elif how == "dtype":
        model.inner = model.inner.double()
    elif how == "more":
        model.extra = nn.Linear(2, 2)
    elif how == "less":
        del model.frozen
    elif how == "untied":
        model.head.weight = nn.Parameter(torch.zeros(11, 7))
    elif how == "tied":
        model.norm.bias = model.norm.weight
    elif how == "buffer":
        model.register_buffer("another", torch.zeros(3))
    return model


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", r"'inner.weight': \(13, 7\) float32 in the checkpoint, \(14, 7\) float32 in this model"),
        ("dtype", r"'inner.weight': \(13, 7\) float32 in the checkpoint, \(13, 7\) float64 in this model"),
        ("more", r"'extra.weight': it is not in the checkpoint"),
        ("less", r"'frozen.bias': in the checkpoint, but not in this model"),
        ("untied", r"'head.weight': it is tied to 'embed.weight' there, and not in this model"),
        ("tied", r"'norm.bias': in the checkpoint, but tied to 'norm.weight' in this model, and not there"),
        ("buffer", r"1 of its buffers differ.*\n  'another': it is not in the checkpoint"),
    ],
)
def test_another_model_is_refused(two_checkpoints: Path, how: str, message: str) -> None:
    model = changed_model(how)
    engine = zc.initialize(model=model, config=config(0))[0]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(zc.CheckpointError, match=message):
        engine.load_checkpoint(two_checkpoints)
    assert difference(before, dict(model.state_dict())) == []


def test_another_optimizer_schedule_or_data_set_is_refused_with_a_way_out(two_checkpoints: Path) -> None:
    torch.manual_seed(0)
    sgd = zc.initialize(model=Everything(), config=config(1, optimizer={"type": "SGD"}))[0]
    with pytest.raises(zc.CheckpointError, match="has the state of AdamW, this engine trains with SGD"):
        sgd.load_checkpoint(two_checkpoints)
    assert sgd.load_checkpoint(two_checkpoints, load_optimizer_states=False)[0]
    assert sgd.global_steps == 16

    model = Everything()
    weights = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
    groups = [{"params": weights}, {"params": others}]
    engine = zc.initialize(model=model, model_parameters=groups, config=config(0))[0]
    with pytest.raises(zc.CheckpointError, match="has 1 parameter groups, this optimizer 2"):
        engine.load_checkpoint(two_checkpoints)
    model = Everything()
    engine = zc.initialize(model=model, model_parameters=[model.scale], config=config(0))[0]
    with pytest.raises(zc.CheckpointError, match="'embed.weight' is in it in the checkpoint only"):
        engine.load_checkpoint(two_checkpoints)

    other = {"type": "WarmupCosineLR", "params": {"total_num_steps": 100}}
    engine = everything(0, scheduler=other)
    with pytest.raises(zc.CheckpointError, match="schedule WarmupLR, this engine has WarmupCosineLR"):
        engine.load_checkpoint(two_checkpoints)
    assert engine.global_steps == 0
    engine.load_checkpoint(two_checkpoints, load_lr_scheduler_states=False)
    assert engine.lr_scheduler.last_batch_iteration == -1

    engine = everything(0, data=Tokens(60))
    with pytest.raises(zc.CheckpointError, match="54 samples, training_data has 60"):
        engine.load_checkpoint(two_checkpoints)
    assert engine.load_checkpoint(two_checkpoints, load_module_only=True)[0]


def test_loading_the_module_only(two_checkpoints: Path) -> None:
    full, engine = everything(0), everything(0, seed=8)
    full.load_checkpoint(two_checkpoints)
    train(engine, 2)
    before = snapshot(engine)
    engine.load_checkpoint(two_checkpoints, load_module_only=True)
    after, loaded = snapshot(engine), snapshot(full)
    names = engine.module.state_dict().keys()
    assert difference({n: after[n] for n in names}, {n: loaded[n] for n in names}) == []
    assert (
        difference({k: after[k] for k in after.keys() - names}, {k: before[k] for k in before.keys() - names})
        == []
    )


def test_an_engine_without_an_optimizer_loads_and_saves(two_checkpoints: Path, tmp_path: Path) -> None:
    for stage in STAGES:
        settings = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
        engine = zc.initialize(model=Everything(), config=settings)[0]
        engine.load_checkpoint(two_checkpoints)
        engine.save_checkpoint(tmp_path / str(stage))
        one, two = (
            zc.get_fp32_state_dict_from_zero_checkpoint(d) for d in (two_checkpoints, tmp_path / str(stage))
        )
        assert difference(one, two) == []
        with pytest.raises(zc.CheckpointError, match="saved without an optimizer"):
            everything(0).load_checkpoint(tmp_path / str(stage))


class Rows(torch.optim.SGD):
    """Keeps one number a row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = torch.zeros(param.shape[:1])


def test_a_state_that_cannot_be_cut_is_named(tmp_path: Path) -> None:
    settings = {**config(0), "optimizer": None}
    engine = zc.initialize(model=nn.Linear(3, 2), optimizer=lambda p: Rows(p, lr=1.0), config=settings)[0]
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    with pytest.raises(
        zc.CheckpointError, match=r"'rows' of 'weight' has shape \(2,\), the parameter's part has"
    ):
        engine.save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- tags, latest, client_state ------------------------------------------------------------------------------


def test_finding_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = everything(0)
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
    assert "nothing to load" in caplog.text
    with pytest.raises(
        zc.CheckpointError, match="no such checkpoint, which you asked for; there is no checkpoint"
    ):
        engine.load_checkpoint(tmp_path, "global_step7")
    engine.save_checkpoint(tmp_path, "first")
    train(engine, 2)
    engine.save_checkpoint(tmp_path, save_latest=False)
    assert (tmp_path / "latest").read_text() == "first"
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "first")
    assert engine.global_steps == 0
    assert engine.load_checkpoint(tmp_path, "global_step2")[0] == str(tmp_path / "global_step2")
    assert engine.global_steps == 2
    with pytest.raises(zc.CheckpointError, match="has first, global_step2: load one of these"):
        engine.load_checkpoint(tmp_path, "third")
    for text in ("third", "../first", "", "\x00\xff"):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(zc.CheckpointError, match="latest names; .* has first, global_step2"):
            engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("tag", ["", "latest", "a/b", "..", ".hidden", "two\nlines"])
def test_tags_that_are_no_names(tmp_path: Path, tag: str) -> None:
    with pytest.raises(zc.CheckpointError, match="cannot be the name of a folder"):
        everything(0).save_checkpoint(tmp_path, tag)
    assert not list(tmp_path.iterdir())


def under_tags_of_their_own(folder: str, validation: str) -> str:
    engine = everything(1, checkpoint={"tag_validation": validation})
    try:
        engine.save_checkpoint(folder, f"of_rank_{engine.global_rank}")
    except zc.CheckpointError as error:
        return str(error)
    return (Path(folder) / "latest").read_text()


def test_ranks_with_different_tags(tmp_path: Path) -> None:
    assert run_ranks(2, under_tags_of_their_own, str(tmp_path / "warn"), "Warn") == ["of_rank_0"] * 2
    for text in run_ranks(2, under_tags_of_their_own, str(tmp_path / "fail"), "Fail"):
        assert "0: 'of_rank_0', 1: 'of_rank_1'" in text


def test_client_state(tmp_path: Path) -> None:
    engine = everything(0)
    state = {"epoch": 3, "best": 0.25, "names": ["a", "b"], "curve": torch.arange(4.0), "nothing": None}
    engine.save_checkpoint(tmp_path, client_state=state)
    loaded = engine.load_checkpoint(tmp_path)[1]
    assert difference(state, loaded) == []
    with pytest.raises(zc.CheckpointError, match="client_state"):
        engine.save_checkpoint(tmp_path, "other", client_state={"path": Path("x")})
    with pytest.raises(zc.CheckpointError, match="client_state"):
        engine.save_checkpoint(tmp_path, "other", client_state={"function": lambda: 0})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step0", "latest"]


# -- the whole model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_the_whole_model_from_a_checkpoint(tmp_path: Path, stage: int) -> None:
    expected = run_ranks(3, saved, str(tmp_path), stage)[0]
    model = load_state_dict_from_zero_checkpoint(Everything(), tmp_path)
    state = zc.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state.keys() == model.state_dict().keys()
    assert state["head.weight"] is state["embed.weight"]
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    with pytest.raises(zc.CheckpointError, match="no such file"):
        zc.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "nowhere")


def test_one_file_with_the_whole_model(two_checkpoints: Path, tmp_path: Path) -> None:
    state = zc.get_fp32_state_dict_from_zero_checkpoint(two_checkpoints)
    convert_zero_checkpoint_to_fp32_state_dict(two_checkpoints, tmp_path / "out" / "model.bin")
    written = torch.load(tmp_path / "out" / "model.bin", weights_only=True)
    assert difference(state, written) == []
    command = [sys.executable, "-m", "zero_course.checkpoint", str(two_checkpoints)]
    output = tmp_path / "model.safetensors"
    done = subprocess.run(
        [*command, str(output), "--tag", "global_step8"], check=True, timeout=60, capture_output=True
    )
    assert done.stderr == b""
    failed = subprocess.run([*command, str(output), "--tag", "global_step9"], timeout=60, capture_output=True)
    assert failed.returncode == 1
    assert failed.stderr.decode().count("\n") == 1
    assert "global_step8" in failed.stderr.decode()
    eight = zc.get_fp32_state_dict_from_zero_checkpoint(two_checkpoints, "global_step8")
    assert difference(eight, load_file(output)) == []
    assert difference(eight, state) != []


def test_low_precision_becomes_fp32(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5).bfloat16(), nn.Linear(5, 2))
    engine = zc.initialize(model=model, config=config(2))[0]
    engine.save_checkpoint(tmp_path)
    state = zc.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert torch.equal(state["0.weight"], model[0].weight.float())
