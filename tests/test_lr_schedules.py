"""The schedules against DeepSpeed's own values, against their formulas, and as torch schedulers."""

import inspect
import logging
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_course.config import SCHEDULERS as PARAMS
from zero_course.config import load_config
from zero_course.lr_schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)


def make_optimizer(kind=torch.optim.AdamW, lrs=(1e-3, 2e-3)):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": lr} for lr in lrs]
    return kind(groups, lr=1e-3)


def trajectory(schedule, steps):
    """Rates of every group after 0, 1, ..., steps calls of step(), as the optimizer sees them."""
    rates = [[group["lr"] for group in schedule.optimizer.param_groups]]
    for _ in range(steps):
        schedule.step()
        rates.append([group["lr"] for group in schedule.optimizer.param_groups])
    return rates


# DeepSpeed 0.19.8, torch 2.13.0: AdamW with two groups at 1e-3 and 2e-3; the rates that each group has after this
# many calls of step(), printed to 12 digits. The same comparison over 3540 settings and 420 steps each agrees to 2e-14.
STEPS = [0, 1, 2, 3, 5, 9, 10, 11, 12, 15, 20, 21, 25, 31, 60]
DEEPSPEED = [
    (
        WarmupLR,
        {"warmup_min_lr": 1e-4, "warmup_max_lr": [1e-2, 2e-2], "warmup_num_steps": 10},
        [1e-4, 1e-4, 0.00308019695707, 0.00482350042172, 0.00701980304293, 0.00954700084345, *[0.01] * 9],
        [1e-4, 1e-4, 0.00609049691371, 0.00959471296892, 0.0140095030863, 0.0190894259378, *[0.02] * 9],
    ),
    (
        WarmupLR,
        {"warmup_num_steps": 10, "warmup_type": "linear"},
        [0, 0, 0.0001, 0.0002, 0.0004, 0.0008, 0.0009, *[0.001] * 8],
        [0, 0, 0.0002, 0.0004, 0.0008, 0.0016, 0.0018, *[0.002] * 8],
    ),
    (
        WarmupDecayLR,
        {"total_num_steps": 30, "warmup_max_lr": 1e-2, "warmup_num_steps": 10},
        [0, 0, 0.00301029995664, 0.0047712125472, 0.00698970004336, 0.00954242509439, 0.01, 0.01]
        + [0.0095, 0.008, 0.0055, 0.005, 0.003, 0, 0],
        None,
    ),
    (
        WarmupDecayLR,
        {"total_num_steps": 30, "warmup_min_lr": 1e-4, "warmup_num_steps": 10, "warmup_type": "linear"},
        [0.0001, 0.0001, 0.00019, 0.00028, 0.00046, 0.00082, 0.00091, 0.001]
        + [0.000955, 0.00082, 0.000595, 0.00055, 0.00037, 0.0001, 0.0001],
        None,
    ),
    (
        WarmupCosineLR,
        {"total_num_steps": 30, "warmup_num_steps": 10, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05},
        [0, 0.0001, 0.000370926996098, 0.000529409129248, 0.000729073003902, 0.000958818258495, 0.001]
        + [0.000994151961783, 0.00097675184524, 0.000860875721064, 0.000525, 0.000450693629106]
        + [0.000189124278936, 5e-05, 5e-05],
        [0, 0.0002, 0.000741853992195, 0.0010588182585, 0.0014581460078, 0.00191763651699, 0.002]
        + [0.00198830392357, 0.00195350369048, 0.00172175144213, 0.00105, 0.000901387258212]
        + [0.000378248557873, 0.0001, 0.0001],
    ),
    (
        WarmupCosineLR,
        {"total_num_steps": 20, "warmup_num_steps": 5, "warmup_type": "linear"},
        [0, 0, 0.0002, 0.0004, 0.0008, 0.000834581846649, 0.000750025, 0.000654543046338]
        + [0.000552309005211, 0.000250075, 1e-07, 1e-07, 1e-07, 1e-07, 1e-07],
        [0, 0, 0.0004, 0.0008, 0.0016, 0.0016691636933, 0.00150005, 0.00130908609268]
        + [0.00110461801042, 0.00050015, 2e-07, 2e-07, 2e-07, 2e-07, 2e-07],
    ),
    (
        OneCycle,
        {"cycle_min_lr": [1e-4, 2e-4], "cycle_max_lr": 1e-2, "cycle_first_step_size": 10},
        [1e-4, 0.00109, 0.00208, 0.00307, 0.00505, 0.00901, 0.01, 0.00901, 0.00802, 0.00505, *[1e-4] * 5],
        [2e-4, 0.00118, 0.00216, 0.00314, 0.0051, 0.00902, 0.01, 0.00902, 0.00804, 0.0051, *[2e-4] * 5],
    ),
    (
        OneCycle,
        {
            **{"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 10},
            **{"cycle_second_step_size": 5, "cycle_first_stair_count": 5, "cycle_second_stair_count": 2},
            **{"decay_lr_rate": 0.5, "decay_step_size": 4},
        },
        [0.0001, 0.0001, 0.00208, 0.00208, 0.00406, 0.00802, 0.01, 0.00505, 0.00505, 0.0001]
        + [6.15384615385e-05, 5.71428571429e-05, 4.44444444444e-05, 3.33333333333e-05, 1.50943396226e-05],
        None,
    ),
    (
        LRRangeTest,
        {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 5},
        [0.0001, 0.00012, 0.00014, 0.00016, 0.0002, 0.00028, 0.0003, 0.00032, 0.00034, 0.0004]
        + [0.0005, 0.00052, 0.0006, 0.00072, 0.0013],
        None,
    ),
    (
        LRRangeTest,
        {
            **{"lr_range_test_min_lr": [1e-4, 2e-4], "lr_range_test_step_size": 4},
            **{"lr_range_test_step_rate": 2.5, "lr_range_test_staircase": True},
        },
        [*[0.0001] * 4, 0.00035, 0.0006, 0.0006, 0.0006, 0.00085, 0.00085, 0.00135, 0.00135]
        + [0.0016, 0.00185, 0.00385],
        [*[0.0002] * 4, 0.0007, 0.0012, 0.0012, 0.0012, 0.0017, 0.0017, 0.0027, 0.0027]
        + [0.0032, 0.0037, 0.0077],
    ),
]


@pytest.mark.parametrize(("cls", "params", "first", "second"), DEEPSPEED)
def test_rates_are_deepspeeds(cls, params, first, second):
    rates = trajectory(cls(make_optimizer(), **params), STEPS[-1])
    assert [rates[step][0] for step in STEPS] == pytest.approx(first, rel=1e-11, abs=1e-18)
    assert [rates[step][1] for step in STEPS] == pytest.approx(second or first, rel=1e-11, abs=1e-18)


# DeepSpeed 0.19.8: beta1 of the two groups at the same counts of step(); beta2 is 0.99 throughout.
DEEPSPEED_MOMENTA = [
    (
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 10},
        [0.8, 0.89, 0.88, 0.87, 0.85, 0.81, 0.8, 0.81, 0.82, 0.85, 0.9, 0.9, 0.9, 0.9, 0.9],
        None,
    ),
    (
        {
            **{"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 10},
            **{"cycle_second_step_size": 5, "cycle_first_stair_count": 5, "cycle_second_stair_count": 2},
            **{"decay_step_size": 4, "decay_mom_rate": 0.01},
            **{"cycle_min_mom": [0.8, 0.85], "cycle_max_mom": 0.95},
        },
        [0.8, 0.95, 0.92, 0.92, 0.89, 0.83, 0.8, 0.875, 0.875, 0.95]
        + [0.961875, 0.96425, 0.97375, 0.988, 1.056875],
        [0.85, 0.95, 0.93, 0.93, 0.91, 0.87, 0.85, 0.9, 0.9, 0.95]
        + [0.961875, 0.96425, 0.97375, 0.988, 1.056875],
    ),
]


@pytest.mark.parametrize(("params", "first", "second"), DEEPSPEED_MOMENTA)
def test_momenta_are_deepspeeds(params, first, second):
    schedule = OneCycle(make_optimizer(), **params)
    betas = [[group["betas"] for group in schedule.optimizer.param_groups]]
    for _ in range(STEPS[-1]):
        schedule.step()
        betas.append([group["betas"] for group in schedule.optimizer.param_groups])
    assert [betas[step][0][0] for step in STEPS] == pytest.approx(first, rel=1e-11)
    assert [betas[step][1][0] for step in STEPS] == pytest.approx(second or first, rel=1e-11)
    assert {beta2 for step in betas for _, beta2 in step} == {0.99}


# ---- the formulas as properties -----------------------------------------------------------------------------

warmups = st.integers(1, 60)
kinds = st.sampled_from(["log", "linear"])
some = settings(max_examples=60, deadline=None)


@some
@given(warmups, kinds, st.floats(0, 1e-3), st.floats(1e-3, 1))
def test_warmup_rises_from_min_to_max_and_stays(warmup, kind, low, high):
    rates = [r[0] for r in trajectory(WarmupLR(make_optimizer(), low, high, warmup, kind), 100)]
    assert rates[0] == rates[1] == low  # counts -1 and 0
    assert rates == sorted(rates)
    assert rates[max(2, warmup) + 1 :] == pytest.approx([high] * (100 - max(2, warmup)))
    if warmup > 2:
        share = math.log(2) / math.log(warmup) if kind == "log" else 1 / warmup
        assert rates[2] == pytest.approx(low + (high - low) * share)


@some
@given(warmups, kinds, st.integers(2, 90))
def test_decay_falls_in_a_line_to_zero_at_the_total(warmup, kind, total):
    rates = [r[0] for r in trajectory(WarmupDecayLR(make_optimizer(), total, 0.0, 0.5, warmup, kind), 100)]
    after = max(2, warmup) + 1  # count t is index t + 1
    if total > max(2, warmup):
        slope = 0.5 / (total - max(2, warmup))
        falls = [a - b for a, b in zip(rates[after:total], rates[after + 1 : total + 1])]
        assert falls == pytest.approx([slope] * len(falls))
        assert rates[after] == pytest.approx(0.5)
    assert rates[max(after, total + 1) :] == [0.0] * (101 - max(after, total + 1))


@some
@given(warmups, kinds, st.integers(2, 90), st.floats(0, 0.5))
def test_cosine_falls_to_its_floor_and_stays(warmup, kind, total, floor):
    schedule = WarmupCosineLR(make_optimizer(), total, 0.0, warmup, floor, kind)
    rates = [r[1] for r in trajectory(schedule, 100)]
    top = max(2, warmup)
    falling = rates[top + 1 :]
    assert falling == sorted(falling, reverse=True)
    assert rates[max(top + 1, total) :] == pytest.approx(
        [2e-3 * floor] * (101 - max(top + 1, total)), abs=1e-12
    )
    middle = (total + top) / 2 - 1  # p = 1/2, half way down
    if middle >= top and middle == int(middle):
        assert rates[int(middle) + 1] == pytest.approx(2e-3 * (1 + floor) / 2)


@some
@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 6), st.integers(0, 6))
def test_one_cycle_is_a_triangle_and_momentum_its_mirror(up, down, stairs_up, stairs_down):
    schedule = OneCycle(
        make_optimizer(),
        *(0.1, 1.1),
        cycle_first_step_size=up,
        cycle_second_step_size=down,
        cycle_first_stair_count=stairs_up,
        cycle_second_stair_count=stairs_down,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
    )
    rates, momenta = [0.1], [0.9]
    for _ in range(up + down + 5):
        schedule.step()
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        momenta.append(schedule.optimizer.param_groups[0]["betas"][0])
    assert momenta == pytest.approx([0.9 - 0.1 * (rate - 0.1) for rate in rates])
    assert rates[-5:] == pytest.approx([0.1] * 5)
    if down:
        assert rates[up] == max(rates) == pytest.approx(1.1)
        assert rates[: up + 1] == sorted(rates[: up + 1])
        assert rates[up:] == sorted(rates[up:], reverse=True)
    if stairs_up:
        assert len({round(rate, 9) for rate in rates[:up]}) <= stairs_up


