"""Whether an engine is paused, and how.

Owns which pause is on, what it did to the work at hand, and when it is quiescent. Ignores why one
pauses, and updates (`engine.engine`).
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import InvalidRequest
from engine.scheduler.scheduler import Scheduler
from engine.types import PauseMode, PauseReport

PAUSE_MODES = ("drain", "abort", "retract", "in_place")


class PauseState:
    """`abort_all` ends every sample held and returns how many there were."""

    def __init__(self, scheduler: Scheduler, abort_all: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._abort_all = abort_all
        self.mode: PauseMode | None = None
        self.report = PauseReport(in_flight=0, retracted=0, aborted=0)

    def begin(self, mode: PauseMode) -> None:
        """The caller has settled the loop. `Engine.pause` says what the modes mean."""
        scheduler = self._scheduler
        self.mode = mode
        scheduler.draining = mode == "drain"
        retracted = aborted = 0
        if mode == "abort":
            aborted = self._abort_all()
        elif mode == "retract":
            retracted = len(scheduler.running)
            for sample in list(scheduler.running):
                scheduler.retract(sample)
            scheduler.reset_prefills()
        in_flight = len(scheduler.running) + len(scheduler.prefills)
        self.report = PauseReport(in_flight=in_flight, retracted=retracted, aborted=aborted)

    def end(self) -> None:
        self.mode = None
        self._scheduler.draining = False

    @property
    def lets_steps(self) -> bool:
        return self.mode in (None, "drain")

    def quiescent(self, in_flight: bool) -> bool:
        """Paused, and nothing that the mode lets run is left. `in_flight`: steps launched whose
        results have not been read."""
        if self.mode is None:
            return False
        return self.mode != "drain" or not (in_flight or self._scheduler.has_begun_work)


def check_mode(mode: str) -> None:
    if mode not in PAUSE_MODES:
        raise InvalidRequest(field="mode", expected=f"one of {PAUSE_MODES}", actual=mode)
