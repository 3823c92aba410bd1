"""Runs the interpreted files of this folder, all in one process with Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]


def run_interpreted(selection: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", selection]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*command, str(Path(__file__).parent)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout


@pytest.mark.timeout(900)
def test_the_interpreted_cases_pass() -> None:
    run_interpreted("not slow")


@pytest.mark.slow
def test_the_slow_interpreted_cases_pass() -> None:
    run_interpreted("slow")