@some
@given(st.integers(1, 30), st.floats(0, 3))
def test_range_test_grows_by_the_rate_each_interval(interval, rate):
    smooth = trajectory(LRRangeTest(make_optimizer(), 0.01, interval, rate), 100)
    stairs = trajectory(LRRangeTest(make_optimizer(), 0.01, interval, rate, True), 100)
    for step in range(0, 101 - interval):
        assert smooth[step + interval][0] - smooth[step][0] == pytest.approx(0.01 * rate, abs=1e-12)
        assert stairs[step][0] <= smooth[step][0] + 1e-12
    for step in range(0, 101, interval):
        assert stairs[step][0] == pytest.approx(smooth[step][0])


# ---- as torch schedulers --------------------------------------------------------------------------------------

EXAMPLES = {
    "LRRangeTest": {"lr_range_test_step_size": 7},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 9, "decay_step_size": 3},
    "WarmupLR": {"warmup_num_steps": 10},
    "WarmupDecayLR": {"warmup_num_steps": 10, "total_num_steps": 40},
    "WarmupCosineLR": {"warmup_num_steps": 10, "total_num_steps": 40},
}
each_schedule = pytest.mark.parametrize("name", sorted(EXAMPLES))


def test_examples_are_all_schedules():
    assert EXAMPLES.keys() == SCHEDULES.keys() == PARAMS.keys()


