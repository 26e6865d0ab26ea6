"""What all tests share: an environment without surprises, and ranks that end with the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import ranks

hypothesis.settings.register_profile("course", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("course")


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    ranks.close_pools()
