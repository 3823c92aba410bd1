"""What whole windows would have yielded, of the rows that are looked at.

Owns which steps of which rows the estimate (`engine.dspark.block_estimate`) is told of: with many rows, some of them in
turn. Ignores what bounds are and whose turn it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.dspark.block_estimate import BlockEstimate, CeilingSums, is_exact
from engine.dspark.config import DSparkConfig
from engine.dspark.draft_step import DraftStep
from engine.dspark.told_rounds import ToldRounds
from engine.sampling.params import RowSampling


class Ceilings:
    def __init__(self, config: DSparkConfig) -> None:
        self._config = config
        self._estimate = BlockEstimate()

    @property
    def sums(self) -> CeilingSums:
        return self._estimate.sums

    def end(self, key: int, stopped: bool) -> None:
        """An incarnation of a request is over, or was lost sight of."""
        self._estimate.end(key, stopped)

    def observe(self, step: DraftStep, drafting: int, turns: Sequence[int]) -> None:
        """A step, in which the first `drafting` rows had drafts and the `turns` of them are looked at."""
        self._meet(step, turns)
        if drafting:
            self._observe_drafts(step, drafting, turns)

    def pass_by(self, rounds: ToldRounds, number: int) -> None:
        """A round in which no row is looked at. Trimmed steps that wait for its tokens meet them."""
        if not self._estimate.waits:
            return
        waiting = self._estimate.requests
        rows = [row for row, key in enumerate(rounds.foreseen.keys) if key in waiting]
        for key, ids, logprobs in rounds.tokens(number, rows):
            self._estimate.plain(key, ids, logprobs)

    def _meet(self, step: DraftStep, turns: Sequence[int]) -> None:
        """Show the tokens of all rows but those whose turn it is to trimmed steps that wait for them."""
        if not self._estimate.waits:
            return
        waiting = self._estimate.requests
        for row in [row for row, key in enumerate(step.keys) if key in waiting]:
            if row not in turns:
                self._estimate.plain(step.keys[row], *step.emitted_by(row))

    def _observe_drafts(self, step: DraftStep, rows: int, turns: Sequence[int]) -> None:
        """What the drafts of these rows that were not verified would have added: none, in most steps."""
        verdict, proposal = step.verdict, step.proposal
        assert verdict is not None and proposal is not None and step.emitted is not None
        if self._config.mode == "cap_accept":
            parts = zip(step.samples[:rows], step.emitted, verdict.num_accepted, strict=False)
            whole = sum(count if sample.finish == "stop" else accepted + 1 for sample, count, accepted in parts)
            self._estimate.exact(sum(step.emitted[:rows]), whole, rows)
            return
        steps, total = 0, 0
        for row in turns:
            if self._unknown(step, row):
                continue
            made, verified = proposal.lens[row], len(step.drafts[row])
            accepted = min(verdict.num_accepted[row], step.keep[row])
            if is_exact(made, verified, accepted, step.emitted[row]) and not self._estimate.is_open(step.keys[row]):
                steps += 1
                total += step.emitted[row]
            else:
                ids = proposal.ids_BG[row, :made].tolist()
                self._observe_trimmed(step, row, ids, verified, accepted)
        if steps:
            self._estimate.exact(total, total, steps)

    def _unknown(self, step: DraftStep, row: int) -> bool:
        """Rejection that trims rows sampled from more than logits over temperature is left out: log p of a draft
        is not known there."""
        sampling = step.samples[row].row
        trims = self._config.rule == "rejection" and self._config.mode == "compact"
        return trims and not sampling.greedy and not _plain_temperature(sampling)

    def _observe_trimmed(self, step: DraftStep, row: int, ids: list[int], verified: int, accepted: int) -> None:
        sample, proposal = step.samples[row], step.proposal
        assert proposal is not None
        log_q = None
        if self._config.rule == "rejection" and not sample.row.greedy:
            log_q = [0.0] * len(ids)
            if proposal.log_q_BG is not None:
                log_q = proposal.log_q_BG[row, : len(ids)].tolist()
            elif proposal.logits_BGV is not None:
                scaled_GV = proposal.logits_BGV[row, : len(ids)].float() / sample.row.temperature
                ids_G = proposal.ids_BG[row, : len(ids)]
                log_q = torch.log_softmax(scaled_GV, -1).gather(1, ids_G[:, None])[:, 0].tolist()
        self._estimate.step(step.keys[row], ids, log_q, verified, accepted, *step.emitted_by(row))


def _plain_temperature(row: RowSampling) -> bool:
    """Whether a token's log-probability is that of logits over temperature and nothing else."""
    return not (row.truncates or row.may_edit) and row.want.logprobs != "raw"
