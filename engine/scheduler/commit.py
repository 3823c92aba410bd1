"""What a step's sampled tokens do to their samples.

Owns stops, lengths, version labels and the end of samples and groups. Ignores how tokens were
sampled. Stops are checked before lengths: a stop token that is also the last allowed one is a
stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.errors import InternalError
from engine.metrics import EngineCounters
from engine.request import Columns, Group, Sample
from engine.sampling.columns import SampleResult
from engine.scheduler.handover import has_host_stops
from engine.scheduler.scheduler import Scheduler
from engine.types import ErrorInfo, FinishReason, Want

if TYPE_CHECKING:
    from engine.runner.stepper import Run


class Committer:
    """Applies sampled tokens and finishes samples; `groups` is the engine's table of live ones."""

    def __init__(
        self,
        scheduler: Scheduler,
        groups: dict[str, Group],
        counters: EngineCounters,
        policy_version: Callable[[], int],
        drafter_version: Callable[[], int] = lambda: 0,
    ) -> None:
        self._scheduler = scheduler
        self._groups = groups
        self._counters = counters
        self._policy_version = policy_version
        self._drafter_version = drafter_version
        self.on_finish: Callable[[Sample], None] | None = None
        """Told of samples that end well, while their pages are still theirs."""

    def commit(self, samples: list[Sample], result: SampleResult) -> None:
        """Row r of `result` is the next token of `samples[r]`."""
        columns = HostColumns(result)
        versions = self._policy_version(), self._drafter_version()
        for row, sample in enumerate(samples):
            if columns.bad[row]:
                self.fail_bad_logits(sample)
                continue
            token = columns.ids[row]
            sample.ids.append(token)
            sample.label(*versions)
            columns.append_to(sample, row)
            sample.row.observe(token)
            self._counters.generated_tokens += 1
            self._check_end(sample, token)

    def commit_runs(self, samples: Sequence[Sample], runs: Sequence[Run]) -> None:
        """Tokens that the device drew for each sample, if any. Only the last of one can be a stop id or reach the
        length, unless it has host stops: ids that the device does not know. Those and a watcher may end the sample
        before, and the rest never existed; whoever is told of an end may end others."""
        versions = self._policy_version(), self._drafter_version()
        for sample, (ids, logprobs, more) in zip(samples, runs, strict=True):
            if not ids or sample.finish is not None:
                continue
            if sample.watcher is None and not has_host_stops(sample):
                self._append_run(sample, ids, logprobs, more, versions)
                continue
            for place, token in enumerate(ids):
                part = None if more is None else more.part(place, place + 1)
                self._append_run(sample, [token], logprobs[place : place + 1], part, versions)
                if sample.finish is not None:
                    break

    def commit_rounds(
        self, samples: list[Sample], kept: list[int], verified: list[int], num_accepted: list[int], result: SampleResult
    ) -> None:
        """A step's verified rows: `result` has num_accepted[b] + 1 tokens of row b, back to back, of which
        the first kept[b] + 1 are taken, out of verified[b] drafts. Whatever ends the sample among them,
        the rest never existed; a row without finite logits ends it too."""
        columns = HostColumns(result)
        start = 0
        for sample, count, drafts, accepted in zip(samples, kept, verified, num_accepted, strict=True):
            use = sample.draft_use
            use.steps += drafts > 0
            use.verified += drafts
            end = start + count + 1
            good = next((row for row in range(start, end) if columns.bad[row]), end)
            self._commit_round(sample, columns, start, good, count if drafts else 0)
            if good < end and sample.finish is None:
                self.fail_bad_logits(sample)
            start += accepted + 1

    def _commit_round(self, sample: Sample, rows: HostColumns, start: int, end: int, drafts: int) -> None:
        """Rows [start, end) of one sample, the first `drafts` of which had been drafted."""
        versions = self._policy_version(), self._drafter_version()
        stops, whole = sample.row.stop_ids, end - start
        size = whole if not stops and sample.watcher is None else 1
        for place in range(start, end, max(1, size)):
            ids = rows.ids[place : place + size]
            if not (ids[0] in stops and not sample.group.request.sampling.keep_stop):
                sample.draft_use.accepted += min(size, max(0, drafts - (place - start)))
            self._append_run(sample, ids, *rows.run(place, place + size, sample.row.want), versions)
            if sample.finish is not None:
                return

    def _append_run(
        self, sample: Sample, ids: list[int], logprobs: list[float], more: Columns | None, versions: tuple[int, int]
    ) -> None:
        assert sample.sequence is not None
        sample.ids += ids
        sample.columns.logprobs += logprobs
        if more is not None:
            sample.columns.extend(more)
        sample.label(*versions, len(ids))
        if sample.row.penalises:
            for token in ids:
                sample.row.observe(token)
        # The newest token has been drawn but not fed: its state does not exist for anybody.
        sample.sequence.computed = sample.length - 1
        self._counters.generated_tokens += len(ids)
        self._check_end(sample, ids[-1])

    def _check_end(self, sample: Sample, token: int) -> None:
        params = sample.row.params
        if token in sample.row.stop_ids:
            sample.matched = token
            if not params.keep_stop:
                sample.truncate(len(sample.ids) - 1)
            elif sample.watcher is not None:
                # Its text is the sample's; a stop string that it completes too only ends the text.
                sample.watcher.observe([token])
            self.finish(sample, "stop")
            return
        if sample.watcher is not None:
            match = sample.watcher.observe([token])
            if match is not None:
                sample.matched = match[1]
                self.finish(sample, "stop")
                return
        if len(sample.ids) >= params.max_new:
            self.finish(sample, "length")

    def fail_bad_logits(self, sample: Sample) -> None:
        self.fail(sample, InternalError.code, "the model's logits are not finite numbers")

    def fail(self, sample: Sample, code: str, message: str) -> None:
        sample.error = ErrorInfo(code=code, message=message)
        self._counters.samples_failed += 1
        self.finish(sample, "error")

    def finish(self, sample: Sample, reason: FinishReason) -> None:
        """End one sample: its pages go to the cache, its output to the sink."""
        if self.on_finish is not None and sample.sequence is not None and reason in ("stop", "length"):
            self.on_finish(sample)
        self._scheduler.remove(sample)
        sample.finish = reason
        group = sample.group
        group.unfinished -= 1
        self._counters.samples_finished += 1
        self._counters.samples_aborted += reason == "abort"
        if group.sink.wants_deltas:
            delta = sample.delta()
            if delta is not None:
                group.sink.on_delta([delta])
        group.sink.on_sample(sample.output(group.definition))
        if group.unfinished == 0:
            del self._groups[group.request.group_id]
            group.end()
            self._counters.groups_finished += 1
            group.sink.on_group(group.output(self._policy_version()))


