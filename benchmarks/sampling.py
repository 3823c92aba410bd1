"""What a step of sampling costs on this machine.

Owns the comparison of the sampler with plain torch sampling (softmax, then `multinomial`; argmax
for greedy) in one run, and with the columns that cost extra. Ignores the forward pass.

    python -m benchmarks.sampling [--vocab 49152] [--device cpu] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.report import Row, report
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.sampling.seeds import derive_seed
from engine.types import SamplingParams, Want

CASES = {
    "temperature": (SamplingParams(), Want()),
    "greedy": (SamplingParams(temperature=0.0), Want()),
    "top_p 0.9": (SamplingParams(top_p=0.9), Want()),
    "top_k 20": (SamplingParams(top_k=20), Want()),
    "penalties": (SamplingParams(repetition_penalty=1.1), Want()),
    "temperature, entropy, top 5": (SamplingParams(), Want(entropy=True, top_logprobs=5)),
}


def best_ms(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The fastest of some runs: other work on the machine only ever adds."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:]) * 1e3


def peaked_logits(rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Normal logits with a spread of 3, about 7 nats of entropy: nearer a hard case than an easy one."""
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, vocab_size, generator=generator) * 3).to(device)


def measure(vocab_size: int, device: torch.device, repeats: int) -> list[Row]:
    """Milliseconds per call, and plain torch's time over ours."""
    table: list[Row] = []
    prompt = np.arange(128, dtype=np.uint32)
    for count in (1, 8, 32):
        logits_RV = peaked_logits(count, vocab_size, device)
        plain = best_ms(lambda x=logits_RV: torch.multinomial(torch.softmax(x, -1), 1).tolist(), repeats, device)
        argmax = best_ms(lambda x=logits_RV: x.argmax(-1).tolist(), repeats, device)
        table.append(Row(f"[{count}, {vocab_size}] torch softmax + multinomial", "time", plain, "ms"))
        table.append(Row(f"[{count}, {vocab_size}] torch argmax", "time", argmax, "ms"))
        for name, (params, want) in CASES.items():
            rows = [RowSampling(params, want, derive_seed(1, r), prompt) for r in range(count)]
            sampler, positions = Sampler(vocab_size, device), [128] * count
            ms = best_ms(
                lambda s=sampler, x=logits_RV, r=rows, p=positions: s.sample(x, r, p).ids.tolist(), repeats, device
            )
            case = f"[{count}, {vocab_size}] {name}"
            table.append(Row(case, "time", ms, "ms"))
            table.append(Row(case, "against torch", (argmax if name == "greedy" else plain) / ms, "x"))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step of sampling costs on this machine.")
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="torch threads on the CPU")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report("sampling", measure(args.vocab, torch.device(args.device), args.repeats), args.json)


if __name__ == "__main__":
    main()
