"""Which prompts wait for others that begin like them."""

import numpy as np

from engine.collector import Collector
from tests.support import ask, make_engine, prompt


def beginning_alike(count, shared, own):
    head = prompt(shared, 3)
    return [np.concatenate((head, prompt(own, 100 + 17 * place))).astype(np.uint32) for place in range(count)]


def admitted(engine, prompts):
    """Tokens that one step's prompts go through the model, and the prompts that wait for them."""
    before = engine.counters.computed_tokens
    for place, ids in enumerate(prompts):
        engine.add_group(ask(f"g{place}", ids, max_new=2), Collector())
    engine.step()
    waiting = engine.gauges().waiting
    while engine.step():
        pass
    return engine.counters.computed_tokens - before, waiting


def test_few_tokens_that_prompts_share_are_computed_again_and_many_once(t_full):
    engine = make_engine(t_full, page_size=4, prefill_tokens=2048, max_running=16)
    assert admitted(engine, beginning_alike(3, 8, 30)) == (3 * 38, 0)
    engine.flush("all")
    tokens, waiting = admitted(engine, beginning_alike(3, 40, 30))
    assert waiting == 2 and tokens == 40 + 3 * 30, "more than half is not computed again"
    engine.flush("all")
    # So many tokens of a batch, and no more.
    tokens, waiting = admitted(engine, beginning_alike(12, 40, 60))
    assert waiting == 12 - 1 - 256 // 40 and tokens == 12 * 60 + 40 * (1 + 256 // 40)
    engine.check()


def test_what_was_computed_again_says_the_same(t_full):
    prompts = beginning_alike(3, 8, 30)
    together = make_engine(t_full, page_size=4, prefill_tokens=2048)
    apart = make_engine(t_full, page_size=4, prefill_tokens=2048)
    groups = together.generate([ask(f"g{place}", ids, max_new=6) for place, ids in enumerate(prompts)])
    for place, (group, ids) in enumerate(zip(groups, prompts, strict=True)):
        (alone,) = apart.generate([ask(f"g{place}", ids, max_new=6)])
        assert group.samples[0].ids.tolist() == alone.samples[0].ids.tolist()
    together.check()
