"""The text and how it is cut into items."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from zero_course.data import ByteDataset, decode, encode, python_reference_text, train_validation_split


def test_the_text_is_english_about_python() -> None:
    text = python_reference_text()
    assert 300_000 < len(text) < 1_000_000
    assert text == python_reference_text()
    words = text.decode()
    assert 'The "for" statement' in words
    assert "__getattr__" in words


def test_a_python_without_the_text_gets_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match="no pydoc_data.topics.*libpython3-stdlib"):
        python_reference_text()


def test_items_are_the_text_and_the_text_one_byte_later() -> None:
    data = ByteDataset(bytes(range(20)), block_size=6)
    assert len(data) == 3
    for i in range(3):
        x, y = data[i]
        assert x.dtype == y.dtype == torch.int64
        assert x.tolist() == list(range(6 * i, 6 * i + 6))
        assert y.tolist() == list(range(6 * i + 1, 6 * i + 7))
    assert data[-1][0].tolist() == data[2][0].tolist()
    for wrong in (3, -4):
        with pytest.raises(IndexError, match=f"item {wrong} of a dataset of 3"):
            data[wrong]


@given(length=st.integers(2, 200), block_size=st.integers(1, 30), stride=st.integers(1, 40))
def test_every_item_lies_in_the_text_and_no_further_one_would(
    length: int, block_size: int, stride: int
) -> None:
    if length < block_size + 1:
        with pytest.raises(ValueError, match="too short"):
            ByteDataset(bytes(length), block_size, stride)
        return
    text = bytes(i % 251 for i in range(length))
    data = ByteDataset(text, block_size, stride)
    for i in range(len(data)):
        x, y = data[i]
        start = i * stride
        assert bytes(x.tolist()) == text[start : start + block_size]
        assert bytes(y.tolist()) == text[start + 1 : start + 1 + block_size]
        assert len(x) == len(y) == block_size
    assert len(data) * stride + block_size + 1 > length


def test_the_default_stride_reads_every_byte_once() -> None:
    text = python_reference_text()[:1000]
    read = b"".join(bytes(x.tolist()) for x, _ in ByteDataset(text, 111))
    assert read == text[:999]


def test_batches() -> None:
    x, y = next(iter(DataLoader(ByteDataset(bytes(100), 8), batch_size=4)))
    assert x.shape == y.shape == (4, 8)


def test_training_and_validation_text_do_not_overlap() -> None:
    text = bytes(i % 256 for i in range(1000))
    train, validation = train_validation_split(text, 10, validation=0.2)
    assert bytes(train.tokens.tolist()) + bytes(validation.tokens.tolist()) == text
    assert len(validation.tokens) == 200
    _, overlapping = train_validation_split(text, 10, validation=0.2, stride=3)
    assert overlapping.stride == 10
    for wrong in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="is not a part of the text"):
            train_validation_split(text, 10, validation=wrong)


@given(st.text())
def test_decode_is_the_inverse_of_encode(text: str) -> None:
    assert decode(encode(text)) == text
    assert decode(encode(text).tolist()) == text


def test_decode_takes_any_bytes() -> None:
    assert decode([72, 105, 255]) == "Hi\ufffd"
    with pytest.raises(ValueError, match="range"):
        decode([256])


@pytest.mark.parametrize("sizes", [dict(block_size=0), dict(block_size=4, stride=0)])
def test_sizes_below_one_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        ByteDataset(b"some text", **sizes)
