"""The GPT used all through the course: pre-norm, causal, with the output tied to the token embedding.

    x = token embedding + position embedding
    n_layer times:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = norm(x) · (token embedding)ᵀ

as in GPT-2 (Radford et al., 2019, section 2.3). With width d, L layers, vocabulary V and T positions it has

    V·d + T·d + L·(12·d² + 13·d) + 2·d

parameters: a layer holds d → 3d (attention in), d → d (attention out), d → 4d and 4d → d (the MLP), their
biases, and two norms of 2·d. In this file, b is the batch, t the time (tokens in a row), h the number of heads.

Every weight gets its value inside the ``__init__`` of the module that holds it. That is what lets ``zero.Init``
cut the parameters of a module into shards as soon as the module exists, before the next one is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

INIT_STD = 0.02  # GPT-2's standard deviation for all weights; on the residual path less, see Block


@dataclass
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        vocab_size: number of tokens; 256 for bytes.
        n_layer: number of blocks.
        n_head: attention heads in a block; divides ``d_model``.
        d_model: width of the residual stream.
        block_size: longest sequence, in tokens.
        dropout: probability of zeroing an activation, in training only.
        tie_embeddings: one tensor is both the token embedding and the output layer.
        activation_checkpointing: keep only each block's input for backward and compute the rest again
            (Chen et al., 2016): less memory for about one forward pass more.

    Raises:
        ValueError: a size that is not positive, heads that do not divide the width, a dropout outside [0, 1).
    """

    vocab_size: int = 256
    n_layer: int = 4
    n_head: int = 4
    d_model: int = 128
    block_size: int = 128
    dropout: float = 0.0
    tie_embeddings: bool = True
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layer", "n_head", "d_model", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.d_model % self.n_head:
            fitting = -(-self.d_model // self.n_head) * self.n_head
            raise ValueError(
                f"d_model {self.d_model} is not a multiple of n_head {self.n_head}; the next one is {fitting}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout {self.dropout} is not in [0, 1)")

    def num_parameters(self) -> int:
        """Parameters of this shape by the formula at the top of the file, a tied embedding counted once."""
        d = self.d_model
        embeddings = (self.vocab_size + self.block_size) * d
        output = 0 if self.tie_embeddings else self.vocab_size * d
        return embeddings + self.n_layer * (12 * d * d + 13 * d) + 2 * d + output


class GPT(nn.Module):
    """A causal language model.

    Args:
        config: its shape.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.d_model)
        self.position_embedding = Embedding(config.block_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.d_model)
        if config.tie_embeddings:
            self.head = TiedHead(self.token_embedding.weight)
        else:
            self.head = Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the next token at each position, or the loss.

        Args:
            tokens: (b, t) int64, with t up to ``block_size``.
            targets: (b, t) int64, the token that follows each one; -100 leaves a position out of the loss.

        Returns:
            the mean cross-entropy over all positions in nats, a scalar, if there are targets; else the
            logits, (b, t, vocab_size).

        Raises:
            ValueError: a sequence longer than ``block_size``.
        """
        time = tokens.shape[1]
        if time > self.config.block_size:
            raise ValueError(
                f"a sequence of {time} tokens is longer than block_size {self.config.block_size}; "
                f"cut it, or build the model with block_size={time}"
            )
        positions = torch.arange(time, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (b, t, d) + (t, d)
        x = self.dropout(x)
        for block in self.blocks:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.head(self.norm(x))  # (b, t, vocab_size)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Continue each row of ``tokens``, one sampled token at a time, without dropout.

        Args:
            tokens: (b, t) int64 with t >= 1; the model sees the latest ``block_size`` of them.
            max_new_tokens: how many to add.
            temperature: logits are divided by it; 0 takes the likeliest token.
            top_k: sample among the k likeliest tokens only.
            generator: source of randomness. With a sharded model every rank must draw the same tokens, so
                give each rank one with the same seed.

        Returns:
            (b, t + max_new_tokens) int64, the given tokens first.

        Raises:
            ValueError: a negative temperature, or a top_k below 1.
        """
        if temperature < 0:
            raise ValueError(f"temperature {temperature} is negative; 0 is greedy, 1 the model's own")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k {top_k} must be at least 1; None samples among all tokens")
        was_training = self.training
        self.eval()
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.config.block_size :])[:, -1]  # (b, vocab_size)
            if temperature == 0:
                following = logits.argmax(dim=-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None:
                    smallest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (b, 1)
                    logits = logits.masked_fill(logits < smallest, -math.inf)
                following = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, following], dim=1)
        self.train(was_training)
        return tokens

    def num_parameters(self) -> int:
        """Parameters, a tied embedding counted once; by formula, so also true of a model in shards."""
        return self.config.num_parameters()


class Block(nn.Module):
    """One layer: attention, then an MLP, each added to the residual stream x, (b, t, d)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # 2 · n_layer terms are added to the stream; this keeps its variance from growing with the depth
        residual_std = INIT_STD / math.sqrt(2 * config.n_layer)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config, residual_std)
        self.mlp_norm = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config, residual_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, t, d) to (b, t, d)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal self-attention: each position looks at itself and at those before it."""

    def __init__(self, config: GPTConfig, residual_std: float) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = Linear(config.d_model, 3 * config.d_model)
        self.proj = Linear(config.d_model, config.d_model, std=residual_std)
        self.proj_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, t, d) to (b, t, d)."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.n_head, width // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (b, h, t, d/h)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (b, h, t, d/h)
        x = x.transpose(1, 2).reshape(batch, time, width)  # heads side by side again
        return self.proj_dropout(self.proj(x))


class MLP(nn.Module):
    """Two linear layers, four times as wide in between, with a GELU."""

    def __init__(self, config: GPTConfig, residual_std: float) -> None:
        super().__init__()
        self.fc = Linear(config.d_model, 4 * config.d_model)
        self.fc_proj = Linear(4 * config.d_model, config.d_model, std=residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, t, d) to (b, t, d)."""
        return self.dropout(self.fc_proj(F.gelu(self.fc(x), approximate="tanh")))


class Linear(nn.Linear):
    """``nn.Linear`` with GPT-2's initial values: weights normal, biases zero."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, std: float = INIT_STD) -> None:
        self.std = std  # before nn.Linear's own __init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Called by ``nn.Linear.__init__``, and by those who materialise a model from the meta device."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` with GPT-2's initial values."""

    def reset_parameters(self) -> None:
        """Called by ``nn.Embedding.__init__``, and by those who materialise a model from the meta device."""
        nn.init.normal_(self.weight, std=INIT_STD)


class TiedHead(nn.Module):
    """The output layer on a weight that is another module's too: a module of its own, so that whoever gathers
    the weights a module needs, just before it runs, sees that this one needs the embedding's.

    Args:
        weight: (vocab_size, d), the token embedding.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, t, d) to logits, (b, t, vocab_size)."""
        return F.linear(x, self.weight)
