"""Looking ahead for kernels that launches would compile, with a GPU that is only said to be there."""

from __future__ import annotations

import threading

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.kernels.rms_norm import rms_norm
from engine.kernels.swiglu import silu_and_mul
from engine.runner.compile_ahead import compile_all, missing_kernels


class NoDevice:
    """Enough of a driver to compile for a GPU; launching would need one."""

    def get_current_device(self) -> int:
        return 99  # what is compiled for it is found by no real device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Names of kernels compiled so far, disk cache aside."""
    names: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, src, cache_hit, **_: None if cache_hit else names.append(src.name)
    )
    monkeypatch.setattr(driver, "_active", NoDevice())
    return names


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="needs the compiler")
def test_what_launches_lack_is_compiled_once_and_then_there(compiled):
    x = torch.zeros(4, 64)
    weight = torch.ones(64)

    def launches() -> None:
        for _ in range(3):
            rms_norm(x, weight, 1e-5)
            silu_and_mul(torch.zeros(4, 128))

    with missing_kernels() as missing:
        launches()
    assert sorted(name.rpartition(".")[2] for name, _ in missing) == ["rms_norm_kernel", "silu_and_mul_kernel"]
    assert not compiled
    compile_all(missing)
    assert sorted(compiled) == ["rms_norm_kernel", "silu_and_mul_kernel"]
    with missing_kernels() as again, pytest.raises(Exception):  # noqa: B017 - found, so launched, with no GPU
        launches()
    assert not again


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="needs the compiler")
def test_other_threads_are_left_alone(compiled):
    failures: list[Exception] = []

    def elsewhere() -> None:
        try:
            rms_norm(torch.zeros(2, 32), torch.ones(32), 1e-5)
        except Exception as error:  # it compiles, and then finds no GPU to launch on
            failures.append(error)

    with missing_kernels() as missing:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not missing and compiled == ["rms_norm_kernel"] and failures
    assert knobs.runtime.jit_cache_hook is None
