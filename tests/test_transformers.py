"""Models from transformers, with random weights, train under every stage as they do in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zero_course as zc

VOCABULARY, LENGTH, ROWS, STEPS = 61, 12, 2, 4
NAMES = ("gpt2", "llama")


def configuration(name: str) -> Any:
    from transformers import GPT2Config, LlamaConfig

    if name == "gpt2":
        return GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=24, n_layer=3, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    return LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_size=24, intermediate_size=40,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.0,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip


def build(name: str, seed: int = 0) -> nn.Module:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

    torch.manual_seed(seed)
    return {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}[name](configuration(name))


def tokens(step: int, world: int) -> torch.Tensor:
    """The joined batch of a step: (world · ROWS, LENGTH) int64."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (world * ROWS, LENGTH), generator=generator)


def settings(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 2000}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 2000}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
    }


def losses_of(engine: zc.Engine, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        mine = tokens(step, engine.world_size)[ROWS * engine.global_rank :][:ROWS]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(name: str, stage: int, in_pieces: bool, folder: str) -> tuple[list[float], dict[str, Any], int]:
    """Losses, the whole state dict, and the most elements that were gathered at once."""
    if in_pieces:
        with zc.zero.Init(stage3_param_persistence_threshold=100):
            model = build(name, seed=zc.get_rank())
    else:
        model = build(name, seed=zc.get_rank())
    engine = zc.initialize(model=model, config=settings(stage))[0]
    losses = losses_of(engine, STEPS - 1)
    engine.save_checkpoint(folder)
    losses += losses_of(engine, 1, STEPS - 1)
    peak = engine.rung.peak_gathered_elements if stage == 3 else 0
    state = {key: value.clone() for key, value in engine.rung.full_state_dict().items()}
    again = zc.initialize(model=build(name, seed=7), config=settings((stage + 1) % 4))[0]
    again.load_checkpoint(folder)
    assert losses_of(again, 1, STEPS - 1) == losses[-1:]
    return losses, state, peak


@pytest.fixture(scope="module", params=NAMES)
def one_process(request: pytest.FixtureRequest) -> tuple[str, dict[str, torch.Tensor], list[float]]:
    """The model's name, and its state dict and losses after training in this process on the joined batches."""
    model = build(request.param)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        batch = tokens(step, 2)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return request.param, copy.deepcopy(model.state_dict()), losses


@pytest.mark.parametrize(("stage", "in_pieces"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
def test_trains_as_in_one_process(one_process: Any, stage: int, in_pieces: bool, tmp_path: Any) -> None:
    name, expected, joined = one_process
    results = run_ranks(2, trained, name, stage, in_pieces, str(tmp_path))
    for _, state, peak in results:
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                state[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )
        if name == "gpt2":
            assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
        total = sum(
            value.numel() for key, value in expected.items() if key != "lm_head.weight" or name == "llama"
        )
        assert (0 < peak < total) == (stage == 3)
    means = [sum(pair) / 2 for pair in zip(results[0][0], results[1][0])]
    assert means == pytest.approx(joined, abs=1e-5)


def generated(name: str) -> tuple[list[int], list[int]]:
    engine = zc.initialize(model=build(name), config=settings(3))[0].eval()
    prompt = tokens(0, 1)[:1, :4]
    with torch.no_grad():
        how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        ours = engine.generate(prompt, **how)
        theirs = build(name).eval().generate(prompt, **how)
    return ours[0].tolist(), theirs[0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_generates_under_stage_3(name: str) -> None:
    for ours, theirs in run_ranks(2, generated, name):
        assert ours == theirs
        assert len(ours) == 9
