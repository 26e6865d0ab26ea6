"""Predict: what the forward pass keeps for backward, from a transformer's shape.

Unlike model states, activations grow with the batch and no stage of ZeRO divides them. What is kept depends on
the program, operation by operation, so every formula names the program it counts: Megatron's in 16 bits
[arXiv 2205.05198] or a plain block in torch eager, fp32, on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TransformerShape:
    """What of a GPT its activations depend on.

    Attributes:
        layers, hidden, heads: L, h and a of the Megatron papers.
        vocabulary: size of the output's last dimension.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 50257

    @classmethod
    def of_size(cls, parameters: int) -> TransformerShape:
        """A GPT of about ``parameters``, in the proportions of the GPT-3 family's large members.

        P = 12 L h^2 with h = 128 L, heads of 128: L = (P / 196608)^(1/3). 13B gives L = 40, 175B gives 96.
        """
        layers = max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
        hidden = max(1, round(math.sqrt(parameters / (12 * layers))))
        return cls(layers=layers, hidden=hidden, heads=max(1, round(hidden / 128)))

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block: 4h^2 of attention and 8h^2 of MLP."""
        return 12 * self.hidden**2

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest thing gathered at once: a block or the embedding."""
        return max(self.layer_parameters, self.vocabulary * self.hidden)


def activation_bytes(
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    layers: int,
    *,
    kind: Literal["megatron", "torch-fp32", "torch-fp32-no-dropout"] = "megatron",
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
) -> int:
    """Bytes that a GPT's blocks keep for backward on one rank; embedding and output are not included.

    With s, b, h, a and t = ``tensor_parallel``, a layer keeps in 16 bits [arXiv 2205.05198, table 2]
    sbh(34 + 5as/h); under tensor parallelism sbh(10 + 24/t + 5as/(ht)), with sequence parallelism
    sbh(34/t + 5as/(ht)). Selective recomputation drops the as/h term, as a fused attention does; full
    recomputation keeps the layer's input, 2sbh.

    torch eager on a CPU in fp32 keeps other tensors: sbh(72 + 12as/h) + 16sb with dropout and
    sbh(64 + 4as/h) + 16sb without, for b > 1; with b = 1 the batched product needs no copies of q, k and v, and 4sbh
    more stay. tests/test_memory.py builds the block and counts. Your own block will have its own formula.

    Args:
        batch, sequence, hidden, heads, layers: b, s, h, a, L; sequences and tokens of one micro-batch.
        kind: which formula.
        tensor_parallel, sequence_parallel, recompute: for ``megatron`` only.

    Raises:
        ValueError: the options belong to another kind.
    """
    s, b, h, a, t = sequence, batch, hidden, heads, tensor_parallel
    if kind != "megatron":
        if t != 1 or sequence_parallel or recompute != "none":
            raise ValueError(f"{kind!r} is the formula of a whole block on one rank; use kind='megatron'")
        linear, quadratic = (72, 12) if kind == "torch-fp32" else (64, 4)
        return layers * (linear * s * b * h + quadratic * a * s * s * b + 16 * s * b)
    if recompute == "full":
        return layers * 2 * s * b * h
    attention = 0 if recompute == "selective" else -(-5 * a * s * s * b // t)
    split = 34 if sequence_parallel else 24
    whole = 34 - split
    return layers * (whole * s * b * h + -(-split * s * b * h // t) + attention)
