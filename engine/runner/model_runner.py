"""Runs a model over batches.

Owns the forward call and what is read off the hidden states: logits, prompt log-probabilities.
Ignores sampling and scheduling.

With `deterministic` the rows of linear layers are padded to a multiple of `ROW_MULTIPLE`: with fewer
rows, or an odd number, matrix products on the CPU sum in another order. The backend must be
deterministic too.

Shapes: T tokens, D hidden, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend
from engine.batch import ForwardBatch, WindowRows
from engine.layers.mixer import StateStep
from engine.layers.replay import ReplayStep, replay
from engine.memory.kv_pool import KVPool
from engine.memory.replay_ring import Run
from engine.memory.state_pool import StatePool
from engine.models.decoder import CausalLM, DenseDecoderLM
from lora.step import AdapterStep

if TYPE_CHECKING:
    from engine.attention.triton import TritonAttention
    from engine.runner.prefill_graphs import PrefillGraphs
    from lora.kernel_step import KernelStep

ROW_MULTIPLE = 4
PADDING_KEY = -1


class ModelRunner:
    def __init__(
        self, model: CausalLM, kv_pool: KVPool, backend: AttentionBackend, deterministic: bool = False
    ) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.backend = backend
        self.deterministic = deterministic
        self.states: StatePool | None = None
        """Set for models with recurrent layers."""

    @property
    def replays_chunks(self) -> bool:
        """Whether rows laid out as chunks of prompts are faster than as decode rows."""
        return False

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, capture: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        """Final hidden states hidden_TD of every token; keys and values are written to the pool.

        `capture` names layers by its keys and receives the states after each of them.
        """
        tokens = batch.num_tokens
        extra = -tokens % ROW_MULTIPLE if self.deterministic else 0
        whole = padded(batch, extra) if extra else batch
        states = None if self.states is None else StateStep.of(whole, self.states, self.deterministic)
        hidden_TD = self.model.forward(whole, self.backend, self.kv_pool, capture, states)
        if self.states is not None and batch.state_slots is not None:
            first = batch.provisional
            self.states.track(batch.state_slots[first:], batch.seq_lens[first:])
        if not extra:
            return hidden_TD
        for layer in capture or {}:
            assert capture is not None
            capture[layer] = capture[layer][:tokens]
        return hidden_TD[:tokens]

    @torch.inference_mode()
    def replay(self, runs: Sequence[Run]) -> None:
        """Bring recurrent states forward by tokens that were provisional and are kept."""
        assert self.states is not None and self.states.rings is not None, "nothing was provisional"
        step = ReplayStep.of(runs, self.states.rings, self.kv_pool.device)
        for mixer in self.model.mixers:
            replay(mixer, self.states.layer(mixer.layer), step)

    def logits(self, hidden_RD: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """logits_RV, fp32; `adapters` are the rows' own."""
        return self._logits(hidden_RD, slice(None), adapters)

    def logits_by_part(
        self, hidden_RD: torch.Tensor, width: int, adapters: AdapterStep | None = None
    ) -> Iterator[torch.Tensor]:
        """logits_RV, fp32, `width` ids after the other: for more rows than there is memory for."""
        for start in range(0, self.model.spec.vocab_size, width):
            yield self._logits(hidden_RD, slice(start, start + width), adapters)

    @torch.inference_mode()
    def _logits(self, hidden_RD: torch.Tensor, part: slice, adapters: AdapterStep | None) -> torch.Tensor:
        rows = hidden_RD.shape[0]
        extra = -rows % ROW_MULTIPLE if self.deterministic else 0
        if not extra:
            return self.model.logits(hidden_RD, part, adapters)
        return self.model.logits(F.pad(hidden_RD, (0, 0, 0, extra)), part, adapters)[:rows]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """logits_RV, fp32, of the tokens `batch.logit_rows_R` asks for."""
        return self.logits(self.hidden(batch).index_select(0, batch.logit_rows_R), batch.logit_adapters)

    @torch.inference_mode()
    def prompt_logprobs(
        self, hidden_TD: torch.Tensor, targets_T: torch.Tensor, temperature: float = 1.0, chunk: int = 128
    ) -> torch.Tensor:
        """log p(targets) under softmax(logits / temperature), fp32 [T]; temperature 0 reports raw.

        Rows are taken `chunk` at a time, so at most [chunk, V] logits exist at once.
        """
        assert hidden_TD.shape[0] == targets_T.shape[0], "one target for each hidden state"
        parts = []
        for start in range(0, hidden_TD.shape[0], chunk):
            logits = self.logits(hidden_TD[start : start + chunk])
            if temperature not in (0.0, 1.0):
                logits.div_(temperature)
            picked = logits.gather(1, targets_T[start : start + chunk, None].long()).squeeze(1)
            parts.append(picked - torch.logsumexp(logits, dim=1))
        return torch.cat(parts) if parts else hidden_TD.new_zeros(0, dtype=torch.float32)