@each_schedule
def test_get_lr_and_get_last_lr_are_what_the_optimizer_has(name):
    schedule = SCHEDULES[name](make_optimizer(), **EXAMPLES[name])
    for _ in range(30):
        have = [group["lr"] for group in schedule.optimizer.param_groups]
        assert schedule.get_last_lr() == schedule.get_lr() == have
        schedule.step()
    schedule.get_last_lr()[0] = 99  # a caller's list, not the schedule's
    assert schedule.get_last_lr() == schedule.get_lr()


@each_schedule
@pytest.mark.parametrize("done", [0, 1, 13, 30])
def test_resuming_from_state_goes_on_exactly(name, done):
    whole = SCHEDULES[name](make_optimizer(), **EXAMPLES[name])
    expected = trajectory(whole, 50)
    first = SCHEDULES[name](make_optimizer(), **EXAMPLES[name])
    trajectory(first, done)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    # The new optimizer's rates are others, as when its own state is loaded first: the saved ones must count.
    again = SCHEDULES[name](make_optimizer(lrs=(0.7, 0.9)), **EXAMPLES[name])
    again.load_state_dict(state)
    assert trajectory(again, 50 - done) == expected[done:]
    betas = [[group["betas"] for group in s.optimizer.param_groups] for s in (whole, again)]
    assert betas[0] == betas[1]


