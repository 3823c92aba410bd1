"""What 64 multi-turn agents find in the cache of a model with recurrent states, by where states are kept.

    python -m benchmarks.agents [--json FILE] [--turns N]

The tree, its components and their eviction are the engine's; no model runs, so that contexts and state slots
have real sizes. An agent has a role (instructions that agents of the role share behind a common preamble) and
works on a task over turns: what it says, then what its tools return. Some turns are sampled four times, and some
agents go back a few turns and try again. Agents take turns in random order.

A recurrent state cannot be cut: a hit ends where one was kept. `prompt ends` keeps the state at a prompt's last
whole page and forgets the least recently used one. Each further row adds one rule of the engine's: a state where
others were seen to diverge, one at an answer's end, and forgetting by the tokens that a state saves. `attention`
is the ceiling, a model without such states. Hit shares are of the prompts' tokens.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.report import Row, report
from engine.cache import Namespace, PrefixCache
from engine.cache.full import FullAttention
from engine.cache.node import Node
from engine.cache.recurrent import RecurrentState, Snapshot
from engine.memory.allocator import PageAllocator

NAMESPACE = Namespace()
AGENTS, ROLES, PAGE, POOL_TOKENS = 64, 8, 16, 1_000_000
PREAMBLE, INSTRUCTIONS, LONGEST = 512, 1536, 16_384
SLOTS = (128, 256, 512)


@dataclass(frozen=True, slots=True)
class Policy:
    """Where states are kept beside ends of prompts, and whether forgetting them looks at their worth."""

    name: str
    states: bool = True
    branches: bool = False
    turn_ends: bool = False
    by_worth: bool = False


POLICIES = (
    Policy("prompt ends"),
    Policy("+ branch points", branches=True),
    Policy("+ ends of answers", branches=True, turn_ends=True),
    Policy("+ by worth (the engine)", branches=True, turn_ends=True, by_worth=True),
    Policy("attention", states=False),
)


class RecentStates(RecurrentState):
    """States of equal worth: the least recently used one goes first."""

    def worth(self, node: Node) -> int:
        return 1


class Server:
    """A cache under requests that come one at a time, each computed whole."""

    def __init__(self, policy: Policy, slots: int, page: int = PAGE, pool_tokens: int = POOL_TOKENS) -> None:
        self.policy, self.page = policy, page
        self.pages, self.slots = PageAllocator(pool_tokens // page), PageAllocator(slots)
        kind = RecurrentState if policy.by_worth else RecentStates
        states = (kind(self.slots),) if policy.states else ()
        self.cache = PrefixCache(self.pages, page, (FullAttention(self.pages, page), *states))
        self.asked = self.found = 0

    def serve(self, prompt: np.ndarray, answers: list[np.ndarray]) -> None:
        """Answers to one prompt, which is computed as far as it is not cached."""
        cache, page, last = self.cache, self.page, (len(prompt) - 1) // self.page * self.page
        match = cache.match(NAMESPACE, prompt.tobytes(), len(prompt) - 1)
        receipt = cache.acquire(match)
        cache.copied(receipt)
        self.asked += len(prompt)
        self.found += receipt.length
        stops = {last, match.structural} if self.policy.branches else {last}
        for stop in sorted(stops):
            self._extend(receipt, prompt, stop, keep=True)
        whole = len(prompt) // page * page
        self._extend(receipt, prompt, whole, keep=False)
        for fork, answer in zip(cache.fork(receipt, len(answers)), answers, strict=True):
            tokens = np.concatenate((prompt, answer))
            self._extend(fork, tokens, len(tokens) // page * page, keep=self.policy.turn_ends)
            cache.release(fork)
        cache.release(receipt)

    def _extend(self, receipt, tokens: np.ndarray, end: int, keep: bool) -> None:
        start = receipt.length
        if end <= start:
            return
        count = (end - start) // self.page
        self.cache.evict(max(0, count - self.pages.num_free))
        pages = self.pages.alloc(count)
        assert pages is not None, "the pool is larger than what is running"
        states = None
        if keep and self.policy.states and (self.slots.num_free or self.cache.evict(1, "recurrent")):
            slot = self.slots.alloc(1)
            assert slot is not None, "a slot is free"
            states = {"recurrent": Snapshot(int(slot[0]), end - start)}
        self.cache.extend(receipt, tokens[start:end].tobytes(), pages, states)


@dataclass(slots=True)
class Agent:
    """What it has said and seen: `turns` are lengths of the context at which a turn ended."""

    context: np.ndarray
    left: int
    turns: list[int] = field(default_factory=list)


class Workload:
    """The same agents for every policy."""

    def __init__(self, seed: int = 7) -> None:
        self.random, self.tokens = random.Random(seed), np.random.default_rng(seed)
        preamble = self.draw(PREAMBLE)
        self.roles = [np.concatenate((preamble, self.draw(INSTRUCTIONS))) for _ in range(ROLES)]
        self.agents = [self.start() for _ in range(AGENTS)]

    def draw(self, count: int) -> np.ndarray:
        return self.tokens.integers(0, 150_000, count).astype(np.int32)

    def start(self) -> Agent:
        task = self.draw(self.random.randint(100, 600))
        return Agent(np.concatenate((self.random.choice(self.roles), task)), self.random.randint(4, 14))

    def turn(self, server: Server) -> None:
        at = self.random.randrange(AGENTS)
        agent = self.agents[at]
        if len(agent.turns) > 3 and self.random.random() < 0.1:
            del agent.turns[-self.random.randint(1, 3) :]
            agent.context = np.concatenate((agent.context[: agent.turns[-1]], self.draw(self.random.randint(50, 400))))
        samples = 4 if self.random.random() < 0.15 else 1
        answers = [self.draw(self.random.randint(40, 600)) for _ in range(samples)]
        server.serve(agent.context, answers)
        said = np.concatenate((agent.context, self.random.choice(answers)))
        agent.turns.append(len(said))
        agent.context = np.concatenate((said, self.draw(self.random.randint(50, 1200))))
        agent.left -= 1
        if not agent.left or len(agent.context) > LONGEST:
            self.agents[at] = self.start()


def run(policy: Policy, slots: int, turns: int) -> Server:
    server, workload = Server(policy, slots), Workload()
    for _ in range(turns):
        workload.turn(server)
    server.cache.check()
    return server


def agent_rows(turns: int) -> list[Row]:
    rows = []
    for slots in SLOTS:
        for policy in POLICIES if slots == SLOTS[-1] else POLICIES[:-1]:
            server = run(policy, slots, turns)
            case = f"{slots} states, {policy.name}" if policy.states else policy.name
            rows.append(Row(case, "hit share", server.found / server.asked, ""))
            rows.append(Row(case, "computed a turn", (server.asked - server.found) / turns, "tokens"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the JSON line to this file too")
    parser.add_argument("--turns", type=int, default=4000, help="turns of all agents together")
    arguments = parser.parse_args()
    report("agents", agent_rows(arguments.turns), arguments.json)


if __name__ == "__main__":
    main()
