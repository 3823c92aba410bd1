"""Bursts of plain steps, or rounds: when the overlapped loop stops to ask.

Owns the cadence. Where rounds run on the device by themselves asking is `free`, and every burst is preceded by the
question. Else a round needs the host's whole view and a burst runs without it, so whether drafting pays is asked now
and then: at once after a round that paid, when something to draft turns up where there was nothing, and ever more
rarely while the answer is no. Ignores the answer (`engine.dspark.planner`).
"""

from __future__ import annotations

_MOST_WAITS = 16
"""Times the cadence that passes at most between two questions."""
_BRIEFLY = 8
"""Steps until the next question where no row had room for a draft, which says nothing of the next one."""


class Alternation:
    def __init__(self, probe_every: int, free: bool = False) -> None:
        self._free = free
        self._probe_every = probe_every
        self._left = 0
        self._patience = probe_every
        self._found = True

    @property
    def asks(self) -> bool:
        """Whether the next step should be planned with everything known."""
        return self._free or self._left <= 0

    def answered(self, drafting: bool, probe: bool, found: bool) -> None:
        """What a planned step did; `found` is false where no row had anything to draft."""
        self._found = found
        if drafting and not probe:
            self._left, self._patience = 0, self._probe_every
        elif drafting:
            # What the probe taught decides at once.
            self._left = 0
        else:
            self._left = self._patience
            self._patience = min(2 * self._patience, _MOST_WAITS * self._probe_every)

    def had_no_room(self) -> None:
        """Rows at their ends, or where the drafter does not reach: whether drafting pays was not the question."""
        self._left = _BRIEFLY

    def hint(self) -> None:
        """There is something to draft, as far as the host can see."""
        if not self._found:
            self._left = 0

    @property
    def wants_hints(self) -> bool:
        return not self._found

    def passed(self, steps: int) -> None:
        self._left -= steps
