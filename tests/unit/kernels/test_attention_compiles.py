"""Every attention kernel compiles for the GPUs it may meet, without one."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.attention_config import decode_config, prefill_config, prefix_config
from engine.kernels.decode_attention import LayerShape, TileConfig, _decode_kernel
from engine.kernels.decode_work import _cut_kernel
from engine.kernels.merge_states import _merge_kernel
from engine.kernels.prefill_attention import _prefill_kernel
from engine.kernels.prefix_attention import _prefix_kernel

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
QWEN = LayerShape(32, 8, 128, 16)
SMOL = LayerShape(9, 3, 64, 16, sink=True, window=512, softcap=30.0)
WIDE = LayerShape(16, 2, 256, 64)
ODD = LayerShape(6, 2, 96, 1)
SMALL = LayerShape(4, 2, 64, 16)


def build(kernel, pointers: dict[str, str], constants: dict, tiles: TileConfig, capability: int, **options):
    """The compiled kernel, with pointers and strides aligned as in use."""
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = pointers.get(name, "*i32") if name.endswith("_ptr") else "i32"
        if name.endswith(("_ptr", "q_stride", "out_stride")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    options = dict(num_warps=tiles.num_warps, num_stages=tiles.num_stages) | options
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    return compiled


def pointers(element: str) -> dict[str, str]:
    names = ("q_ptr", "kv_ptr", "out_ptr", "sink_ptr")
    states = ("part_ptr", "part_lse_ptr", "prefix_ptr", "prefix_lse_ptr", "mean_ptr", "lse_ptr")
    return {name: element for name in names} | {name: "*fp32" for name in states}


def decode(shape: LayerShape, capability: int, element="*bf16", shared=True, early=False):
    tiles = decode_config(shape.block_d, 4 if element == "*fp32" else 2)
    block_m = max(16, triton.next_power_of_2(shape.group))
    constants = dict(SINK=shape.sink, SHARED=shared, EARLY=early, BLOCK_M=block_m, BLOCK_N=tiles.block_n)
    if not shape.sink:
        constants["sink_ptr"] = None
    return build(_decode_kernel, pointers(element), shape.constants | constants, tiles, capability)


def prefix(shape: LayerShape, capability: int, element="*bf16", early=False):
    tiles = prefix_config(shape.block_d, 4 if element == "*fp32" else 2, shape.group)
    constants = dict(EARLY=early, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n)
    return build(_prefix_kernel, pointers(element), shape.constants | constants, tiles, capability)


def prefill(shape: LayerShape, capability: int, element="*bf16", longest=4096, splits=1):
    tiles = prefill_config(shape.block_d, 4 if element == "*fp32" else 2, shape.group, longest)
    constants = dict(SINK=shape.sink, SPLITS=splits, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n)
    if not shape.sink:
        constants["sink_ptr"] = None
    return build(_prefill_kernel, pointers(element), shape.constants | constants, tiles, capability)


SLOW = pytest.mark.slow
CASES = [
    (decode, 80, {}),
    (decode, 90, {"early": True}),
    (decode, 100, {"shared": False}),
    (prefix, 90, {"early": True}),
    (prefill, 90, {}),
    *(pytest.param(kernel, capability, {}, marks=SLOW) for kernel in (prefix, prefill) for capability in (80, 100)),
    pytest.param(prefill, 90, {"longest": 4, "splits": 4}, marks=SLOW),
]


@pytest.mark.parametrize("kernel, capability, variant", CASES)
def test_bf16_kernels_compile(kernel, capability: int, variant: dict) -> None:
    ptx = kernel(QWEN, capability, **variant).asm["ptx"]
    assert "cp.async" in ptx, "keys and values must be loaded ahead"
    if "early" in variant:
        assert f"griddepcontrol.{'wait' if kernel is decode else 'launch_dependents'}" in ptx


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_cuts_and_merges_compile(capability: int) -> None:
    one = TileConfig(16, 4, 1)
    build(_cut_kernel, {}, dict(BLOCK_B=256, MIN_SPLIT=64, MULTIPLE=64, FIXED_SPLITS=0), one, capability)
    constants = dict(HEADS=32, HEAD_DIM=128, BLOCK_H=8, BLOCK_D=128, SINK=False, sink_ptr=None)
    build(_merge_kernel, pointers("*bf16"), constants, one, capability)


@pytest.mark.slow
@pytest.mark.parametrize("shape, element", [(SMOL, "*bf16"), (WIDE, "*bf16"), (ODD, "*bf16"), (SMALL, "*fp32")])
@pytest.mark.parametrize("kernel", [decode, prefix, prefill])
def test_other_shapes_compile(kernel, shape: LayerShape, element: str) -> None:
    kernel(shape, 90, element)
