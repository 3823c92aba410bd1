"""The benchmark of agents follows the engine's rules of where states are kept."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.agents import POLICIES, Server
from tests.support import ask, make_engine, prompt, save_tiny


@pytest.mark.slow
def test_what_is_found_is_what_an_engine_finds(tmp_path):
    """Conversations that share a start, branch, repeat themselves and are sampled twice."""
    layers = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}
    engine = make_engine(save_tiny(tmp_path, kind="lfm2", **layers), page_size=4, prefill_tokens=64)
    server = Server(POLICIES[3], slots=64, page=4, pool_tokens=4096)
    start = prompt(23)
    contexts = [np.concatenate((start, prompt(9 + agent, 100 + 40 * agent))) for agent in range(3)]
    found = 0
    for turn in range(9):
        agent = turn % 3
        if turn == 6:
            contexts[agent] = contexts[agent][:30]
        (group,) = engine.generate([ask("turn", contexts[agent], n=1 + turn % 2, max_new=7)])
        answers = [sample.ids.astype(np.int32) for sample in group.samples]
        before = server.found
        # The last token of an answer has no state: it was not computed.
        server.serve(contexts[agent].astype(np.int32), [answer[:-1] for answer in answers])
        assert group.hit.usable == server.found - before
        found += group.hit.usable
        said = np.concatenate((contexts[agent], answers[-1].astype(np.uint32)))
        contexts[agent] = np.concatenate((said, prompt(5, 300 + 5 * turn)))
    assert found > 100
    engine.check()