@each_schedule
def test_deepspeeds_own_state_is_enough(name):
    schedule = SCHEDULES[name](make_optimizer(), **EXAMPLES[name])
    expected = trajectory(schedule, 21)[-1]
    other = SCHEDULES[name](make_optimizer(), **EXAMPLES[name])
    other.load_state_dict({"last_batch_iteration": 19})
    other.step()
    assert other.get_last_lr() == expected
    assert other.last_batch_iteration == 20


@each_schedule
def test_state_of_another_number_of_groups_is_refused(name):
    state = SCHEDULES[name](make_optimizer(lrs=(1e-3,)), **EXAMPLES[name]).state_dict()
    with pytest.raises(ValueError, match="1 parameter groups, this optimizer has 2"):
        SCHEDULES[name](make_optimizer(), **EXAMPLES[name]).load_state_dict(state)


@each_schedule
def test_last_batch_iteration_starts_in_the_middle_without_touching_the_optimizer(name):
    expected = trajectory(SCHEDULES[name](make_optimizer(), **EXAMPLES[name]), 20)[-1]
    optimizer = make_optimizer()
    schedule = SCHEDULES[name](optimizer, **EXAMPLES[name], last_batch_iteration=18)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 2e-3] == schedule.get_last_lr()
    schedule.step()
    assert schedule.get_last_lr() == expected


@each_schedule
def test_step_can_jump(name):
    expected = trajectory(SCHEDULES[name](make_optimizer(), **EXAMPLES[name]), 20)[-1]
    schedule = SCHEDULES[name](make_optimizer(), **EXAMPLES[name])
    schedule.step(19)
    assert schedule.get_last_lr() == expected


def test_an_optimizer_may_be_wrapped_and_nothing_else():
    class Wrapper:
        optimizer = make_optimizer()

    schedule = LRRangeTest(Wrapper(), 0.5)
    assert Wrapper.optimizer.param_groups[0]["lr"] == 0.5
    assert schedule.optimizer is Wrapper.optimizer
    with pytest.raises(TypeError, match="param_groups, got Linear"):
        WarmupLR(torch.nn.Linear(1, 1))


def test_a_tensor_rate_is_written_in_place():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5), foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    for _ in range(3):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.25)


def test_a_schedule_drives_real_training():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule = WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    seen = []
    for _ in range(4):
        before = weight.item()
        weight.grad = torch.ones(1)
        optimizer.step()
        schedule.step()
        seen.append(before - weight.item())
    assert seen == pytest.approx([0.0, 0.0, 0.05, 0.1], abs=1e-7)


