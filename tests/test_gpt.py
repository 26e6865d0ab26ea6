"""The course's GPT: causal, of the size that its formula says, initialised as stated, able to learn."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zero_course as zc
from zero_course.models import GPT, GPTConfig

SMALL = dict(vocab_size=31, n_layer=2, n_head=2, d_model=16, block_size=12)


def build(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **changes}))


def tokens(batch: int, time: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SMALL["vocab_size"], (batch, time), generator=torch.Generator().manual_seed(seed))


def test_shapes() -> None:
    model = build()
    x = tokens(3, 7)
    assert model(x).shape == (3, 7, 31)
    assert model(x, x).shape == ()


def test_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model = build()
    x, y = tokens(3, 7), tokens(3, 7, seed=2)
    log_p = model(x).log_softmax(dim=-1)
    expected = -sum(log_p[b, t, y[b, t]] for b in range(3) for t in range(7)) / 21
    assert torch.allclose(model(x, y), expected, atol=1e-6)


def test_the_future_does_not_change_the_past() -> None:
    model = build()
    x = tokens(2, 12)
    changed = x.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % SMALL["vocab_size"]
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert (before[:, 8:] != after[:, 8:]).any(dim=-1).all()


def test_the_past_changes_the_future() -> None:
    model = build()
    x = tokens(2, 12)
    changed = x.clone()
    changed[:, 0] = (changed[:, 0] + 1) % SMALL["vocab_size"]
    assert (model(x) != model(changed)).any(dim=-1).all()


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("shape", [{}, dict(n_layer=1, d_model=24, n_head=3, vocab_size=7, block_size=5)])
def test_parameter_count_follows_the_formula(tie: bool, shape: dict[str, int]) -> None:
    model = build(tie_embeddings=tie, **shape)
    assert model.num_parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_gpt2_has_as_many_parameters_as_the_published_model() -> None:
    """124,439,808: GPT-2 small as published (vocabulary 50257, 12 layers, 12 heads, width 768, 1024 positions)."""
    config = GPTConfig(vocab_size=50257, n_layer=12, n_head=12, d_model=768, block_size=1024)
    assert config.num_parameters() == 124_439_808
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in GPT(config).parameters()) == 124_439_808


def test_tied_embedding_is_one_tensor() -> None:
    tied, untied = build(), build(tie_embeddings=False)
    assert tied.head.weight is tied.token_embedding.weight
    assert untied.head.weight is not untied.token_embedding.weight
    assert untied.num_parameters() - tied.num_parameters() == 31 * 16
    tied(tokens(2, 5), tokens(2, 5, seed=2)).backward()
    unseen = [t for t in range(31) if t not in tokens(2, 5)]
    assert tied.token_embedding.weight.grad[unseen].abs().sum() > 0, "no gradient from the output layer"


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    model = build(vocab_size=256, d_model=64)
    x = torch.randint(0, 256, (8, 12))
    y = torch.randint(0, 256, (8, 12))
    assert model(x, y).item() == pytest.approx(math.log(256), abs=0.1)


def test_initial_values_are_gpt2s() -> None:
    model = build(vocab_size=500, d_model=128, n_layer=8)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight")))), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            is_residual = name.endswith(("attention.proj.weight", "mlp.fc_proj.weight"))
            std = 0.02 / math.sqrt(2 * 8) if is_residual else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
            assert parameter.mean().item() == pytest.approx(0.0, abs=0.1 * std), name


def test_each_leaf_initialises_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a leaf's ``__init__`` returns, its values are final: ``zero.Init`` may take them away at once."""
    leaves: list[tuple[nn.Module, list[torch.Tensor]]] = []

    def remember(cls: type[nn.Module]) -> None:
        original = cls.__init__

        def wrapped(self: nn.Module, *args: object, **kwargs: object) -> None:
            original(self, *args, **kwargs)
            leaves.append((self, [p.detach().clone() for p in self.parameters()]))

        monkeypatch.setattr(cls, "__init__", wrapped)

    for cls in (nn.Linear, nn.Embedding, nn.LayerNorm):
        remember(cls)
    model = build(tie_embeddings=False)
    assert sum(len(values) for _, values in leaves) == len(list(model.parameters()))
    for module, values in leaves:
        for parameter, value in zip(module.parameters(), values):
            assert torch.equal(parameter, value), type(module).__name__


def test_it_computes_what_gpt2_of_transformers_computes() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=31, n_layer=2, n_head=2, n_embd=16, n_positions=12, initializer_range=0.5
    )  # values far from 0, so that the two kinds of GELU differ
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(config).eval()
    names = {
        "transformer.wte": "token_embedding", "transformer.wpe": "position_embedding", "transformer.ln_f": "norm",
        "transformer.h": "blocks", "ln_1": "attention_norm", "ln_2": "mlp_norm", "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.proj", "mlp.c_fc": "mlp.fc", "mlp.c_proj": "mlp.fc_proj", "lm_head": "head",
    }  # fmt: skip
    state = {}
    for name, value in theirs.state_dict().items():
        transpose = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))  # kept as (in, out)
        for their_name, our_name in names.items():
            name = name.replace(their_name, our_name)
        state[name] = value.t() if transpose else value
    ours = build()
    ours.load_state_dict(state)
    with torch.no_grad():
        x = tokens(3, 12)
        torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-5, atol=1e-5)


