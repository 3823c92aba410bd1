"""Looking ahead on a GPU: kernels are there afterwards, and nothing has run."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_compiled_ahead_and_not_launched(monkeypatch, tmp_path) -> None:
    from triton import knobs

    from engine.kernels.rms_norm import add_rms_norm, rms_norm
    from engine.kernels.swiglu import silu_and_mul
    from engine.runner.capture import anchored_pool
    from engine.runner.compile_ahead import compile_ahead

    names: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: names.append(src.name))
    # A width that no other test uses, so that nothing is compiled yet.
    x, residual = torch.ones(3, 1096, device="cuda"), torch.zeros(3, 1096, device="cuda")
    weight = torch.ones(1096, device="cuda")
    stream = torch.cuda.Stream()
    pool, anchor = anchored_pool(stream)

    def launches() -> torch.Tensor:
        rms_norm(x, weight, 1e-6)
        add_rms_norm(x, residual, weight, 1e-6)
        return silu_and_mul(torch.zeros(3, 2 * 1096, device="cuda"))

    assert compile_ahead(launches, stream, pool)[0] == len(names) == 3
    torch.cuda.synchronize()
    assert not residual.any(), "a launch went through"
    missing, graph = compile_ahead(launches, stream, pool)
    assert missing == 0 and graph is not None
    del anchor
    launches()
    assert len(names) == 3
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), torch.ones_like(x), atol=1e-5, rtol=0)
