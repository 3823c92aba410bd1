"""The sink for callers in the engine's own process: it keeps the reply."""

from __future__ import annotations

from engine.errors import SparkrollError
from engine.types import GroupOutput, SampleDelta, SampleOutput


class Collector:
    """`group` or `error` is set once the group has ended."""

    wants_deltas = False

    def __init__(self) -> None:
        self.group: GroupOutput | None = None
        self.error: SparkrollError | None = None

    @property
    def ended(self) -> bool:
        return self.group is not None or self.error is not None

    def result(self) -> GroupOutput:
        if self.error is not None:
            raise self.error
        assert self.group is not None, "only ended groups have a result"
        return self.group

    def on_delta(self, deltas: list[SampleDelta]) -> None:
        pass

    def on_sample(self, sample: SampleOutput) -> None:
        pass

    def on_group(self, group: GroupOutput) -> None:
        self.group = group

    def on_error(self, error: SparkrollError) -> None:
        self.error = error
