from __future__ import annotations

import pytest
import torch

from tests.support import save_tiny
from tests.unit.trainer_bridge.drafter.worlds import World


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    return World(save_tiny(tmp_path_factory.mktemp("target"), num_hidden_layers=2))
