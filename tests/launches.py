"""Compile what a launcher would launch, for GPUs that need not be there.

`recorded` runs launchers on CPU tensors and keeps each kernel with its arguments; `build` compiles
one of them for a compute capability, specialised as a real launch would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
Launch = tuple[JITFunction, dict[str, Any]]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches are listed here instead of run."""
    launches: list[Launch] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        launches.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs))

    original: Callable = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def build(launch: Launch, capability: int):
    """The compiled kernel; its `asm` holds every stage."""
    kernel, values = launch
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if name in constants or value is None or value is True or value is False:
            signature[name], constexprs[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            kind = TYPES[value.base.dtype].removeprefix("*")
            signature[name] = f"tensordesc<{kind}{list(value.block_shape)}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], constexprs[(index,)] = "constexpr", 1
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: values[name] for name in OPTIONS if name in values}
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, attributes), target=GPUTarget("cuda", capability, 32), options=options
    )
    assert compiled.metadata.shared <= SHARED_MEMORY[capability], f"{compiled.metadata.shared} bytes of shared memory"
    return compiled
