"""Live update: any order and chunking equals a cold load; anything wrong changes nothing."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine.errors import Conflict, Corrupt, InvalidRequest, TooLarge
from engine.types import NamedTensor, TensorSpec, UpdateBegin
from engine.weights import transaction as transaction_module
from engine.weights.digest import model_digest
from engine.weights.transaction import UpdateTransaction, all_finite
from tests.unit.weights.tiny_weights import (
    TinyModel,
    begin_for,
    checkpoint,
    loaded,
    named,
    named_all,
    raw,
    save_sharded,
)

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.norm.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture
def w0() -> dict[str, torch.Tensor]:
    return checkpoint(0)


@pytest.fixture
def w1() -> dict[str, torch.Tensor]:
    return checkpoint(1)


@pytest.fixture
def model(tmp_path: Path, w0: dict[str, torch.Tensor]) -> TinyModel:
    return loaded(tmp_path / "w0", w0)


def update(model: TinyModel, tensors: dict[str, torch.Tensor], sent: list[list[NamedTensor]] | None = None) -> str:
    transaction = UpdateTransaction(model, begin_for(tensors, digests=True))
    for chunk in sent if sent is not None else [named_all(tensors)]:
        transaction.stage(chunk)
    prepared = transaction.prepare()
    transaction.apply()
    assert prepared.digest == model_digest(model)
    return prepared.digest


def random_chunks(tensors: dict[str, torch.Tensor], seed: int) -> list[list[NamedTensor]]:
    order = random.Random(seed)
    sent = named_all(tensors)
    order.shuffle(sent)
    if seed == 0:
        return [[tensor] for tensor in sent]
    chunks = []
    while sent:
        size = order.randint(1, 5)
        chunks.append(sent[:size])
        sent = sent[size:]
    return chunks


def test_case_b1_every_order_and_chunking_equals_a_cold_load(tmp_path: Path, model: TinyModel, w1) -> None:
    cold = model_digest(loaded(tmp_path / "w1", w1))
    digests = {update(model, w1, random_chunks(w1, seed)) for seed in range(20)}
    assert digests == {cold}
    assert cold != model_digest(loaded(tmp_path / "again", checkpoint(0)))


def test_case_b1_a_missing_half_is_named_and_the_old_weights_stay(model: TinyModel, w1) -> None:
    before = model_digest(model)
    transaction = UpdateTransaction(model, begin_for(w1))
    progress = transaction.stage(named_all({name: tensor for name, tensor in w1.items() if name != UP}))
    assert (progress.staged, progress.announced) == (len(w1) - 1, len(w1))
    with pytest.raises(InvalidRequest, match=UP):
        transaction.prepare()
    with pytest.raises(Conflict):
        transaction.apply()
    assert model_digest(model) == before
    transaction.stage([named(UP, w1[UP])])
    transaction.prepare()
    assert model_digest(model) == before
    transaction.apply()
    assert model_digest(model) != before


def test_apply_keeps_addresses_and_buffers(model: TinyModel, w1) -> None:
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    update(model, w1)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert torch.equal(model.get_buffer("rotary"), torch.arange(4.0))


@pytest.mark.parametrize("engine_dtype", [torch.bfloat16, torch.float32])
def test_case_b3_sent_dtypes_are_cast_like_a_cold_load(tmp_path: Path, engine_dtype: torch.dtype) -> None:
    exact = checkpoint(1, torch.bfloat16)
    exact = {name: tensor.to(torch.float16).to(torch.bfloat16) for name, tensor in exact.items()}
    digests = set()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        sent = {name: tensor.to(dtype) for name, tensor in exact.items()}
        model = loaded(tmp_path / "w0", checkpoint(0), engine_dtype)
        digests.add(update(model, sent))
        digests.add(model_digest(loaded(tmp_path / "cold", sent, engine_dtype)))
    assert len(digests) == 1
    model = loaded(tmp_path / "w0", checkpoint(0), torch.bfloat16)
    update(model, checkpoint(1))
    assert torch.equal(model.embed, checkpoint(1)[EMBED].to(torch.bfloat16))


@pytest.mark.parametrize("length", [0, 3, 16, 31, 33, 64])
def test_case_b3_bytes_that_do_not_match_dtype_and_shape_are_refused(model: TinyModel, w1, length: int) -> None:
    before = model_digest(model)
    transaction = UpdateTransaction(model, begin_for(w1))
    bad = msgspec.structs.replace(named(NORM, w1[NORM]), data=np.zeros(length, np.uint8))
    with pytest.raises(InvalidRequest, match=f"{NORM}.*expected 32 bytes.*got {length}"):
        transaction.stage([bad])
    assert transaction.progress().staged == 0 and model_digest(model) == before


@pytest.mark.parametrize("dtype", ["F64", "BF16", "I8", "float32", "", "\ud83d"])
def test_case_b3_another_dtype_than_announced_is_refused(model: TinyModel, w1, dtype: str) -> None:
    transaction = UpdateTransaction(model, begin_for(w1))
    with pytest.raises(InvalidRequest, match=NORM):
        transaction.stage([msgspec.structs.replace(named(NORM, w1[NORM]), dtype=dtype)])


def _bad_shape(w1) -> NamedTensor:
    return named("model.layers.0.self_attn.o_proj.weight", torch.zeros(8, 7))


def _bad_name(w1) -> NamedTensor:
    return named("model.layers.9.norm.weight", w1[NORM])


def _bad_nan(w1) -> NamedTensor:
    values = w1[UP].clone()
    values[0, 0] = float("nan")
    return named(UP, values)


def _bad_inf(w1) -> NamedTensor:
    values = w1[UP].clone()
    values[-1, -1] = float("-inf")
    return named(UP, values)


@pytest.mark.parametrize("bad", [_bad_shape, _bad_name, _bad_nan, _bad_inf])
@pytest.mark.parametrize("one_call", [True, False])
def test_case_b9_an_error_in_the_middle_leaves_everything_as_it_was(model: TinyModel, w1, bad, one_call: bool) -> None:
    before = model_digest(model)
    transaction = UpdateTransaction(model, begin_for(w1))
    good = named_all(w1)[:5]
    wrong = bad(w1)
    if not one_call:
        transaction.stage(good)
    staged = transaction.progress()
    with pytest.raises(InvalidRequest) as error:
        transaction.stage([*good, wrong] if one_call else [wrong])
    assert wrong.name in str(error.value)
    assert transaction.progress() == staged
    assert model_digest(model) == before
    transaction.discard()
    with pytest.raises(Conflict):
        transaction.stage(good)
    update(model, w1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_value_is_seen_wherever_it_lies(dtype: torch.dtype, value: float) -> None:
    values = torch.linspace(-3, 3, 1037).to(dtype)
    assert all_finite(values) and all_finite(values[:0])
    for position in range(len(values)):
        bad = values.clone()
        bad[position] = value
        assert not all_finite(bad)


def test_a_failed_call_can_be_followed_by_the_right_one(tmp_path: Path, model: TinyModel, w1) -> None:
    """Values staged by a call that failed are never taken for delivered."""
    transaction = UpdateTransaction(model, begin_for(w1))
    wrong = checkpoint(7)
    with pytest.raises(InvalidRequest):
        transaction.stage([*named_all(wrong)[:9], _bad_nan(w1)])
    transaction.stage(named_all(w1))
    transaction.prepare()
    transaction.apply()
    assert model_digest(model) == model_digest(loaded(tmp_path / "w1", w1))


def test_duplicates_are_fine_if_equal_and_refused_if_not(model: TinyModel, w1) -> None:
    transaction = UpdateTransaction(model, begin_for(w1))
    transaction.stage(named_all(w1))
    transaction.stage(named_all(w1)[:3])
    zeros = w1[NORM].clone()
    zeros[0] = 0.0
    with pytest.raises(Conflict, match=NORM):
        transaction.stage([named(NORM, zeros)])
    transaction.prepare()
    with pytest.raises(Conflict):
        transaction.stage(named_all(w1)[:1])


def test_digests_are_checked_over_the_bytes_as_sent(model: TinyModel, w1) -> None:
    transaction = UpdateTransaction(model, begin_for(w1, digests=True))
    other = w1[NORM].clone()
    other[3] += 1
    with pytest.raises(InvalidRequest, match=f"{NORM}.*SHA-256"):
        transaction.stage([named(NORM, other)])
    transaction.stage([named(NORM, w1[NORM])])


PREFIXES = [
    "module.{}",
    "_orig_mod.{}",
    "base_model.model.{}",
    "language_model.{}",
    "module._orig_mod.{}",
    "module.base_model.model.{}",
    "_fsdp_wrapped_module.{}",
]


def _nested(name: str) -> str:
    """As an adapter and a compiled block spell it."""
    name = name.replace("_proj.weight", "_proj.base_layer.weight").replace("layers.0.", "layers.0._orig_mod.")
    return f"base_model.model.{name}"


@pytest.mark.parametrize("prefix", PREFIXES)
def test_case_b11_known_prefixes_are_mapped(tmp_path: Path, model: TinyModel, w1, prefix: str) -> None:
    assert update(model, {prefix.format(name): tensor for name, tensor in w1.items()}) == model_digest(
        loaded(tmp_path / "w1", w1)
    )


def test_case_b11_infixes_are_mapped(tmp_path: Path, model: TinyModel, w1) -> None:
    cold = model_digest(loaded(tmp_path / "w1", w1))
    assert update(model, {_nested(name): tensor for name, tensor in w1.items()}) == cold
    shell = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in w1.items()}
    assert update(model, shell) == cold


def test_case_b11_unmatched_and_absent_names_are_listed(model: TinyModel, w1) -> None:
    misspelt = dict(w1)
    misspelt["model.layers.1.mlp.upp_proj.weight"] = misspelt.pop(UP)
    with pytest.raises(InvalidRequest) as error:
        UpdateTransaction(model, begin_for(misspelt))
    assert UP in str(error.value) and "upp_proj" in str(error.value)
    with pytest.raises(InvalidRequest, match=r"critic\.head"):
        UpdateTransaction(model, begin_for({**w1, "critic.head": torch.zeros(2)}))
    with pytest.raises(InvalidRequest, match="each tensor once"):
        UpdateTransaction(model, begin_for({**w1, f"module.{UP}": w1[UP]}))
    many = {f"n{i}.\ud83d" + "x" * 1000: torch.zeros(1) for i in range(1000)}
    with pytest.raises(InvalidRequest, match="and 992 more") as error:
        UpdateTransaction(model, begin_for({**w1, **many}))
    assert len(str(error.value)) < 4000 and str(error.value).isascii()


def test_case_b11_reports_count_n_of_n(model: TinyModel, w1) -> None:
    transaction = UpdateTransaction(model, begin_for(w1))
    progress = transaction.stage(named_all(w1))
    assert progress.staged == progress.announced == len(w1)
    assert progress.staged_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert transaction.prepare().loaded == {"policy": len(w1)}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("one_call", [False, True])
def test_case_b12_a_tied_head_must_be_the_embedding(
    tmp_path: Path, model: TinyModel, w1, reverse: bool, one_call: bool
) -> None:
    def sent(head: torch.Tensor) -> tuple[dict[str, torch.Tensor], list[list[NamedTensor]]]:
        tensors = {**w1, "lm_head.weight": head}
        order = named_all(tensors)
        order = order[::-1] if reverse else order
        return tensors, [order] if one_call else [[tensor] for tensor in order]

    before = model_digest(model)
    tensors, chunks = sent(w1[EMBED] + 1e-3)
    with pytest.raises(InvalidRequest, match=r"(lm_head|embed_tokens).*tied"):
        update(model, tensors, chunks)
    assert model_digest(model) == before
    assert update(model, *sent(w1[EMBED])) == model_digest(loaded(tmp_path / "w1", w1))


def test_untied_heads_are_their_own_tensor(tmp_path: Path) -> None:
    tensors = checkpoint(2, tied=False)
    model = loaded(tmp_path / "w0", checkpoint(0, tied=False), tied=False)
    update(model, tensors)
    assert torch.equal(model.head, tensors["lm_head.weight"])
    assert not torch.equal(model.head, model.embed)


def test_disk_and_tensors_give_the_same_bits(tmp_path: Path, model: TinyModel, w1) -> None:
    transaction = UpdateTransaction(model, begin_for(w1, digests=True))
    progress = transaction.stage_folder(save_sharded(tmp_path / "disk", w1))
    assert progress.staged == len(w1)
    transaction.prepare()
    transaction.apply()
    assert model_digest(model) == model_digest(loaded(tmp_path / "w1", w1))


def test_case_b10_a_cut_folder_stages_nothing(tmp_path: Path, model: TinyModel, w1) -> None:
    before = model_digest(model)
    folder = save_sharded(tmp_path / "disk", w1)
    whole = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(whole[: len(whole) // 2])
    transaction = UpdateTransaction(model, begin_for(w1))
    with pytest.raises(InvalidRequest, match=r"b\.safetensors"):
        transaction.stage_folder(folder)
    assert transaction.progress().staged == 0 and model_digest(model) == before
    (folder / "b.safetensors").write_bytes(whole)
    transaction.stage_folder(folder)
    transaction.prepare()


def test_a_failure_while_applying_is_corrupt(model: TinyModel, w1) -> None:
    transaction = UpdateTransaction(model, begin_for(w1))
    transaction.stage(named_all(w1))
    transaction.prepare()
    model.get_parameter("blocks.1.gate_up").data = torch.zeros(3, 8)
    with pytest.raises(Corrupt, match=r"blocks\.1\.gate_up"):
        transaction.apply()
    with pytest.raises(Conflict):
        UpdateTransaction(model := TinyModel(), begin_for(w1)).apply()
    assert not any(parameter.any() for parameter in model.parameters())


def test_discard_frees_and_is_repeatable(model: TinyModel, w1) -> None:
    transaction = UpdateTransaction(model, begin_for(w1))
    transaction.stage(named_all(w1))
    transaction.discard()
    transaction.discard()
    with pytest.raises(Conflict, match="discarded"):
        transaction.prepare()


def test_running_out_of_memory_is_a_typed_refusal(model: TinyModel, w1, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(transaction_module.torch, "empty_like", no_memory)
    transaction = UpdateTransaction(model, begin_for(w1))
    with pytest.raises(TooLarge):
        transaction.stage(named_all(w1))
    assert transaction.progress().staged == 0


def test_case_n1_a_pickle_in_a_tensor_is_only_bytes(tmp_path: Path, model: TinyModel, w1) -> None:
    marker = tmp_path / "marker"
    payload = pickle.dumps(_Marker(marker))
    transaction = UpdateTransaction(model, begin_for(w1))
    with pytest.raises(InvalidRequest):
        transaction.stage([msgspec.structs.replace(named(UP, w1[UP]), data=np.frombuffer(payload, np.uint8))])
    assert not marker.exists()


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_wire_views_at_odd_offsets_are_read_right(tmp_path: Path, model: TinyModel, w1) -> None:
    sent = []
    for name, tensor in w1.items():
        body = bytes(3) + raw(tensor).tobytes()
        sent.append(msgspec.structs.replace(named(name, tensor), data=np.frombuffer(body, np.uint8)[3:]))
    assert update(model, w1, [sent]) == model_digest(loaded(tmp_path / "w1", w1))


@pytest.mark.parametrize("shape", [[], [8, -1], [-8], [2**62, 2**62], [8, 1]])
def test_odd_shapes_in_a_manifest_are_refused(model: TinyModel, w1, shape: list[int]) -> None:
    manifest = [
        msgspec.structs.replace(spec, shape=shape) if spec.name == NORM else spec for spec in begin_for(w1).manifest
    ]
    with pytest.raises(InvalidRequest, match=NORM):
        UpdateTransaction(model, UpdateBegin(txn="t", base_version=0, new_version=1, manifest=manifest))


def test_an_empty_manifest_is_refused(model: TinyModel) -> None:
    manifest: list[TensorSpec] = []
    with pytest.raises(InvalidRequest, match="absent"):
        UpdateTransaction(model, UpdateBegin(txn="t", base_version=0, new_version=1, manifest=manifest))
