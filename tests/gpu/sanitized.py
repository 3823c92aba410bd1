"""A small selection of kernel tests to run under a checker of memory accesses:

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitized

Owns the selection: every family of kernels once, on shapes that do not fill their tiles. Ignores what
the checker finds, which it prints itself; a wrong result counts as a failure here. Allocations are
not cached, so that an access past the end of a tensor is not one into its neighbour.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from tests.gpu import test_attention_kernels as attention
from tests.gpu import test_fused_kernels as fused
from tests.gpu import test_latent_gpu as latent
from tests.gpu import test_round_kernels as rounds

BF16 = torch.bfloat16
SMALL = [
    {"size": 64, "group": 3, "page": 4, "reach": "short", "dtype": BF16, "kind": "all"},
    {"size": 96, "group": 16, "page": 16, "reach": "short", "dtype": BF16, "kind": "plain"},
]


def attention_rows(kind: Callable, case: dict) -> None:
    for scene, run in kind(case):
        attention.close(run(), scene.expected())


PARTS: list[tuple[str, Callable[[], object]]] = [
    *((kind.__name__, partial(attention_rows, kind, case)) for kind in attention.KINDS for case in SMALL),
    ("cuts", attention.test_rows_are_cut_as_the_definition_says),
    ("merges", partial(attention.test_stored_states_are_merged, True)),
    ("norms", partial(fused.test_norms, 3, 576, BF16)),
    ("gates", partial(fused.test_gates_and_embeddings, 3, 1536, BF16)),
    ("rope", partial(fused.test_rope_and_kv_write, 9, 3, 64, False, 5, BF16)),
    ("rope with norms", partial(fused.test_rope_and_kv_write, 4, 4, 96, True, 7, BF16)),
    ("one row", partial(fused.test_gemv, 577, 1536)),
    ("few rows", partial(fused.test_products_of_few_rows_and_the_norm_between, 19, 576, 1536)),
    ("products of fixed order", partial(fused.test_invariant_products_keep_a_rows_bits, 576, 1536, BF16)),
    ("a drafter's context", partial(rounds.test_context_of_all_layers, 5)),
    ("a drafter's head", partial(rounds.test_the_token_before_adds_to_logits, 40)),
    ("confidence", partial(rounds.test_how_sure_the_drafter_is, 3)),
    ("both ends of a step", fused.test_both_ends_of_a_step),
    ("latents", partial(latent.test_kernels_equal_the_definition, 5, 64, 7, 100, BF16, False)),
    ("sampling", partial(fused.test_sampling_equals_the_host, 1_001, 2048, 3.0, torch.float32, True)),
]


def main() -> int:
    failed = 0
    for name, part in PARTS:
        began = time.perf_counter()
        try:
            part()
            torch.cuda.synchronize()
        except Exception:
            failed += 1
            traceback.print_exc()
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    print(f"{len(PARTS) - failed} of {len(PARTS)} parts right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
