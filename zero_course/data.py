"""Real text without a download, byte by byte.

The reference of the Python language, about half a megabyte of English, is part of every Python (``pydoc_data.topics``,
what ``help("for")`` prints from). The model reads it as bytes: the vocabulary is the 256 values of a byte, and
there is no tokenizer to explain.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.data import Dataset

VOCAB_SIZE = 256


def python_reference_text() -> bytes:
    """The Python language reference, UTF-8, in an order that is the same on every rank.

    The text belongs to the running Python: another minor version has another text, of about the same length.

    Raises:
        RuntimeError: this Python was packaged without ``pydoc_data``.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, the text that the course trains on; some systems package it "
            "apart (Debian, Ubuntu: apt install libpython3-stdlib). Any other text does: ByteDataset(your_bytes, ...)"
        ) from error
    return "\n\n".join(topics[name].strip("\n") for name in sorted(topics)).encode()


class ByteDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of a text and the same pieces one byte later: what a language model reads and predicts.

    Item i is the pair (x, y) of int64 tensors, (block_size,) each: x is the text from byte i·stride on, y the
    text from byte i·stride + 1 on. Items are always the same and in the order of the text; shuffling is the
    sampler's business.

    Args:
        text: the bytes.
        block_size: length of x and y, in bytes.
        stride: bytes between the beginnings of two items; by default ``block_size``, so that every byte is
            read once.

    Raises:
        ValueError: a text too short for one item, or a block_size or stride below 1.
    """

    def __init__(self, text: bytes, block_size: int, stride: int | None = None) -> None:
        self.block_size = block_size
        self.stride = block_size if stride is None else stride
        if self.block_size < 1 or self.stride < 1:
            raise ValueError(f"block_size {block_size} and stride {self.stride} must be at least 1")
        if len(text) < block_size + 1:
            raise ValueError(
                f"a text of {len(text)} bytes is too short for block_size {block_size}; "
                f"one item takes {block_size + 1} bytes"
            )
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # (bytes,)

    def __len__(self) -> int:
        return (len(self.tokens) - 1 - self.block_size) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of a dataset of {len(self)}")
        start = index % len(self) * self.stride
        piece = self.tokens[start : start + self.block_size + 1].long()
        return piece[:-1], piece[1:]


def train_validation_split(
    text: bytes, block_size: int, validation: float = 0.1, stride: int | None = None
) -> tuple[ByteDataset, ByteDataset]:
    """The beginning of a text for training, its end for validation; no byte is in both.

    Args:
        text: the bytes.
        block_size: length of an item, in bytes.
        validation: part of the text that is kept for validation, in (0, 1).
        stride: of the training set; the validation set reads every byte once.

    Returns:
        the training set and the validation set.

    Raises:
        ValueError: a part outside (0, 1), or one of the two too short for one item.
    """
    if not 0.0 < validation < 1.0:
        raise ValueError(f"validation {validation} is not a part of the text, in (0, 1)")
    cut = len(text) - round(len(text) * validation)
    return ByteDataset(text[:cut], block_size, stride), ByteDataset(text[cut:], block_size)


def encode(text: str) -> torch.Tensor:
    """The UTF-8 bytes of ``text`` as tokens, (bytes,) int64."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: torch.Tensor | Iterable[int]) -> str:
    """Tokens, (bytes,), as text; bytes that are no UTF-8 (a model may write any) become the sign U+FFFD.

    Raises:
        ValueError: a token outside 0..255.
    """
    values = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
    return bytes(values).decode(errors="replace")
