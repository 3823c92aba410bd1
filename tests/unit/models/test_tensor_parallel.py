"""Two ranks over gloo compute what one does: the split projections and both collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine.errors import Unsupported
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.parallel import SINGLE, TensorParallel

WIDTH, INNER, TOKENS = 12, 16, 5


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER), (WIDTH,))
    x, up, down, bias = (torch.randn(shape, generator=noise) for shape in shapes)
    return x, up, down, bias


def block(parallel: TensorParallel) -> torch.Tensor:
    """A fused column-parallel pair, then a row-parallel projection with a bias."""
    x, up, down, bias = weights()
    cpu = torch.device("cpu")
    first = ColumnParallelLinear(WIDTH, (INNER, INNER), False, torch.float32, cpu, parallel)
    second = RowParallelLinear(INNER, WIDTH, True, torch.float32, cpu, parallel)
    mine = slice(parallel.rank * INNER // parallel.size, (parallel.rank + 1) * INNER // parallel.size)
    first.weight.copy_(torch.cat((up[:INNER][mine], up[INNER:][mine])))
    second.weight.copy_(down[:, mine])
    assert second.bias is not None
    second.bias.copy_(bias)
    one, two = first(x).chunk(2, dim=-1)
    return second(one * two)


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel = TensorParallel(rank, 2, dist.group.WORLD)
    torch.testing.assert_close(block(parallel), block(SINGLE))
    gathered = parallel.all_gather(torch.full((2, 1), float(rank)))
    assert gathered.tolist() == [[0.0, 1.0]] * 2
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path) -> None:
    mp.spawn(worker, args=(str(tmp_path / "store"),), nprocs=2)


def test_what_does_not_split_evenly_is_refused_by_name() -> None:
    two = TensorParallel(0, 2, object())  # type: ignore[arg-type]
    assert two.share(6, "num_attention_heads") == 3
    with pytest.raises(Unsupported, match="num_key_value_heads"):
        two.share(3, "num_key_value_heads")
    assert SINGLE.share(3, "num_key_value_heads") == 3
