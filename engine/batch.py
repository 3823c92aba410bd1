"""The tensors one forward pass works on.

Owns the layout of a step: which tokens run, where their keys and values go, what each row may
attend to. Ignores how the scheduler chose them and what is done with the logits.

Shapes: T tokens of all rows back to back, B rows (requests), P page-table columns, R rows of
logits wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lora.step import AdapterStep


@dataclass(slots=True, frozen=True)
class SharedPrefix:
    """Rows [start, end) of the batch whose first `num_pages` page-table entries are equal."""

    start: int
    end: int
    num_pages: int


@dataclass(slots=True)
class WindowRows:
    """What `ForwardBatch` says of pages, for windowed layers, which have pages of their own. Table entries are 0
    where a row no longer has the page: no window reaches there."""

    write_slots_T: torch.Tensor
    page_tables_BP: torch.Tensor


@dataclass(slots=True)
class ForwardBatch:
    """One step's input. Rows [0, num_decode) have exactly one query token, the rest are prefill.

    `write_slots_T` is `page_id * page_size + offset` for each token's key and value.
    `seq_lens` counts a row's tokens including this step's queries, so row b's queries are its
    last `query_lens[b]` positions. `page_tables_BP` is int32, padded with page 0, which nobody
    owns. `row_keys` names each row's request incarnation: equal keys on consecutive steps mean
    the same tokens extended, so a backend may keep per-row state under it.
    `shared_prefixes` are disjoint ranges of decode rows and of rows that verify drafts; a backend may ignore
    them. `adapters` is what LoRA policies add for the tokens, `logit_adapters` for the rows of logits; None where
    nobody has one.
    """

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    write_slots_T: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]
    page_tables_BP: torch.Tensor
    row_keys: list[int]
    num_decode: int
    logit_rows_R: torch.Tensor
    shared_prefixes: list[SharedPrefix] = field(default_factory=list)
    adapters: AdapterStep | None = None
    logit_adapters: AdapterStep | None = None
    state_slots: list[int] | None = None
    """Per row, where the states of recurrent layers are; a row's is changed by the pass."""
    provisional: int = 0
    """Rows at the front whose tokens may be taken back: their recurrent states are left as they are."""
    window: WindowRows | None = None
    """None where windowed layers use the pages of all others."""

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return self.input_ids_T.shape[0]