class HostColumns:
    """One step's results as Python numbers, read from the device once."""

    def __init__(self, result: SampleResult) -> None:
        self.ids: list[int] = result.ids.tolist()
        self.bad: list[bool] = result.bad.tolist()
        self._logprobs: list[float] = result.logprobs.tolist()
        self._extra = {name: column.tolist() for name, column in result.extra_logprobs.items()}
        self._entropy = None if result.entropy is None else result.entropy.tolist()
        self._top_ids = None if result.top_ids is None else result.top_ids.tolist()
        self._top_logprobs = None if result.top_logprobs is None else result.top_logprobs.tolist()

    def run(self, start: int, end: int, want: Want) -> tuple[list[float], Columns]:
        """Log-probabilities of rows [start, end), all of one sample, and the other columns it asked for."""
        columns = Columns()
        for name in want.extra_logprobs:
            columns.extra[name] = self._extra[name][start:end]
        if want.entropy and self._entropy is not None:
            columns.entropy = self._entropy[start:end]
        if want.top_logprobs and self._top_ids is not None and self._top_logprobs is not None:
            columns.top_ids = [ids[: want.top_logprobs] for ids in self._top_ids[start:end]]
            columns.top_logprobs = [values[: want.top_logprobs] for values in self._top_logprobs[start:end]]
        return self._logprobs[start:end], columns

    def append_to(self, sample: Sample, row: int) -> None:
        """Append the row to the columns this sample asked for."""
        want, columns = sample.row.want, sample.columns
        columns.logprobs.append(self._logprobs[row])
        for name in want.extra_logprobs:
            columns.extra.setdefault(name, []).append(self._extra[name][row])
        if want.entropy and self._entropy is not None:
            columns.entropy.append(self._entropy[row])
        if want.top_logprobs and self._top_ids is not None and self._top_logprobs is not None:
            columns.top_ids.append(self._top_ids[row][: want.top_logprobs])
            columns.top_logprobs.append(self._top_logprobs[row][: want.top_logprobs])
