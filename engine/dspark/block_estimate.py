"""What a whole window would have yielded where only part of it was verified.

Owns the bounds on the tokens a full block would have emitted. Ignores how windows were chosen.

A step that verified w of its drafts and kept a < w of them is known exactly: a + 1. Where all w were
kept, the drafts beyond w live on here. As later steps emit the very tokens that were drafted, their
log-probabilities under the target give the chance that draft w + o would have been accepted:
S <- S · min(1, p / q), and each S adds to the expected length. Where the emitted token differs the
chance of that draft is unknown: the lower bound ends, and the upper bound takes the rest as S each.
Where drafts are kept while they equal the target's own token (greedy rows, the coupled rule) a draft
that is met counts as one and one that differs as none: there the step closes exactly.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, KeysView, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class CeilingSums:
    """Over closed steps: tokens emitted, and bounds of what whole windows would have emitted."""

    steps: int = 0
    exact: int = 0
    emitted: float = 0.0
    lower: float = 0.0
    upper: float = 0.0


@dataclass(slots=True)
class _Open:
    """A trimmed step of one request: drafts still to be met, and log q of each."""

    emitted: int
    drafts: list[int]
    log_q: list[float] | None
    met: int = 0
    survival: float = 1.0
    gained: float = 0.0


def is_exact(drafted: int, verified: int, accepted: int, emitted: int) -> bool:
    """Whether a step is known to have emitted what its whole window would have: it was verified whole, a draft
    was refused, or the request ended before all that were accepted."""
    return verified == drafted or accepted < verified or emitted <= accepted


class BlockEstimate:
    """Open steps by request. `sums` grows as they close."""

    def __init__(self) -> None:
        self.sums = CeilingSums()
        self._open: dict[Hashable, list[_Open]] = {}

    def step(
        self,
        request: Hashable,
        drafts: Sequence[int],
        log_q: Sequence[float] | None,
        verified: int,
        accepted: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
    ) -> None:
        """One verify step: all drafts made with their log q (None where they are kept by equality), how many
        were verified and accepted, and the tokens it emitted with their log p under the target (fewer
        than accepted + 1 after a stop)."""
        self.plain(request, tokens, logprobs)
        emitted = len(tokens)
        if is_exact(len(drafts), verified, accepted, emitted):
            self._close(emitted, emitted, emitted, exact=True)
            return
        trimmed = _Open(emitted, list(drafts[verified:]), None if log_q is None else list(log_q[verified:]))
        self._open.setdefault(request, []).append(trimmed)
        # The bonus was drawn where the first trimmed draft stands.
        self._meet_one(trimmed, tokens[-1], logprobs[-1])
        self._sweep(request)

    def exact(self, emitted: int, whole: int, steps: int = 1) -> None:
        """Steps that emitted fewer tokens, or no more, than the `whole` that their full windows are known to
        yield."""
        self._close(emitted, whole, whole, exact=True, steps=steps)

    @property
    def waits(self) -> bool:
        """Whether any trimmed step waits for its next tokens."""
        return bool(self._open)

    @property
    def requests(self) -> KeysView[Hashable]:
        """Those whose trimmed steps wait."""
        return self._open.keys()

    def is_open(self, request: Hashable) -> bool:
        """Whether a trimmed step of the request waits for its next tokens."""
        return request in self._open

    def plain(self, request: Hashable, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens from steps whose own windows are not looked at."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self._meet(request, token, logprob)

    def end(self, request: Hashable, stopped: bool) -> None:
        """The request is over. After a stop nothing more would have been emitted; else the rest stays open."""
        for part in self._open.pop(request, []):
            base = part.emitted + part.gained
            self._close(part.emitted, base, base if stopped else base + part.survival * (len(part.drafts) - part.met))

    def _meet(self, request: Hashable, token: int, logprob: float) -> None:
        for part in self._open.get(request, []):
            self._meet_one(part, token, logprob)
        self._sweep(request)

    def _meet_one(self, part: _Open, token: int, logprob: float) -> None:
        if part.met < 0 or part.met == len(part.drafts):
            return
        if token != part.drafts[part.met]:
            base = part.emitted + part.gained
            unknown = 0.0 if part.log_q is None else part.survival * (len(part.drafts) - part.met)
            self._close(part.emitted, base, base + unknown)
            part.met = -1
            return
        if part.log_q is not None:
            part.survival *= math.exp(min(0.0, logprob - part.log_q[part.met]))
        part.gained += part.survival
        part.met += 1
        if part.met == len(part.drafts):
            base = part.emitted + part.gained
            self._close(part.emitted, base, base)

    def _sweep(self, request: Hashable) -> None:
        """Let go of what has closed."""
        left = [part for part in self._open.get(request, []) if 0 <= part.met < len(part.drafts)]
        if left:
            self._open[request] = left
        else:
            self._open.pop(request, None)

    def _close(self, emitted: float, lower: float, upper: float, exact: bool = False, steps: int = 1) -> None:
        self.sums.steps += steps
        self.sums.exact += exact * steps
        self.sums.emitted += emitted
        self.sums.lower += lower
        self.sums.upper += upper