def _state_built_in_shards(tie: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with zc.zero.Init(stage3_param_persistence_threshold=0):
        model = GPT(GPTConfig(**SMALL, tie_embeddings=tie))
    assert model.num_parameters() == build(tie_embeddings=tie).num_parameters()
    return zc.Zero3(model, stage3_param_persistence_threshold=0).full_state_dict()


@pytest.mark.parametrize("tie", [True, False])
def test_built_in_shards_it_has_the_same_values(tie: bool) -> None:
    expected = build(tie_embeddings=tie).state_dict()
    for state in run_ranks(2, _state_built_in_shards, tie):
        assert state.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(state[name], values), name


def test_it_learns_a_batch_by_heart() -> None:
    model = build(d_model=32)
    x = tokens(4, 12)
    inputs, targets = x[:, :-1], x[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(150):
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    greedy = model.generate(x[:, :1], 11, temperature=0)
    assert (greedy == x).float().mean() > 0.9


def test_checkpointing_changes_memory_and_no_bit_of_the_gradients() -> None:
    def gradients_and_saved_bytes(checkpointing: bool) -> tuple[list[torch.Tensor], int]:
        model = build(activation_checkpointing=checkpointing, n_layer=4, dropout=0.2)
        torch.manual_seed(3)
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens(4, 12), tokens(4, 12, seed=2))
        loss.backward()
        return [parameter.grad for parameter in model.parameters()], sum(saved.values())

    plain, plain_bytes = gradients_and_saved_bytes(False)
    again, checkpointed_bytes = gradients_and_saved_bytes(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again))
    assert checkpointed_bytes < plain_bytes / 3


def test_dropout_acts_in_training_only() -> None:
    model = build(dropout=0.5)
    x = tokens(2, 12)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_generate() -> None:
    model = build(dropout=0.5)
    prompt = tokens(2, 3)
    out = model.generate(prompt, 20)  # runs past block_size 12
    assert out.shape == (2, 23)
    assert torch.equal(out[:, :3], prompt)
    assert out.min() >= 0
    assert out.max() < SMALL["vocab_size"]
    assert model.training, "generate must leave the mode as it was"
    assert not out.requires_grad

    greedy = model.generate(prompt, 8, temperature=0)
    assert torch.equal(greedy, model.generate(prompt, 8, top_k=1))
    model.eval()
    assert torch.equal(greedy[:, 3], model(prompt)[:, -1].argmax(dim=-1))

    def seeded(seed: int) -> torch.Tensor:
        return model.generate(prompt, 8, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(seeded(5), seeded(5))
    assert not torch.equal(seeded(5), seeded(6))


def test_past_its_block_size_it_continues_from_the_latest_tokens() -> None:
    model = build()
    long = tokens(2, 20)
    expected = model(long[:, -12:])[:, -1].argmax(dim=-1)
    assert torch.equal(model.generate(long, 1, temperature=0)[:, -1], expected)


def test_temperature_divides_the_logits() -> None:
    model = build()
    prompt = tokens(1, 4)
    likeliest = model(prompt)[0, -1].argmax()

    def share_of_the_likeliest(temperature: float) -> float:
        drawn = model.generate(prompt.repeat(500, 1), 1, temperature)[:, -1]
        return (drawn == likeliest).float().mean().item()

    for temperature in (0.02, 0.1):
        expected = (model(prompt)[0, -1] / temperature).softmax(dim=-1).max().item()
        assert share_of_the_likeliest(temperature) == pytest.approx(expected, abs=0.08)


def test_top_k_draws_from_the_likeliest_only() -> None:
    model = build()
    prompt = tokens(1, 4).repeat(400, 1)
    likeliest = set(model(prompt[:1])[0, -1].topk(3).indices.tolist())
    drawn = set(model.generate(prompt, 1, temperature=5.0, top_k=3)[:, -1].tolist())
    assert drawn == likeliest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(n_head=3), "d_model 16 is not a multiple of n_head 3; the next one is 18"),
        (dict(n_layer=0), "n_layer 0 must be at least 1"),
        (dict(dropout=1.0), r"dropout 1.0 is not in \[0, 1\)"),
    ],
)
def test_wrong_shapes_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_wrong_calls_are_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match="a sequence of 13 tokens is longer than block_size 12"):
        model(tokens(1, 13))
    with pytest.raises(ValueError, match="temperature -1 is negative"):
        model.generate(tokens(1, 2), 1, temperature=-1)
    with pytest.raises(ValueError, match="top_k 0 must be at least 1"):
        model.generate(tokens(1, 2), 1, top_k=0)
