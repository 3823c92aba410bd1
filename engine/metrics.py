"""What the engine counts.

Owns numerators and denominators; whoever shows them divides. Counters never decrease. Ignores
how they are exported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """Tokens and events since the engine was made.

    `prompt_tokens` and `cached_tokens` are the sums of what replies report per sample.
    `lookup_tokens`/`hit_tokens` are the cache's own share: what prefills asked for and found.
    `computed_tokens` went through the model in prefill, `decode_rows` in decode steps.
    Of steps that run as captured graphs, `graph_rows` over `graph_padded_rows` is the share of rows
    that are not padding; `graph_eager_steps` ran launch by launch because their capture failed. In `adapter_steps`
    some row had an adapter; in `stacked_steps`, some of those, first products came out of the model's own, for which
    `stack_copies` times an adapter's first factors were copied behind the weights: many of them mean that more
    adapters take turns than `adapters.stacked_ranks` has room for.
    `device_rounds` of speculation were launched ahead by the overlapped loop; in `serial_rounds` it left the
    step to the serial loop, as the engine has no rounds on the device. In `shared_rounds`, some of `device_rounds`,
    rows read their common prefixes once. Of rounds behind rounds the device was busy for `round_busy_seconds`, and had
    nothing to do before them for `round_idle_seconds`: what the host's planning and bookkeeping add.
    Units of the host tier (pages, window pages, states): `host_spilled` went to the host, `host_restored` came back,
    `host_dropped` were given up there, `host_failed` did not arrive whole, which costs a miss. Of `hit_tokens`,
    `host_hit_tokens` were hits only because they came back.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    decode_rows: int = 0
    generated_tokens: int = 0
    groups_started: int = 0
    groups_finished: int = 0
    samples_finished: int = 0
    samples_aborted: int = 0
    samples_failed: int = 0
    retractions: int = 0
    rejected: int = 0
    scored_tokens: int = 0
    updates: int = 0
    updates_failed: int = 0
    update_pause_ms: float = 0.0
    step_seconds: float = 0.0
    graph_captures: int = 0
    graph_capture_seconds: float = 0.0
    graph_rows: int = 0
    graph_padded_rows: int = 0
    graph_eager_steps: int = 0
    adapter_steps: int = 0
    stacked_steps: int = 0
    stack_copies: int = 0
    device_rounds: int = 0
    serial_rounds: int = 0
    shared_rounds: int = 0
    round_busy_seconds: float = 0.0
    round_idle_seconds: float = 0.0
    host_spilled: int = 0
    host_restored: int = 0
    host_dropped: int = 0
    host_failed: int = 0
    host_spilled_bytes: int = 0
    host_restored_bytes: int = 0
    host_hit_tokens: int = 0

    def replayed(self, steps: int, rows: int, padded: int, graphed: bool, adapters: bool, stacked: bool) -> None:
        """Steps of one captured kind have been enqueued, each of so many rows."""
        self.graph_rows += rows * steps
        self.graph_padded_rows += padded * steps
        self.graph_eager_steps += 0 if graphed else steps
        self.adapter_steps += steps if adapters else 0
        self.stacked_steps += steps if stacked else 0


@dataclass(slots=True, frozen=True)
class EngineGauges:
    """The present, read at one moment. Bytes are what each memory tag holds now; window pages are those of windowed
    layers, 0 where they have none of their own; host bytes are the host tier's, of its limit; resident adapters are
    those on the device."""

    running: int
    waiting: int
    prefilling: int
    pages_total: int
    pages_free: int
    pages_tree: int
    pages_private: int
    page_size: int
    policy_version: int
    weights_bytes: int
    kv_bytes: int
    graphs_bytes: int
    adapters_bytes: int
    window_pages_total: int = 0
    window_pages_free: int = 0
    window_pages_tree: int = 0
    window_pages_private: int = 0
    host_bytes: int = 0
    host_limit_bytes: int = 0
    adapters_resident: int = 0
