"""The engine trains as a plain loop would, whatever the stage, and says what is wrong when it is misused."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Everything, Tokens, config, everything
from engines import train as train_everything
from ladder import FEATURES, batch, build, groups_of, loss_of
from ranks import run_ranks
from torch import nn

import zero_course as zc
from zero_course.engine import MAX_SKIPPED_IN_A_ROW

ROWS = 4  # of each rank in each micro-batch
STEPS = 6
STAGES = range(4)
# Adam does not see the scale of a gradient, and so would not notice a wrong divisor; SGD does.
SGD = {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}


def engine_for(stage: int, model: nn.Module | None = None, **arguments: Any) -> zc.Engine:
    settings = arguments.pop("settings", {})
    if "optimizer" in arguments:
        settings = {"optimizer": None, **settings}
    return zc.initialize(model=model or build("Plain"), config=config(stage, ROWS, **settings), **arguments)[
        0
    ]


def micro_batch(engine: zc.Engine, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of micro-batch ``number`` of a step's joined batch."""
    x, y = batch(step, ROWS * engine.world_size * engine.gradient_accumulation_steps())
    first = ROWS * (number * engine.world_size + engine.global_rank)
    return x[first : first + ROWS], y[first : first + ROWS]


def train(engine: zc.Engine, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Train on joined batches 0, 1, ...; the whole state dict, copied."""
    for step in range(steps):
        for number in range(engine.gradient_accumulation_steps()):
            x, y = micro_batch(engine, step, number)
            engine.backward(loss_of(engine(x), y))
            engine.step()
    return {key: value.clone() for key, value in engine.rung.full_state_dict().items()}


def plain(world: int, accumulation: int, clip: float) -> dict[str, torch.Tensor]:
    """What a loop without any of this makes of the joined batches."""
    model = build("Plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(step, ROWS * world * accumulation)
        loss_of(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_close(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=tolerance, atol=tolerance)


# -- training ------------------------------------------------------------------------------------------------


def trained(stage: int, accumulation: int, clip: float) -> dict[str, torch.Tensor]:
    settings = {"gradient_clipping": clip, "accumulation": accumulation, "optimizer": SGD}
    return train(engine_for(stage, build("Plain", seed=zc.get_rank()), settings=settings))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.0), (3, 0.0), (2, 20.0)])
def test_trains_as_a_plain_loop_on_the_joined_batch(world: int, accumulation: int, clip: float) -> None:
    expected = plain(world, accumulation, clip)
    by_stage = {}
    for stage in STAGES:
        results = run_ranks(world, trained, stage, accumulation, clip)
        by_stage[stage] = results[0]
        for state in results:
            assert_close(state, expected)
            for key in state:
                assert torch.equal(state[key], results[0][key]), f"stage {stage}: ranks differ in {key}"
    # Accumulated gradients are averaged once in stages 0 and 1, and once a micro-batch in 2 and 3: other sums.
    for one, other in [(0, 1), (2, 3)] + [(0, 2)] * (accumulation == 1):
        for key in expected if not clip else ():
            assert torch.equal(by_stage[one][key], by_stage[other][key]), (
                f"stages {one}, {other} differ in {key}"
            )


def trained_with_adam(stage: int) -> dict[str, torch.Tensor]:
    return train(engine_for(stage, settings={"gradient_clipping": 0.0}))


def test_stages_are_the_same_bit_for_bit_with_the_config_s_adam() -> None:
    first, *others = (run_ranks(3, trained_with_adam, stage)[0] for stage in STAGES)
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)


def gradient_payload(stage: int) -> list[int]:
    engine = engine_for(stage, settings={"accumulation": 3})
    payloads = []
    for number in range(3):
        engine.comm.ledger.clear()
        x, y = micro_batch(engine, 0, number)
        engine.backward(loss_of(engine(x), y))
        payloads.append(engine.comm.ledger.payload_bytes("gradients"))
        boundary = engine.is_gradient_accumulation_boundary()
        assert boundary == (number == 2)
        engine.step()
        assert engine.global_steps == boundary
    assert engine.micro_steps == 3
    return payloads


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_communicates_once_where_the_stage_allows_it(stage: int) -> None:
    for first, second, third in run_ranks(2, gradient_payload, stage):
        assert third > 0
        assert (first, second) == ((0, 0) if stage < 2 else (third, third))


def flushed(stage: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    engine = engine_for(stage, settings={"accumulation": 3, "gradient_clipping": 0.0, "optimizer": SGD})
    for number in range(2):  # of three
        x, y = micro_batch(engine, 0, number)
        engine.backward(loss_of(engine(x), y))
        engine.step()
    assert engine.flush()
    assert not engine.flush()
    counters = [engine.global_steps, engine.micro_steps, engine.global_samples, engine.accumulated]
    return {key: value.clone() for key, value in engine.rung.full_state_dict().items()}, counters


@pytest.mark.parametrize("stage", STAGES)
def test_flush_steps_on_the_mean_of_what_there_is(stage: int) -> None:
    model = build("Plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = batch(0, ROWS * 2 * 3)
    loss_of(model(x[: ROWS * 2 * 2]), y[: ROWS * 2 * 2]).backward()
    optimizer.step()
    for state, counters in run_ranks(2, flushed, stage):
        assert_close(state, model.state_dict())
        assert counters == [1, 2, ROWS * 2 * 2, 0]


def with_no_sync(stage: int, manual: bool) -> dict[str, torch.Tensor]:
    settings = {"accumulation": 2 if manual else 1, "gradient_clipping": 0.0, "optimizer": SGD}
    engine = engine_for(stage, settings=settings)
    for step in range(STEPS):
        x, y = batch(step, ROWS * engine.world_size * 2)
        rows = [slice(ROWS * (n * engine.world_size + engine.global_rank), None) for n in range(2)]
        parts = [(x[r][:ROWS], y[r][:ROWS]) for r in rows]
        if manual:  # step() once, after all backwards
            for number, (x_part, y_part) in enumerate(parts):
                engine.set_gradient_accumulation_boundary(number == 1)
                engine.backward(loss_of(engine(x_part), y_part))
        else:
            with engine.no_sync():
                engine.backward(loss_of(engine(parts[0][0]), parts[0][1]) / 2)
                with pytest.raises(RuntimeError, match="inside no_sync"):
                    engine.step()
            engine.backward(loss_of(engine(parts[1][0]), parts[1][1]) / 2)
        engine.step()
        assert engine.global_steps == step + 1
    return {key: value.clone() for key, value in engine.rung.full_state_dict().items()}


@pytest.mark.parametrize(
    ("stage", "manual"), [(0, False), (1, False), (0, True), (1, True), (2, True), (3, True)]
)
def test_no_sync_and_boundaries_set_by_hand(stage: int, manual: bool) -> None:
    expected = plain(2, 2, clip=0)
    for state in run_ranks(2, with_no_sync, stage, manual):
        assert_close(state, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_in_stages_2_and_3_says_what_to_do(stage: int) -> None:
    engine = engine_for(stage)
    with pytest.raises(RuntimeError, match="use stage 1"), engine.no_sync():
        pass
    train(engine, 1)  # and leaves the engine usable
    assert engine.global_steps == 1


def test_counters_and_figures() -> None:
    settings = {"accumulation": 2, "gradient_clipping": 0.25, "zero_optimization": {"reduce_bucket_size": 50}}
    engine = engine_for(1, settings=settings)
    assert engine.get_global_grad_norm() is None
    train(engine, 3)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 6, 3 * 2 * ROWS)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (2 * ROWS, ROWS)
    assert (engine.gradient_accumulation_steps(), engine.zero_optimization_stage()) == (2, 1)
    assert (engine.skipped_steps, engine.loss_scale, engine.gradient_clipping()) == (0, 1.0, 0.25)
    assert (engine.world_size, engine.global_rank, engine.local_rank) == (1, 0, 0)
    assert engine.get_lr() == [1e-2]
    assert engine.get_global_grad_norm() > 0.25  # before clipping
    assert engine.device == torch.device("cpu")
    names = [name for name, _ in build("Plain").named_parameters()]
    assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name in names]


def test_sizes_that_the_config_leaves_out_stay_small() -> None:
    """DeepSpeed's default of 5e8 elements would be one bucket, and more memory than stage 2 saves."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    settings = {"train_batch_size": 4, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 2}}
    engine = zc.initialize(model=model, config=settings)[0]
    assert len(engine.rung.buckets) > 1
    settings["zero_optimization"] = {"stage": 2, "reduce_bucket_size": 5e8}
    assert len(zc.initialize(model=model, config=settings)[0].rung.buckets) == 1


def test_evaluation_between_steps() -> None:
    engine = everything(3)
    train_everything(engine, 2)
    engine.eval()
    assert not engine.module.training
    assert not engine.rung.training
    with torch.no_grad():
        first, second = (engine(torch.arange(5)) for _ in range(2))
    assert torch.equal(first, second)  # no dropout
    engine.train()
    assert engine.rung.training
    train_everything(engine, 1)
    assert engine.global_steps == 3


def test_a_model_in_evaluation_mode_stays_there() -> None:
    model = Everything().eval()
    model.norm.train()
    engine = engine_for(0, model)
    assert not engine.training
    assert model.norm.training
    assert not model.dropout.training


# -- optimizers and schedules --------------------------------------------------------------------------------


def with_client_optimizer(stage: int, how: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = build("Plain")
    schedule = None
    optimizer: Any
    if how == "instance":
        optimizer = torch.optim.SGD(groups_of(model), lr=1e-2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)
    else:
        optimizer = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)

        def schedule(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)

    params = None if how == "instance" else groups_of(model)
    engine, ours, _, scheduler = zc.initialize(
        model=model, optimizer=optimizer, model_parameters=params, lr_scheduler=schedule,
        config={"train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10}},
    )  # fmt: skip
    assert ours is engine.optimizer
    assert (ours is optimizer) == (how == "instance")
    assert scheduler is engine.lr_scheduler
    return train(engine), engine.get_lr()


@pytest.mark.parametrize("how", ["instance", "callable"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_client_brings_optimizer_groups_and_schedule(stage: int, how: str) -> None:
    model = build("Plain")
    optimizer = torch.optim.SGD(groups_of(model), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)
    for step in range(STEPS):
        x, y = batch(step, ROWS * 2)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    for state, rates in run_ranks(2, with_client_optimizer, stage, how):
        assert_close(state, model.state_dict())
        assert rates == [group["lr"] for group in optimizer.param_groups]
        assert rates == [1e-2 * 0.5**STEPS, 2e-2 * 0.5**STEPS]


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = build("Plain")
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model(batch(0, 4)[0]), batch(0, 4)[1]).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="before its first step"):
        engine_for(1, model, optimizer=optimizer)


class Halving(torch.optim.Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.5)


def test_optimizers_that_zero_cannot_cut() -> None:
    with pytest.raises(ValueError, match="LBFGS needs whole parameters"):
        engine_for(1, optimizer=lambda params: torch.optim.LBFGS(params))
    with pytest.raises(ValueError, match="zero_allow_untested_optimizer to true"):
        engine_for(2, optimizer=Halving)
    with pytest.raises(TypeError, match="returned a int"):
        engine_for(1, optimizer=lambda params: 3)
    with pytest.raises(TypeError, match="optimizer is a str"):
        engine_for(1, optimizer="AdamW")
    assert isinstance(engine_for(0, optimizer=Halving).optimizer, Halving)
    allowed = engine_for(2, optimizer=Halving, settings={"zero_allow_untested_optimizer": True})
    before = allowed.module.outer.weight.detach().clone()
    train(allowed, 1)
    assert torch.equal(allowed.module.outer.weight, before / 2)


def test_a_schedule_on_another_optimizer_is_refused() -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(ValueError, match="another optimizer"):
        engine_for(0, lr_scheduler=schedule)


def test_the_schedule_moves_with_real_steps_only() -> None:
    schedule = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 10, "warmup_type": "linear"},
    }
    engine = engine_for(1, settings={"accumulation": 2, "scheduler": schedule})
    seen = []
    for step in range(3):
        for number in range(2):
            x, y = micro_batch(engine, step, number)
            engine.backward(loss_of(engine(x), y))
            engine.step()
            seen.append(engine.get_lr()[0])
    assert seen == pytest.approx([0, 0, 0, 0.1, 0.1, 0.2])


