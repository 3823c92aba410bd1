"""Shared set-up: one torch thread, nothing from the network, the case book's models."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch

from tests import support
from tests.support import save_tiny

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def t_full(tmp_path_factory):
    """T-FULL under W0."""
    return save_tiny(tmp_path_factory.mktemp("t-full-w0"), seed=0)


@pytest.fixture(scope="session")
def t_full_w1(tmp_path_factory):
    """T-FULL under W1."""
    return save_tiny(tmp_path_factory.mktemp("t-full-w1"), seed=1)


@pytest.fixture(scope="session")
def t_tied(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("t-tied"), seed=2, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def t_qwen3(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("t-qwen3"), seed=3, kind="qwen3")


@pytest.fixture(params=["serial", "overlapped"])
def both_loops(request, monkeypatch):
    """Run a test under each loop: engines that `make_engine` builds use it."""
    plain = support.engine_config
    monkeypatch.setattr(support, "engine_config", lambda **fields: plain(**({"loop": request.param} | fields)))
