"""Drafts through recurrent layers on a GPU, where a mixer's kernels take rows of several tokens in one launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import ask, make_engine, prompt
from tests.unit.dspark.recurrent_models import save_recurrent
from tests.unit.dspark.replay_scripts import MIXERS, play
from tests.unit.dspark.served import dspark, save_random

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MIXERS.values(), ids=MIXERS)
def test_random_scripts_leave_outputs_and_states_of_plain_steps(kind, dtype):
    play(kind, torch.device("cuda"), dtype)


@pytest.mark.parametrize("loop", ["serial", "overlapped"])
@pytest.mark.parametrize("kind", ["lfm2", "nemotron_h", "qwen3_5_text"])
def test_tokens_are_those_without_drafts(kind, loop, tmp_path):
    """Rounds of the serial loop alone, and between captured bursts."""
    folder, drafter = save_recurrent(tmp_path, kind), save_random(tmp_path / "drafter", num_target_layers=3)
    repeats = np.tile(prompt(6, 30), 4)
    requests = [ask("g", repeats, n=2, max_new=32), ask("h", prompt(9), temperature=1.0, seed=3, max_new=32)]
    plain = make_engine(folder, device="cuda", loop=loop)
    drafting = make_engine(folder, device="cuda", loop=loop, dspark=dspark(drafter))
    for _ in range(2):
        for group, other in zip(drafting.generate(requests), plain.generate(requests), strict=True):
            for sample, expected in zip(group.samples, other.samples, strict=True):
                assert sample.ids.tolist() == expected.ids.tolist()
                np.testing.assert_allclose(sample.logprobs, expected.logprobs, atol=2e-3)
        drafting.check()
    assert drafting.draft_counters()["draft_verified"] > 0