def test_a_schedule_that_wants_the_loss() -> None:
    engine = engine_for(
        0, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    )
    for _ in range(2):
        x, y = micro_batch(engine, 0, 0)
        engine.backward(loss_of(engine(x), y))
        engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.get_lr() == pytest.approx([1e-3])


def test_without_an_optimizer_there_is_forward_and_backward_but_no_step() -> None:
    for stage in STAGES:
        engine, optimizer, _, schedule = zc.initialize(
            model=build("Plain"), config={"train_batch_size": 4, "zero_optimization": {"stage": stage}}
        )
        assert optimizer is None
        assert schedule is None
        x, y = batch(0, 4)
        engine.backward(loss_of(engine(x), y))
        with pytest.raises(RuntimeError, match="name one in the config"):
            engine.step()


# -- what is not finite --------------------------------------------------------------------------------------


class Warnings(logging.Handler):
    """Collects the package's warnings, in a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("zero_course").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def with_bad_micro_batch(stage: int, value: float) -> dict[str, Any]:
    warnings = Warnings()
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    engine = engine_for(stage, settings={"accumulation": 2, "scheduler": schedule})
    train(engine, 2)
    whole = engine.rung.full_state_dict()
    before = {key: tensor.clone() for key, tensor in whole.items()}
    moments = zc.safe_get_full_optimizer_state(engine.module.inner.weight, "exp_avg")
    rate = engine.get_lr()
    for number in range(2):
        x, y = micro_batch(engine, 2, number)
        if (engine.global_rank, number) == (1, 1):
            y = torch.full_like(y, value)
        engine.backward(loss_of(engine(x), y))
        engine.step()
    after = engine.rung.full_state_dict()
    result = {
        "unchanged": all(torch.equal(before[key], after[key]) for key in before)
        and torch.equal(moments, zc.safe_get_full_optimizer_state(engine.module.inner.weight, "exp_avg"))
        and engine.get_lr() == rate,
        "counters": (engine.global_steps, engine.skipped_steps, engine.skipped_in_a_row),
        "warnings": list(warnings.texts),
    }
    state = train(engine, 2)
    result["goes on"] = all(value.isfinite().all() for value in state.values())
    result["changed"] = not torch.equal(state["inner.weight"], before["inner.weight"])
    result["in a row"] = engine.skipped_in_a_row
    return result


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e25])
def test_a_step_that_would_destroy_the_weights_is_skipped_on_every_rank(stage: int, value: float) -> None:
    results = run_ranks(2, with_bad_micro_batch, stage, value)
    for result in results:
        assert result["unchanged"]
        assert result["counters"] == (3, 1, 1)
        assert result["goes on"]
        assert result["changed"]
        assert result["in a row"] == 0
    skipped = [text for text in results[0]["warnings"] if "skipped on every rank" in text]
    assert len(skipped) == 1
    assert skipped[0].startswith("step 3 ")
    losses = [text for text in results[1]["warnings"] if "the loss on rank 1" in text]
    if value == 1e25:  # the loss is infinite, (1e25)² > 3e38; its gradient, 2e25, is not
        assert "each gradient is finite" in skipped[0]
    else:
        assert (
            "'scale'" in skipped[0]
        )  # the first parameter in the model's order whose gradient is not finite
    assert len(losses) == 1
    assert losses[0].startswith("step 3, micro-batch 6:")
    assert not [text for text in results[0]["warnings"] if "the loss on rank" in text]


def diverging(stage: int) -> tuple[int, str]:
    engine = engine_for(stage)
    for step in range(2 * MAX_SKIPPED_IN_A_ROW):
        x, y = batch(0, ROWS)
        engine.backward(loss_of(engine(x), y * math.nan))
        try:
            engine.step()
        except zc.TrainingDivergedError as error:
            return step + 1, str(error)
    return 0, ""


@pytest.mark.parametrize("stage", [0, 3])
def test_many_bad_steps_in_a_row_are_an_error_on_every_rank(stage: int) -> None:
    for steps, text in run_ranks(2, diverging, stage):
        assert steps == MAX_SKIPPED_IN_A_ROW
        assert "'scale'" in text
        assert "smaller learning rate" in text


# -- misuse --------------------------------------------------------------------------------------------------


def test_calls_in_the_wrong_order() -> None:
    engine = engine_for(2, settings={"accumulation": 2})
    x, y = micro_batch(engine, 0, 0)
    with pytest.raises(RuntimeError, match=r"step\(\) before backward"):
        engine.step()
    with pytest.raises(RuntimeError, match=r"backward\(\) before a forward"):
        engine.backward(loss_of(engine.module(x), y))
    engine.backward(loss_of(engine(x), y))
    with pytest.raises(RuntimeError, match="flush"):
        engine.flush()
    with pytest.raises(RuntimeError, match=r"backward\(\) twice without step\(\)"):
        engine.backward(loss_of(engine(x), y))
    engine.step()
    with pytest.raises(RuntimeError, match=r"step\(\) before backward"):
        engine.step()


def test_losses_that_are_none() -> None:
    engine = engine_for(0)
    x, _ = micro_batch(engine, 0, 0)
    with pytest.raises(ValueError, match=r"shape \(4, 5\)"):
        engine.backward(engine(x))
    with pytest.raises(TypeError, match="not a float"):
        engine.backward(1.0)
    with torch.no_grad():
        output = engine(x)
    with pytest.raises(ValueError, match="no_grad"):
        engine.backward(output.sum())


def test_initialize_without_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model is None"):
        zc.initialize(config={"train_batch_size": 1})
    with pytest.raises(TypeError, match="model is a dict"):
        zc.initialize(model={}, config={"train_batch_size": 1})
    with pytest.raises(ValueError, match="no configuration"):
        zc.initialize(model=build("Plain"))
    with pytest.raises(ValueError, match="config, config_params"):
        zc.initialize(
            model=build("Plain"), config={"train_batch_size": 1}, config_params={"train_batch_size": 2}
        )
    with pytest.raises(NotImplementedError, match="mpu"):
        zc.initialize(model=build("Plain"), config={"train_batch_size": 1}, mpu=object())
    with pytest.raises(zc.ConfigError, match="did you mean 'train_batch_size'"):
        zc.initialize(model=build("Plain"), config={"train_batchsize": 1})
    with pytest.raises(ValueError, match="scheduler but no optimizer"):
        zc.initialize(
            model=build("Plain"),
            config={"train_batch_size": 1, "scheduler": {"type": "WarmupLR", "params": {}}},
        )
    with pytest.raises(TypeError, match="has no length"):
        zc.initialize(
            model=build("Plain"), config={"train_batch_size": 1}, training_data=(i for i in range(3))
        )


@pytest.mark.parametrize("spelling", ["--deepspeed --deepspeed_config FILE", "--deepspeed FILE"])
def test_the_script_s_arguments_name_the_config(tmp_path: Path, spelling: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(1, ROWS)))
    parser = zc.add_config_arguments(argparse.ArgumentParser())
    assert not parser.parse_args([]).deepspeed
    arguments = parser.parse_args(spelling.replace("FILE", str(path)).split())
    assert arguments.deepspeed
    engine = zc.initialize(args=arguments, model=build("Plain"))[0]
    assert engine.zero_optimization_stage() == 1


def test_moving_or_casting_the_engine_is_refused() -> None:
    engine = engine_for(3)
    assert engine.to("cpu") is engine
    assert engine.float() is engine
    with pytest.raises(RuntimeError, match="before initialize"):
        engine.half()
    with pytest.raises(RuntimeError, match="before initialize"):
        engine.to("meta")


def test_attributes_of_the_model_show_through() -> None:
    engine = engine_for(0)
    assert engine.inner is engine.module.inner
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing


def test_an_engine_is_collected() -> None:
    engine = engine_for(3)
    train(engine, 1)
    reference = weakref.ref(engine.module.inner.weight)
    del engine
    gc.collect()
    assert reference() is None


# -- the data loader -----------------------------------------------------------------------------------------


def taken(loader: zc.ShardedDataLoader) -> list[list[int]]:
    return [indices.tolist() for indices in loader]


def loaders(world: int, length: int, batch_size: int, **how: Any) -> list[zc.ShardedDataLoader]:
    return [zc.ShardedDataLoader(range(length), batch_size, rank, world, **how) for rank in range(world)]


@pytest.mark.parametrize(
    ("world", "length", "batch_size"), [(1, 10, 3), (2, 16, 4), (2, 17, 4), (3, 25, 2), (3, 4, 5)]
)
def test_ranks_share_the_data(world: int, length: int, batch_size: int) -> None:
    parts = [taken(loader) for loader in loaders(world, length, batch_size)]
    assert len({tuple(map(len, part)) for part in parts}) == 1  # the same sizes on every rank
    everything_taken = [index for part in parts for indices in part for index in indices]
    assert set(everything_taken) == set(range(length))
    assert len(everything_taken) - length < world  # at most N - 1 twice
    assert len(parts[0]) == len(loaders(world, length, batch_size)[0])
    kept = (
        [taken(loader) for loader in loaders(world, length, batch_size, drop_last=True)]
        if length >= 10
        else []
    )
    for part, all_of_it in zip(kept, parts):
        whole = [indices for indices in all_of_it if len(indices) == batch_size]
        assert part == whole[: length // (world * batch_size)]


def test_epochs_have_orders_of_their_own_that_the_seed_decides() -> None:
    one, two, other = (zc.ShardedDataLoader(range(20), 4, seed=seed) for seed in (1, 1, 2))
    first, second = taken(one), taken(one)
    assert first != second
    assert one.epoch == 2
    assert taken(two) == first
    two.set_epoch(7)
    two.set_epoch(1)
    assert taken(two) == second
    assert taken(other) != first
    assert taken(zc.ShardedDataLoader(range(5), 2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_a_loop_goes_on_where_the_last_one_stopped() -> None:
    loader, whole = (zc.ShardedDataLoader(range(20), 4) for _ in range(2))
    expected = taken(whole)
    begun = [next(iter(loader)).tolist() for _ in range(2)]
    assert begun == expected[:2]
    loader.set_epoch(0)  # the epoch that is running: no change
    assert taken(loader) == expected[2:]
    loader.set_epoch(0)
    assert taken(loader) == expected


def test_a_place_is_good_on_any_number_of_ranks() -> None:
    before = loaders(2, 24, 2)
    begun = [[next(iter(loader)).tolist() for _ in range(3)] for loader in before]  # 12 samples
    assert before[0].state_dict() == before[1].state_dict()
    after = loaders(3, 24, 2, seed=99)
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    rest = [taken(loader) for loader in after]  # two micro-batches of each
    everything_taken = [i for part in begun + rest for indices in part for i in indices]
    assert sorted(everything_taken) == list(range(24))
    with pytest.raises(ValueError, match="24 samples, this one has 30"):
        zc.ShardedDataLoader(range(30), 2).load_state_dict(before[0].state_dict())


def test_a_loop_that_is_out_of_date_says_so() -> None:
    loader = zc.ShardedDataLoader(range(20), 4)
    loop = iter(loader)
    next(loop)
    loader.load_state_dict({"epoch": 0, "samples": 8, "seed": 0, "length": 20})
    with pytest.raises(RuntimeError, match="begin a new one"):
        next(loop)


def test_the_loader_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    taken(zc.ShardedDataLoader(range(20), 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loader_takes_workers_and_a_collate_function() -> None:
    loader = zc.ShardedDataLoader(range(6), 2, shuffle=False, num_workers=1, collate_fn=lambda items: items)
    batches = []
    for items in loader:
        batches.append(items)
        if len(batches) == 1:
            assert loader.samples == 2  # what was handed out, not what the worker has fetched
    assert batches == [[0, 1], [2, 3], [4, 5]]


def test_a_data_set_that_is_too_small() -> None:
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu smaller"):
        zc.ShardedDataLoader(range(7), 4, world_size=2, drop_last=True)
    with pytest.raises(ValueError, match="0 samples"):
        zc.ShardedDataLoader([], 4)


def masks(_: int) -> tuple[list[float], torch.Tensor]:
    engine = everything(0, seed=zc.get_rank())
    return train_everything(engine, 1), torch.rand(3)


def test_a_seed_gives_each_rank_dropout_of_its_own_and_the_same_again() -> None:
    (_, one), (_, two) = run_ranks(2, masks, 0)
    assert not torch.equal(one, two)
    (_, again), _ = run_ranks(2, masks, 0)
    assert torch.equal(one, again)


# -- whole tensors -------------------------------------------------------------------------------------------


def accessors(stage: int) -> dict[str, Any]:
    engine = engine_for(stage, build("Unused"), settings={"gradient_clipping": 0.0})
    x, y = micro_batch(engine, 0, 0)
    result: dict[str, Any] = {"gradients": {}, "params": {}, "moments": {}}
    params = dict(engine.module.named_parameters())
    assert zc.safe_get_full_optimizer_state(params["always.weight"], "exp_avg") is None
    engine.backward(loss_of(engine(x), y))
    for name, param in params.items():
        result["gradients"][name] = zc.safe_get_full_grad(param)
    engine.step()
    assert zc.safe_get_full_grad(params["always.weight"]) is None
    for name, param in params.items():
        result["params"][name] = zc.safe_get_full_fp32_param(param)
        result["moments"][name] = zc.safe_get_full_optimizer_state(param, "exp_avg")
    with pytest.raises(KeyError, match="'exp_avg', 'exp_avg_sq'"):
        zc.safe_get_full_optimizer_state(params["always.weight"], "momentum_buffer")
    with pytest.raises(ValueError, match="no parameter of an engine"):
        zc.safe_get_full_grad(torch.zeros(2, 3))
    return result


@pytest.mark.parametrize("stage", STAGES)
def test_whole_parameters_gradients_and_optimizer_states(stage: int) -> None:
    model = build("Unused")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    x, y = batch(0, 3 * ROWS)
    loss_of(model(x), y).backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    optimizer.step()
    for result in run_ranks(3, accessors, stage):
        for name, param in model.named_parameters():
            torch.testing.assert_close(result["params"][name], param.detach())
            if name.startswith("never"):
                assert result["gradients"][name] is None
                assert result["moments"][name] is None
            else:
                torch.testing.assert_close(result["gradients"][name], gradients[name])
                torch.testing.assert_close(result["moments"][name], optimizer.state[param]["exp_avg"])


# -- the model in 16 bits ------------------------------------------------------------------------------------


def saved_in_16_bits(folder: str, name: str, allowed: bool) -> bool:
    zero = {"stage3_gather_16bit_weights_on_model_save": allowed}
    engine = engine_for(3, build("Tied"), settings={"zero_optimization": zero})
    return engine.save_16bit_model(folder, name)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_the_whole_model_in_16_bits(tmp_path: Path, name: str) -> None:
    assert run_ranks(2, saved_in_16_bits, str(tmp_path), name, False) == [False, False]
    assert not list(tmp_path.iterdir())
    assert run_ranks(2, saved_in_16_bits, str(tmp_path), name, True) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if name.endswith("bin"):
        state = torch.load(tmp_path / name, weights_only=True)
    else:
        from safetensors.torch import load_file

        state = load_file(tmp_path / name)
    expected = build("Tied").state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value.bfloat16())


def test_the_reading_of_features_is_no_token_count() -> None:
    """Tokens a second are told only where the input is of tokens."""
    from zero_course.engine.engine import _tokens_in

    assert _tokens_in(((torch.zeros(2, FEATURES),), {})) == 0
    assert _tokens_in(((), {"input_ids": torch.zeros(2, 5, dtype=torch.long)})) == 10
    assert len(Tokens()) == 54
