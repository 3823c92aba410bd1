"""What is refused before anything is registered, and how factors are laid out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lora.errors import InvalidAdapter, UnsupportedAdapter
from lora.extents import Extents
from lora.factors import check_weights
from lora.folder import read_folder
from lora.packing import pack
from lora.step import LoopStep
from tests.unit.lora.toy_geometry import HIDDEN, all_linear, geometry, make_pool, tensors, weights

WHERE = geometry()
Q = "model.layers.0.self_attn.q_proj"
A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"


def check(config, given, max_rank=64):
    return check_weights(config, given, WHERE, max_rank, lambda module, tensor: False)


def good() -> dict[str, torch.Tensor]:
    return tensors({Q: 4}, WHERE)


def refuse(kind, match, config, given) -> None:
    with pytest.raises(kind, match=match):
        check({"r": 4} | config, given)


def test_the_plain_case_is_taken():
    adapter = check({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}, good())
    assert list(adapter.modules) == [Q] and adapter.modules[Q].scale == 2.0


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"peft_type": "LOHA"},
        {"layer_replication": [[0, 1]]}, {"trainable_token_indices": [1]}, {"target_parameters": ["w"]},
        {"alora_invocation_tokens": [1]}, {"fan_in_fan_out": True}, {"use_qalora": True}, {"arrow_config": {"k": 1}},
        {"kasa_config": {"k": 1}}, {"use_bdlora": {"k": 1}}, {"init_lora_weights": "olora"},
        {"megatron_config": {"k": 1}}, {"ensure_weight_tying": True}, {"a_field_of_the_future": True},
    ],
    ids=lambda config: next(iter(config)),
)  # fmt: skip
def test_arithmetic_that_is_not_built_is_refused_by_name(config):
    with pytest.raises(UnsupportedAdapter) as caught:
        check({"r": 4} | config, good())
    assert caught.value.field == next(iter(config))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0), ("r", True), ("lora_alpha", float("nan")), ("use_rslora", 1), ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"(": 1}), ("target_modules", "("), ("target_modules", 5), ("layers_to_transform", ["a"]),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_by_name(field, value):
    refuse(InvalidAdapter, field, {field: value}, good())


def test_case_e3_modules_the_model_does_not_have():
    misspelt = {name.replace("q_proj", "qq_proj"): tensor for name, tensor in good().items()}
    refuse(InvalidAdapter, "qq_proj", {"target_modules": ["qq_proj"]}, misspelt)
    refuse(InvalidAdapter, "qq_proj", {}, good() | misspelt)
    refuse(InvalidAdapter, "factors of the model's modules", {"target_modules": ["q_proj"]}, {})


def test_tensors_must_be_those_the_configuration_selects():
    refuse(InvalidAdapter, r"target_modules.*k_proj", {"target_modules": ["q_proj", "k_proj"]}, good())
    extra = good() | tensors({"lm_head": 4}, WHERE)
    refuse(InvalidAdapter, r"target_modules.*no tensors for lm_head", {"target_modules": ["q_proj"]}, extra)
    refuse(InvalidAdapter, "lora_B", {}, {A: good()[A]})


def test_case_e4_whole_weights_are_refused_by_their_name():
    extra = {"base_model.model.lm_head.modules_to_save.weight": torch.zeros(2, 2)}
    refuse(UnsupportedAdapter, "modules_to_save.*lm_head", {}, good() | extra)
    refuse(UnsupportedAdapter, "lm_head", {}, good() | {"base_model.model.lm_head.weight": torch.zeros(96, HIDDEN)})
    refuse(UnsupportedAdapter, "use_dora", {}, good() | {A.replace("lora_A", "lora_magnitude_vector"): torch.ones(48)})


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("shape", {A: torch.zeros(4, HIDDEN + 1)}),
        ("shape", {A: torch.zeros(5, HIDDEN), B: torch.zeros(48, 5)}),
        ("shape", {B: torch.zeros(4, 48)}),
        ("dtype", {A: torch.zeros(4, HIDDEN, dtype=torch.int8)}),
        ("finite", {A: torch.full((4, HIDDEN), float("nan"))}),
        ("finite", {B: torch.full((48, 4), float("inf"))}),
        ("bias", {B.replace("weight", "bias"): torch.zeros(48)}),
    ],
)
def test_tensors_that_cannot_be_used(match, change):
    refuse(InvalidAdapter, match, {}, good() | change)


def test_limits_and_overflow():
    with pytest.raises(InvalidAdapter, match="rank"):
        check({"r": 4}, good(), max_rank=3)
    huge = good()
    huge[A] += 1e6
    with pytest.raises(InvalidAdapter, match="float16"):
        pack(check({"r": 4}, huge), WHERE, torch.float16)


def test_two_adapters_in_one_file_are_refused():
    other = {name.replace("lora_A.", "lora_A.b."): tensor for name, tensor in good().items()}
    refuse(InvalidAdapter, "second", {}, good() | other)


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidAdapter, match=r"adapter_config\.json"):
        read_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4}))
    with pytest.raises(InvalidAdapter, match="safetensors"):
        read_folder(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickled")
    with pytest.raises(UnsupportedAdapter, match="never read"):
        read_folder(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(InvalidAdapter, match="readable"):
        read_folder(tmp_path)
    save_file(good(), tmp_path / "adapter_model.safetensors")
    assert check(*read_folder(tmp_path)).digest == check({"r": 4}, good()).digest


def test_the_digest_covers_values_scales_and_names():
    base = check({"r": 4}, good())
    changed = good()
    changed[B][3, 2] += 1e-3
    others = [check({"r": 4}, changed), check({"r": 4, "lora_alpha": 5}, good())]
    assert len({base.digest, *(other.digest for other in others)}) == 3


def test_factors_are_the_registrys_own():
    """Storage that a sender uses again, like a shared buffer, changes nothing."""
    given = good()
    adapter = check({"r": 4}, given)
    kept = adapter.modules[Q].a_RK.clone()
    given[A].zero_()
    assert torch.equal(adapter.modules[Q].a_RK, kept)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_ranks_of_a_split_model_add_up(size, bias):
    """Outputs side by side, inputs as partial sums: together what one rank computes."""
    modules = all_linear(WHERE, 5) | {"model.layers.0.mlp.gate_proj": 9}
    whole = make_pool(WHERE, weights(modules, WHERE, bias=bias))
    parts = [geometry(rank=rank, size=size) for rank in range(size)]
    pools = [make_pool(part, weights(modules, part, bias=bias)) for part in parts]
    slots = np.array([1, 0, 1])
    for site in (1, 2, 3, 4):
        x = torch.randn(3, WHERE.inputs(site))
        expected = torch.zeros(3, sum(WHERE.widths(site)))
        LoopStep(whole, slots).add_(site, x, expected)
        results = []
        for rank, (part, pool) in enumerate(zip(parts, pools, strict=True)):
            own = x if part.inputs(site) == x.shape[1] else x.chunk(size, 1)[rank]
            y = torch.zeros(3, sum(part.widths(site)))
            LoopStep(pool, slots).add_(site, own, y)
            results.append(y.split(list(part.widths(site)), 1))
        if site in (2, 4):
            actual = torch.stack([result[0] for result in results]).sum(0)
        else:
            actual = torch.cat([part for parts_ in zip(*results, strict=True) for part in parts_], 1)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


def test_extents_merge():
    extents = Extents(10)
    first, second, third = (extents.take(3) for _ in range(3))
    assert (first, second, third) == (0, 3, 6) and extents.take(2) is None
    extents.give_back(0)
    assert extents.longest_without([3]) == 6 and extents.longest_without([6]) == 4
    extents.give_back(3)
    assert extents.take(6) == 0
    extents.check()
