"""What README and CONTRIBUTING tell a reader to type is run here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a Markdown text."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def block_with(text: str, language: str, words: str) -> str:
    (found,) = [block for block in blocks(text, language) if words in block]
    return found


class TwoLayers(nn.Module):
    """Stands for the reader's model, MyModel or HugeModel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 400)
        self.head = nn.Linear(400, 500)  # above stage 3's persistence threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def _run_the_rungs() -> dict[str, Any]:
    names: dict[str, Any] = {"MyModel": TwoLayers, "HugeModel": TwoLayers}
    names["my_batches"] = [(torch.randn(3, 4), torch.randint(0, 500, (3,))) for _ in range(2)]
    exec(block_with(README, "python", "zc.Zero2("), names)
    plain = {"stage": names["model"].stage, "gradients": names["model"].comm.ledger.wire_bytes("gradients")}
    exec(block_with(README, "python", "zc.zero.Init("), names)
    return {**plain, "last_stage": names["model"].stage, "partitioned": len(names["model"].sharded)}


def test_readmes_rungs_run() -> None:
    for result in run_ranks(2, _run_the_rungs):
        padded = 4 * 400 + 400 + 400 * 500 + 500
        assert result == {"stage": 2, "gradients": 2 * padded // 2 * 4, "last_stage": 3, "partitioned": 1}


def test_contributings_example_is_a_test_that_passes(tmp_path: Path) -> None:
    example = tmp_path / "test_example.py"
    example.write_text(block_with((ROOT / "CONTRIBUTING.md").read_text(), "python", "run_ranks"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(example)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_readmes_config_is_json_with_deepspeeds_keys() -> None:
    config = json.loads(blocks(README, "json")[0])
    assert config["zero_optimization"] == {"stage": 2}


def test_every_make_command_in_the_documents_is_a_target() -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for target in re.findall(r"(?:^|`)(?:\w+=\w+ )?make ([a-z0-9-]+)", text, re.MULTILINE):
            assert target in targets, f"{document}: make {target}"


def test_the_map_leads_to_modules_and_labs() -> None:
    rows = re.findall(r"^\| (0\d) [^|]*\|([^|]*)\|[^|]*\| `make (lab-\d\d)` \|$", README, re.MULTILINE)
    assert [number for number, _, _ in rows] == ["00", "01", "02", "03", "04"]
    for number, modules, lab in rows:
        assert lab == f"lab-{number}"
        for module in re.findall(r"`([^`]+)`", modules):
            path = module if module.startswith("zero_course/") else f"zero_course/{module}"
            assert (ROOT / path).exists(), path
