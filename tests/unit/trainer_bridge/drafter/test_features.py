"""States taken while scoring against transformers, whatever the pieces."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Engine
from engine.errors import InvalidRequest, TooLarge
from tests.support import ask, reference_greedy
from tests.unit.trainer_bridge.drafter.worlds import example, parts_of
from trainer_bridge.drafter.features import FeatureScorer


@pytest.mark.parametrize("budget", [7, 64])
def test_states_equal_those_of_transformers(world, budget):
    scorer = FeatureScorer(parts_of(world.folder, budget), [0])
    examples = [example("a", 3, 9), example("b", 1, 4), example("c", 20, 8)]
    model = AutoModelForCausalLM.from_pretrained(world.folder, dtype=torch.float32)
    for item in scorer.score(examples):
        ids = torch.tensor([item.example.ids.astype(int).tolist()])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(item.features_TMD[:, 0], states[1][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(item.last_TD, states[-1][0], atol=1e-4, rtol=1e-4)


def test_pages_are_given_back_and_an_engine_goes_on_beside_it(world):
    parts = parts_of(world.folder)
    engine, scorer = Engine(parts), FeatureScorer(parts, [0])
    prompt = np.arange(10, 30)
    (before,) = engine.generate([ask("g", prompt)])
    free = parts.pages.allocator.num_free
    scorer.score([example(f"e{i}", 5, 40) for i in range(6)])
    assert parts.pages.allocator.num_free == free
    engine.check()
    (after,) = engine.generate([ask("h", prompt)])
    assert after.samples[0].ids.tolist() == before.samples[0].ids.tolist() == reference_greedy(world.folder, prompt, 8)
    assert after.samples[0].cached_tokens > 0, "cached prefixes survived"


def test_what_cannot_be_scored_is_refused_by_name(world):
    with pytest.raises(InvalidRequest, match="layers"):
        FeatureScorer(world.parts, [1])
    with pytest.raises(TooLarge, match="long"):
        world.scorer.score([example("long", 5, 400)])
