"""What the device is told of a sample, and what of it only the host can see.

Owns that translation. Ignores when samples are handed over (`engine.scheduler.overlapped`).
"""

from __future__ import annotations

from engine.dspark.round_noise import noise_id
from engine.memory.device_table import DEFINITIONS, DeviceTable, RowState
from engine.request import Sample


def has_host_stops(sample: Sample) -> bool:
    """Whether there are more stop ids than the device looks for."""
    return len(sample.row.stop_ids) > DeviceTable.MAX_STOPS


def row_state(sample: Sample) -> RowState:
    params, sequence = sample.row.params, sample.sequence
    assert sequence is not None
    return RowState(
        slot=sequence.slot,
        last_token=sample.ids[-1],
        computed=sequence.computed,
        new=len(sample.ids),
        max_new=params.max_new,
        seed=sample.row.seed,
        temperature=0.0 if sample.row.greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        definition=DEFINITIONS.index(sample.row.want.logprobs),
        stop_ids=tuple(sorted(sample.row.stop_ids)),
        row=sample.row,
        sample_id=noise_id(sample.group.request.group_id, sample.index),
    )