def test_one_cycle_leaves_an_optimizer_without_betas_its_momentum(caplog):
    optimizer = make_optimizer(torch.optim.SGD)
    with caplog.at_level(logging.WARNING):
        schedule = OneCycle(optimizer, 0.1, 1.0)
    assert "SGD has no betas" in caplog.text
    schedule.step()
    assert schedule.get_mom() is None
    assert "betas" not in optimizer.param_groups[0]


def test_one_cycle_can_keep_the_betas():
    optimizer = make_optimizer()
    OneCycle(optimizer, 0.1, 1.0, cycle_momentum=False).step()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_one_cycle_warns_once_when_momentum_leaves_adams_range(caplog):
    schedule = OneCycle(make_optimizer(lrs=(1e-3,)), 0.1, 1.0, 0.0, 2, decay_step_size=1, decay_mom_rate=0.1)
    with caplog.at_level(logging.WARNING):
        trajectory(schedule, 12)
    assert caplog.text.count("Adam needs < 1") == 1


@pytest.mark.parametrize(
    ("cls", "params", "message"),
    [
        (WarmupLR, {"warmup_num_steps": 0}, "warmup_num_steps must be > 0, got 0"),
        (WarmupLR, {"warmup_type": "cosine"}, "warmup_type must be 'log' or 'linear', got 'cosine'"),
        (WarmupLR, {"warmup_max_lr": [1.0]}, "warmup_max_lr has 1 values for 2 parameter groups"),
        (WarmupLR, {"warmup_min_lr": [0.1] * 3}, "warmup_min_lr has 3 values for 2 parameter groups"),
        (
            WarmupDecayLR,
            {"total_num_steps": 9, "warmup_num_steps": -1},
            "warmup_num_steps must be > 0, got -1",
        ),
        (WarmupCosineLR, {"total_num_steps": 9, "warmup_num_steps": 0}, "warmup_num_steps must be > 0"),
        (
            OneCycle,
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0},
            "first_step_size must be > 0",
        ),
        (
            OneCycle,
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": -1},
            "second_step_size must be >= 0",
        ),
        (OneCycle, {"cycle_min_lr": 0, "cycle_max_lr": [1]}, "cycle_max_lr has 1 values"),
        (
            OneCycle,
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_min_mom": [0.8]},
            "cycle_min_mom has 1 values",
        ),
        (LRRangeTest, {"lr_range_test_step_size": 0}, "lr_range_test_step_size must be > 0, got 0"),
        (LRRangeTest, {"lr_range_test_min_lr": [1, 2, 3]}, "lr_range_test_min_lr has 3 values"),
    ],
)
def test_wrong_values_are_named_and_leave_the_optimizer_alone(cls, params, message):
    optimizer = make_optimizer()
    with pytest.raises(ValueError, match=message):
        cls(optimizer, **params)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 2e-3]


@pytest.mark.parametrize("cls", [WarmupDecayLR, WarmupCosineLR])
def test_a_warm_up_longer_than_the_training_warns(cls, caplog):
    with caplog.at_level(logging.WARNING):
        cls(make_optimizer(), total_num_steps=5, warmup_num_steps=9)
    assert "total_num_steps 5 < warmup_num_steps 9" in caplog.text


# ---- from a config --------------------------------------------------------------------------------------------


@each_schedule
def test_build_scheduler_makes_the_configs_schedule(name):
    config = load_config({"train_batch_size": 2, "scheduler": {"type": name, "params": EXAMPLES[name]}}, 2)
    built = build_scheduler(config, make_optimizer())
    assert type(built) is SCHEDULES[name]
    assert trajectory(built, 30) == trajectory(SCHEDULES[name](make_optimizer(), **EXAMPLES[name]), 30)


def test_build_scheduler_without_a_section_is_none():
    assert build_scheduler(load_config({"train_batch_size": 2}, 2), make_optimizer()) is None


def test_build_scheduler_takes_one_rate_a_group():
    section = {"type": "WarmupLR", "params": {"warmup_min_lr": [0.25, 0.5]}}
    optimizer = make_optimizer()
    build_scheduler(load_config({"train_batch_size": 2, "scheduler": section}, 2), optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]


@each_schedule
def test_the_configs_parameters_are_the_classes_own(name):
    """One list of names and defaults, kept in two places: the schema and the class's signature."""
    signature = inspect.signature(SCHEDULES[name]).parameters
    in_class = {n: p.default for n, p in signature.items() if n != "optimizer"}
    required = inspect.Parameter.empty
    in_schema = {n: required if f.is_required() else f.default for n, f in PARAMS[name].model_fields.items()}
    assert in_schema == in_class
