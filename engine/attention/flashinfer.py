"""Prefill attention by FlashInfer, an optional library.

Owns its wrappers: one per kind of layer, planned on the host once a step. Takes the rows behind the
decode rows of `engine.attention.triton`, which stays the whole backend. Ignores decode rows: a
FlashInfer plan cuts work by lengths the host knows, and a captured decode graph advances lengths on
the device; a row that stops early would leave pieces that start past its end, which the library's
kernel computes with unsigned lengths. It also ignores steps of short rows: its kernel for compute
capability 9.0 takes 128 queries of one head a tile and never splits a row's context.

Shapes: T tokens, N query heads, K key/value heads, H head size, B rows, P page-table columns.
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.errors import Unsupported
from engine.memory.kv_pool import KVPool
from engine.models.spec import LayerSpec, ModelSpec
from engine.parallel import SINGLE, TensorParallel

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
MIN_QUERIES = 64
"""Steps whose longest row has fewer queries are left to the portable kernel."""
SPLIT_BYTES = 128 << 20
"""What the library advises for the partial results of split contexts."""


def installed() -> bool:
    return find_spec("flashinfer") is not None


def refuse_unfit(spec: ModelSpec, dtype: torch.dtype, deterministic: bool = False) -> None:
    """Raise `Unsupported`, naming the field, for what FlashInfer's prefill does not compute."""
    name = FlashInferPrefill.name
    for index, layer in enumerate(spec.layers):
        for field, value in (("sink", layer.sink or None), ("bias", layer.bias)):
            if value is not None:
                raise Unsupported(
                    field=f"layers[{index}].{field}", expected=f"none with the {name} attention", actual=value
                )
    if spec.head_dim not in HEAD_DIMS:
        raise Unsupported(field="head_dim", expected=f"one of {HEAD_DIMS} with {name}", actual=spec.head_dim)
    if dtype not in DTYPES:
        raise Unsupported(field="dtype", expected=f"float16 or bfloat16 with the {name} attention", actual=dtype)
    if deterministic:
        raise Unsupported(field="deterministic", expected=f"False with the {name} attention", actual=True)


class FlashInferPrefill:
    """A `PrefillPart`. The library compiles its kernels on the machine, which takes a minute the first
    time: `compiled` tells, and `compile` does it before the first step would."""

    name = "flashinfer"

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        deterministic: bool = False,
        parallel: TensorParallel = SINGLE,
    ) -> None:
        refuse_unfit(spec, dtype, deterministic)
        self._device = torch.device(device)
        if self._device.type != "cuda":
            raise Unsupported(field="device", expected="cuda with the flashinfer attention", actual=str(device))
        if not installed():
            raise Unsupported(field="attention", expected="flashinfer-python to be installed", actual=self.name)
        self._dtype = dtype
        self._head_dim = spec.head_dim
        self._num_heads = parallel.share(spec.num_heads, "num_attention_heads")
        self._num_kv_heads = parallel.share(spec.num_kv_heads, "num_key_value_heads")
        self._kinds = [_kind(layer) for layer in spec.layers]
        self._kernel: str = import_module("flashinfer.utils").determine_attention_backend(
            self._device, 0, False, False, dtype, dtype
        )
        self._wrappers: dict[tuple[int, float], Any] = {}
        self._workspace: torch.Tensor | None = None  # shared: layers run one after another
        self._planned: torch.cuda.Event | None = None

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> bool:
        first = batch.num_decode
        queries, lengths = batch.query_lens[first:], batch.seq_lens[first:]
        if max(queries) < MIN_QUERIES:
            return False
        assert kv_pool.dtype == self._dtype, f"a pool of {kv_pool.dtype} for attention in {self._dtype}"
        page_size = kv_pool.page_size
        used_B = torch.tensor([-(-length // page_size) for length in lengths], dtype=torch.int32)
        last_B = torch.tensor(lengths, dtype=torch.int32) - (used_B - 1) * page_size
        pages = window_pages = _page_ids(batch.page_tables_BP[first:], used_B)
        if batch.window is not None:
            window_pages = _page_ids(batch.window.page_tables_BP[first:], used_B)
        if self._planned is not None:
            # Plans are copied to the device from pinned memory that the next plan writes over.
            self._planned.synchronize()
        for window_left, softcap in set(self._kinds):
            self._wrapper((window_left, softcap)).plan(
                _starts(torch.tensor(queries, dtype=torch.int32)),
                _starts(used_B),
                pages if window_left < 0 else window_pages,
                last_B,
                self._num_heads,
                self._num_kv_heads,
                self._head_dim,
                page_size,
                causal=True,
                sm_scale=self._head_dim**-0.5,
                window_left=window_left,
                logits_soft_cap=softcap,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        self._planned = torch.cuda.Event()
        self._planned.record()
        return True

    def attend(self, q_TNH: torch.Tensor, kv_pool: KVPool, layer: int, out_TNH: torch.Tensor) -> None:
        keys_values = (kv_pool.k(layer), kv_pool.v(layer))
        self._wrappers[self._kinds[layer]].run(q_TNH, keys_values, out=out_TNH, enable_pdl=False)

    def compiled(self) -> bool:
        """Whether every kernel this needs has been built on this machine before."""
        return all(spec.is_compiled for spec in self._jit_specs())

    def compile(self) -> None:
        """Build what is missing, in compiler processes of the library's."""
        for spec in self._jit_specs():
            if not spec.is_compiled:
                spec.build(verbose=False)

    def compile_in_background(self) -> threading.Thread:
        """`compile` beside whatever runs; the next start finds the kernels."""

        def build() -> None:
            # Compilers inherit it, and the engine thread goes first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            self.compile()

        thread = threading.Thread(target=build, name="flashinfer-build", daemon=True)
        thread.start()
        return thread

    def _jit_specs(self) -> list[Any]:
        generate = import_module("flashinfer.jit.attention.modules").gen_batch_prefill_module
        types = (self._dtype, self._dtype, self._dtype, torch.int32, self._head_dim, self._head_dim)
        flags = sorted({(window_left >= 0, softcap > 0) for window_left, softcap in self._kinds})
        return [generate(self._kernel, *types, 0, windowed, capped, False) for windowed, capped in flags]

    def _wrapper(self, kind: tuple[int, float]) -> Any:
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            if self._workspace is None:
                size = SPLIT_BYTES if self._kernel == "fa2" else 1 << 20
                self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._device)
            make = import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper
            wrapper = self._wrappers[kind] = make(self._workspace, "NHD", backend=self._kernel)
        return wrapper


def _kind(layer: LayerSpec) -> tuple[int, float]:
    """(tokens visible to the left of the current one, soft-cap) as the library has them."""
    return (-1 if layer.window is None else layer.window - 1, layer.softcap or 0.0)


def _starts(counts_B: torch.Tensor) -> torch.Tensor:
    starts = torch.zeros(len(counts_B) + 1, dtype=torch.int32)
    torch.cumsum(counts_B, 0, dtype=torch.int32, out=starts[1:])
    return starts


def _page_ids(page_tables_BP: torch.Tensor, used_B: torch.Tensor) -> torch.Tensor:
    """The first `used_B` entries of every row, back to back. The host knows how many there are, so
    that nothing waits for the device."""
    rows, columns = page_tables_BP.shape
    row = torch.repeat_interleave(torch.arange(rows), used_B)
    column = torch.arange(len(row)) - (torch.cumsum(used_B, 0) - used_B)[row]
    cells = (row * columns + column).to(page_tables_BP.device)
    return page_tables_BP.reshape(-1).index_select(0, cells)