def padded(batch: ForwardBatch, extra: int) -> ForwardBatch:
    """The batch with one more row of `extra` tokens in the scratch page, whose results nobody reads."""
    zeros = batch.input_ids_T.new_zeros(extra)
    return replace(
        batch,
        input_ids_T=torch.cat((batch.input_ids_T, zeros)),
        positions_T=torch.cat((batch.positions_T, zeros)),
        write_slots_T=torch.cat((batch.write_slots_T, zeros)),
        query_lens=[*batch.query_lens, extra],
        seq_lens=[*batch.seq_lens, extra],
        page_tables_BP=F.pad(batch.page_tables_BP, (0, 0, 0, 1)),
        row_keys=[*batch.row_keys, PADDING_KEY],
        state_slots=None if batch.state_slots is None else [*batch.state_slots, 0],
        window=None
        if batch.window is None
        else WindowRows(
            torch.cat((batch.window.write_slots_T, zeros)), F.pad(batch.window.page_tables_BP, (0, 0, 0, 1))
        ),
    )


class FusedRunner(ModelRunner):
    """The same results from fused kernels, with an attention backend that can `attend` to keys and
    values already written."""

    def __init__(
        self, model: DenseDecoderLM, kv_pool: KVPool, backend: TritonAttention, deterministic: bool = False
    ) -> None:
        super().__init__(model, kv_pool, backend)
        from engine.models.fused import FusedForward

        self.fused = FusedForward(model, kv_pool, deterministic)
        self.attention = backend
        self.prefill_graphs: PrefillGraphs | None = None
        """Set where chunks of prompts may run captured."""
        self._first = kv_pool.device.type == "cuda"

    @property
    def replays_chunks(self) -> bool:
        return self.prefill_graphs is not None

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, capture: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        if self.prefill_graphs is not None:
            replayed_TD = self.prefill_graphs.hidden(batch, capture)
            if replayed_TD is not None:
                return replayed_TD
        self.attention.plan(batch, self.kv_pool)
        inputs = batch.input_ids_T, batch.positions_T, batch.write_slots_T
        window_T = None if batch.window is None else batch.window.write_slots_T
        if self._first:
            self._first = False
            self._compile_ahead(inputs, window_T)
        return self.fused.hidden(*inputs, self.attention.attend, capture, kernels(batch.adapters), window_T)

    def _compile_ahead(
        self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], window_T: torch.Tensor | None
    ) -> None:
        from engine.runner.capture import anchored_pool
        from engine.runner.compile_ahead import compile_ahead

        stream = torch.cuda.Stream(self.kv_pool.device)
        pool, anchor = anchored_pool(stream)
        attend = self.attention.attend
        compile_ahead(lambda: self.fused.hidden(*inputs, attend, window_slots_T=window_T), stream, pool)
        del anchor
        torch.cuda.empty_cache()  # a pool's memory stays with torch after its last graph

    @torch.inference_mode()
    def _logits(self, hidden_RD: torch.Tensor, part: slice, adapters: AdapterStep | None) -> torch.Tensor:
        return self.fused.logits(hidden_RD, part, kernels(adapters)).float()


def kernels(adapters: AdapterStep | None) -> KernelStep | None:
    """What `Adapters.step` makes where the fused path runs."""
    return cast("KernelStep | None", adapters)
