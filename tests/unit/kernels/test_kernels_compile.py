"""Every kernel compiles for the GPUs it may meet, without one, as its launcher specialises it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from engine.kernels.decode_attention import LayerShape
from tests.launches import build, recorded
from tests.unit.kernels.compile_entries import ENTRIES, decode_rows, latents, prefill_rows, sampling
from tests.unit.kernels.compile_layer_entries import experts, gated_delta

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("engine", "lora", "trainer_bridge", "rollout", "recipes")
CAPABILITIES = [80, 90, 100]
STREAMING = ("_decode_kernel", "_prefix_kernel", "_prefill_kernel", "skinny_matmul_kernel", "lora_shrink_kernel")
"""Kernels that wait for memory unless it is asked well ahead."""
SHAPES = [
    (LayerShape(16, 2, 256, 64), torch.bfloat16),
    (LayerShape(6, 2, 96, 1), torch.float16),
    (LayerShape(4, 2, 64, 16), torch.float32),
]


def jit_functions(source: str) -> list[ast.FunctionDef]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [node for node in functions if any("triton.jit" in ast.unparse(item) for item in node.decorator_list)]


@cache
def kernels() -> set[str]:
    """module.name of every jit function that no other one calls."""
    defined, called = {}, set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for function in jit_functions(path.read_text()):
            defined[".".join(path.relative_to(ROOT).with_suffix("").parts) + "." + function.name] = function.name
            called |= {node.func.id for node in ast.walk(function) if is_plain_call(node)}
    return {path for path, name in defined.items() if name not in called}


def is_plain_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def compile_all(entry: Callable[[int], None], capability: int) -> None:
    with recorded() as launches:
        entry(capability)
    assert launches, "an entry launches something"
    for kernel, values in launches:
        if "EARLY" in values:
            values["EARLY"] = capability >= 90
        compiled = build((kernel, values), capability)
        ptx = compiled.asm["ptx"]
        assert len(compiled.asm["cubin"]) > 1_000 and f"sm_{capability}" in ptx
        if kernel.__name__ in STREAMING:
            assert "cp.async" in ptx, f"{kernel.__name__} must load ahead"
        if values.get("EARLY"):
            assert "griddepcontrol.wait" in ptx or "griddepcontrol.launch_dependents" in ptx, kernel.__name__


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_has_an_entry(capability: int) -> None:
    with recorded() as launches:
        for entry in ENTRIES:
            entry(capability)
    launched = {f"{kernel.__module__}.{kernel.__name__}" for kernel, _ in launches}
    assert kernels() == launched, "compile_entries.py launches every kernel"


def cases() -> list:
    """Every entry for every capability; those that take seconds to compile for one of them in the quick run."""
    pairs = [(entry, capability) for entry in ENTRIES for capability in CAPABILITIES]
    seldom = [entry in (experts, gated_delta, latents) and capability != 90 for entry, capability in pairs]
    marks = [[pytest.mark.slow] if each else [] for each in seldom]
    ids = [f"{entry.__name__}-{capability}" for entry, capability in pairs]
    return [pytest.param(*pair, marks=mark, id=name) for pair, mark, name in zip(pairs, marks, ids, strict=True)]


@pytest.mark.parametrize(("entry", "capability"), cases())
def test_kernels_compile(entry: Callable[[int], None], capability: int) -> None:
    compile_all(entry, capability)


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry",
    [
        *(partial(entry, shape=shape, dtype=dtype) for entry in (decode_rows, prefill_rows) for shape, dtype in SHAPES),
        *(partial(sampling, edits=edits, vocab=151_936, tile=4096) for edits in (True, False)),
    ],
    ids=str,
)
def test_other_variants_compile(entry: Callable[[int], None]) -> None:
    compile_all(entry, 90)


@pytest.mark.parametrize(
    "module",
    ["block_rows", "draft_notes", "markov_bias", "round_judge", "round_rows", "round_spend", "row_columns"],
)
def test_sizes_of_a_rounds_graph_compile_nothing_anew(module: str) -> None:
    """Rounds meet ever new numbers of rows while they serve: a variant for those that are 1 or divide by 16 would be
    compiled when the first such graph is made, and stop everything."""
    names = vars(importlib.import_module(f"engine.kernels.{module}"))
    parameters = [p for name, kernel in names.items() if name.endswith("_kernel") for p in kernel.params]
    sizes = [p for p in parameters if p.name in ("rows", "verify", "tokens", "table_stride") and not p.is_constexpr]
    assert sizes and all(p.do_not_specialize for p in sizes), [p.name for p in sizes if not p.do_not_specialize]
