"""Random accept and reject scripts over a mixer alone, on any device.

Owns the mixers' shapes and the judge: plain steps of the same inputs. Ignores models and engines.

Shapes: B rows, L tokens of a row, I inputs, O outputs.
"""

from __future__ import annotations

import random

import torch

from engine.batch import ForwardBatch
from engine.layers.mixer import Mixer
from engine.layers.replay import ReplayStep, VerifyStep, replay, verify
from engine.memory.replay_ring import ReplayLayout, ReplayRings
from engine.memory.state_pool import StatePool
from engine.models import decoder
from engine.models.mamba2 import Mamba2Spec
from engine.models.mixers import GatedDeltaSpec, MixerSpec, ShortConvSpec, StateLayout
from engine.parallel import TensorParallel

MIXERS = {
    "conv": ShortConvSpec(3),
    "biased conv": ShortConvSpec(4, bias=True),
    "mamba2": Mamba2Spec(4, 6, 2, 8, 4, scales=(0.5, 2.0, 1.5, 0.7, 1.2)),
    "gated delta": GatedDeltaSpec(2, 4, 6, 5, 4),
    "gated delta by kind": GatedDeltaSpec(3, 3, 8, 7, 3, grouped=False),
}
HIDDEN = 32


def make_mixer(kind: MixerSpec, device: torch.device, dtype: torch.dtype) -> tuple[Mixer, StatePool]:
    """A mixer of layer 0 with random parameters, and slots with rings for it."""
    torch.manual_seed(1)
    mixer = decoder.MIXERS[type(kind)](kind, HIDDEN, 0, dtype, device, TensorParallel())
    for parameter in mixer.parameters():
        parameter.normal_(0, 0.3)
    pool = StatePool(StateLayout({0: kind.state(HIDDEN, dtype)}, kind.grid), 8, 4, device)
    pool.rings = ReplayRings(ReplayLayout({0: sum(kind.inputs(HIDDEN).values())}, dtype, 3, 5), device)
    return mixer, pool


def round_of(slots: list[int], lengths: list[int], counts: list[int], device: torch.device) -> ForwardBatch:
    nothing = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        input_ids_T=torch.zeros(sum(counts), dtype=torch.int64, device=device),
        positions_T=nothing,
        write_slots_T=nothing,
        query_lens=counts,
        seq_lens=[length + count for length, count in zip(lengths, counts, strict=True)],
        page_tables_BP=nothing,
        row_keys=slots,
        num_decode=0,
        logit_rows_R=nothing,
        state_slots=slots,
        provisional=len(slots),
    )


def play(kind: MixerSpec, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Rows verify and keep whatever numbers of tokens; outputs of kept ones and states must have the bits of plain
    steps, and junk behind what is kept never existed."""
    mixer, pool = make_mixer(kind, device, dtype)
    rings, slots, script = pool.rings, [5, 2, 7], random.Random(3)
    assert rings is not None
    true_BLI = torch.randn(3, 60, mixer.in_proj.weight.shape[0]).to(device, dtype)
    expected = []
    with torch.inference_mode():
        for token in range(60):
            out_BO = mixer.decode(true_BLI[:, token].contiguous(), pool.layer(0), torch.tensor(slots, device=device))
            states = [tensor[slots].clone() for tensor in pool.layer(0)]
            expected.append((out_BO.clone(), states))
        for slot in slots:
            pool.clear(slot)
        lengths = [0, 0, 0]
        while max(lengths) < 55:
            before = [tensor.clone() for tensor in pool.layer(0)]
            counts, kept = [script.randint(1, 5) for _ in slots], []
            step = VerifyStep.of(round_of(slots, lengths, counts, device), rings)
            assert step is not None
            rows = []
            for row, count in enumerate(counts):
                kept.append(script.randint(0, count))
                start = lengths[row]
                junk = torch.randn(count - kept[row], true_BLI.shape[2]).to(device, dtype) * 9
                rows.append(torch.cat((true_BLI[row, start : start + kept[row]], junk)))
            outputs = verify(mixer, torch.cat(rows), pool.layer(0), step).split(counts)
            assert all(torch.equal(now[1:], then[1:]) for now, then in zip(pool.layer(0), before, strict=True))
            for row in range(3):
                for place in range(kept[row]):
                    assert torch.equal(outputs[row][place], expected[lengths[row] + place][0][row])
            # Some states come forward in two pieces, as where one is kept on the way.
            halves = {slot: lengths[row] + kept[row] // 2 for row, slot in enumerate(slots)}
            wholes = {slot: lengths[row] + kept[row] for row, slot in enumerate(slots)}
            for targets in (halves, wholes):
                if runs := rings.advance(targets):
                    replay(mixer, pool.layer(0), ReplayStep.of(runs, rings, device))
            for row, slot in enumerate(slots):
                rings.close(slot)
                lengths[row] = wholes[slot]
                for index, tensor in enumerate(pool.layer(0)):
                    then = expected[lengths[row] - 1][1][index][row] if lengths[row] else torch.zeros_like(tensor[0])
                    assert torch.equal(tensor[slot], then), (kind, lengths)
            rings.check()
