"""Which products compute a step of so many rows."""

from types import SimpleNamespace

import pytest
import torch

from engine.models.fused import FusedForward, Rows


def forward_of(deterministic=False, ranks=1):
    forward = object.__new__(FusedForward)
    forward._deterministic, forward._gate_bias = deterministic, False
    forward._model = SimpleNamespace(parallel=SimpleNamespace(size=ranks))
    return forward


@pytest.mark.parametrize(
    ("rows", "width", "kind"),
    [
        (1, 576, Rows.ONE),
        (2, 576, Rows.FEW),
        (256, 576, Rows.FEW),
        (257, 576, Rows.MANY),
        (64, 1024, Rows.FEW),
        (65, 1024, Rows.MANY),
        (2, 2048, Rows.MANY),
        (1, 4096, Rows.ONE),
    ],
)
def test_rows_and_widths(rows, width, kind):
    x_TD = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    assert forward_of().kind(x_TD) is kind
    assert forward_of(deterministic=True).kind(x_TD) is forward_of(ranks=2).kind(x_TD) is Rows.MANY
    assert forward_of().kind(x_TD.float()) is Rows.MANY
