"""Every rung trains every kind of model as one process would on the joined batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ladder import MODELS, reference, wrapped
from ranks import run_ranks

ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1})
SGD = (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9})
STEPS = 20
TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 2e-2  # 8 bits: gradients of the joined batch and means of the ranks' round differently


def assert_close(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    low_precision = any(value.dtype == torch.bfloat16 for value in expected.values())
    tolerance = BFLOAT16_TOLERANCE if low_precision else TOLERANCE
    for key, value in expected.items():
        torch.testing.assert_close(
            ours[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def assert_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(ours[key], value), f"{key} differs by {(ours[key] - value).abs().max()}"


@pytest.mark.parametrize(
    ("name", "world"), [(n, w) for n in MODELS for w in (1, 2, 3)] + [("Plain", 4), ("Tied", 4)]
)
def test_every_rung_trains_as_one_process_and_as_the_others(name: str, world: int) -> None:
    expected = reference(name, *ADAMW, world=world, steps=STEPS)
    by_stage = {
        stage: run_ranks(world, partial(wrapped, stage, name, *ADAMW, steps=STEPS)) for stage in range(4)
    }
    for results in by_stage.values():
        for state in results[1:]:
            assert_equal(state, results[0])
        assert_close(results[0], expected)
    for stage in (1, 2, 3):
        assert_equal(by_stage[stage][0], by_stage[0][0])


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("micro", [1, 2])
def test_parameter_groups_clipping_and_accumulation(stage: int, micro: int) -> None:
    how = {"steps": STEPS, "groups": True, "micro": micro, "clip": 0.05}
    expected = reference("Plain", *SGD, world=3, **how)
    for state in run_ranks(3, partial(wrapped, stage, "Plain", *SGD, **how)):
        assert_close(state, expected)
