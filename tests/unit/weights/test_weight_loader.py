"""Cold load: values land where they belong, and bad folders change nothing."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import Conflict, InvalidRequest
from engine.weights import folder as folder_module
from engine.weights.digest import model_digest
from engine.weights.loader import load_weights
from engine.weights.safetensors_file import SafetensorsFile
from tests.unit.weights.tiny_weights import (
    KV_ROWS,
    Q_ROWS,
    Rank,
    TinyModel,
    checkpoint,
    save_sharded,
    save_single,
)


def assert_untouched(model: TinyModel) -> None:
    assert all(not parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("save", [save_single, save_sharded])
def test_every_tensor_lands_in_its_rows(tmp_path: Path, tied: bool, save) -> None:
    tensors = checkpoint(1, tied=tied)
    model = TinyModel(tied=tied)
    report = load_weights(model, save(tmp_path, tensors))
    assert report.loaded == report.expected == {"policy": len(tensors)}
    assert f"loaded {len(tensors)} of {len(tensors)}" in str(report)
    assert report.digest == model_digest(model)
    layer = "model.layers.1.self_attn"
    assert torch.equal(model.get_parameter("blocks.1.qkv")[:Q_ROWS], tensors[f"{layer}.q_proj.weight"])
    assert torch.equal(
        model.get_parameter("blocks.1.qkv")[Q_ROWS : Q_ROWS + KV_ROWS], tensors[f"{layer}.k_proj.weight"]
    )
    assert torch.equal(model.get_parameter("blocks.1.qkv")[Q_ROWS + KV_ROWS :], tensors[f"{layer}.v_proj.weight"])
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(model.get_parameter("blocks.0.gate_up")[up.shape[0] :], up)
    assert torch.equal(model.embed, tensors["model.embed_tokens.weight"])
    assert torch.equal(model.get_buffer("rotary"), torch.arange(4.0))


def test_ignored_and_identical_tied_names_are_fine(tmp_path: Path) -> None:
    tensors = checkpoint(1)
    plain = TinyModel()
    load_weights(plain, save_single(tmp_path / "plain", tensors))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((2,), float("nan"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    model = TinyModel()
    load_weights(model, save_single(tmp_path / "more", tensors))
    assert model_digest(model) == model_digest(plain)
    del tensors["model.embed_tokens.weight"]
    model = TinyModel()
    load_weights(model, save_single(tmp_path / "head", tensors))
    assert model_digest(model) == model_digest(plain)


def test_ranks_hold_their_shards(tmp_path: Path) -> None:
    tensors = checkpoint(3)
    folder = save_single(tmp_path, tensors)
    whole = TinyModel()
    load_weights(whole, folder)
    ranks = [TinyModel(parallel=Rank(rank, 2)) for rank in range(2)]
    for model in ranks:
        load_weights(model, folder)

    def parts(name: str) -> list[torch.Tensor]:
        return [model.get_parameter(name).data for model in ranks]

    splits = [qkv.split([Q_ROWS // 2, KV_ROWS // 2, KV_ROWS // 2]) for qkv in parts("blocks.0.qkv")]
    joined = torch.cat([torch.cat(halves) for halves in zip(*splits, strict=True)])
    assert torch.equal(joined, whole.get_parameter("blocks.0.qkv"))
    assert torch.equal(torch.cat(parts("blocks.0.out"), dim=1), whole.get_parameter("blocks.0.out"))
    assert torch.equal(torch.cat(parts("embed")), whole.embed)
    assert torch.equal(parts("blocks.0.norm")[1], whole.get_parameter("blocks.0.norm"))


def _edit_misspelt(tensors):
    tensors["model.embed_token.weight"] = tensors.pop("model.embed_tokens.weight")


def _edit_missing(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _edit_shape(tensors):
    tensors["model.layers.0.norm.weight"] = torch.zeros(7)


def _edit_nan(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")


def _edit_dtype(tensors):
    tensors["model.layers.0.norm.weight"] = torch.zeros(8, dtype=torch.int32)


def _edit_overflow(tensors):
    tensors["model.layers.0.norm.weight"][1] = 1e38


def _edit_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (_edit_misspelt, "model.embed_token.weight"),
        (_edit_misspelt, "model.embed_tokens.weight"),
        (_edit_missing, "model.layers.1.mlp.up_proj.weight"),
        (_edit_shape, "expected shape [8], got [7]"),
        (_edit_nan, "model.layers.1.mlp.up_proj.weight"),
        (_edit_dtype, "model.layers.0.norm.weight"),
        (_edit_overflow, "model.layers.0.norm.weight"),
        (_edit_head, "lm_head.weight"),
    ],
)
def test_a_bad_checkpoint_changes_nothing(tmp_path: Path, edit, named: str) -> None:
    tensors = checkpoint(1)
    edit(tensors)
    model = TinyModel(dtype=torch.float16)
    with pytest.raises(InvalidRequest) as error:
        load_weights(model, save_sharded(tmp_path, tensors))
    assert named in str(error.value)
    assert_untouched(model)


class _Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_case_n1_pickles_in_a_folder_are_refused_unread(tmp_path: Path, file: str) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / file).write_bytes(pickle.dumps(_Marker(marker)))
    with pytest.raises(InvalidRequest) as error:
        load_weights(TinyModel(), folder)
    assert file in str(error.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x00",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 6) + b"[[[[[[",
        b"header" + bytes(400),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    model = TinyModel()
    with pytest.raises(InvalidRequest, match=r"model\.safetensors"):
        load_weights(model, tmp_path)
    assert_untouched(model)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        },
    ],
)
def test_lying_headers_are_refused(tmp_path: Path, header: dict) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(InvalidRequest):
        SafetensorsFile(tmp_path / "model.safetensors")


def test_a_header_read_here_is_the_one_safetensors_wrote(tmp_path: Path) -> None:
    ones = torch.ones(3, dtype=torch.bfloat16)
    tensors = {"x": torch.arange(6.0).reshape(2, 3), "empty": torch.zeros(0, 4), "y": ones}
    save_file(tensors, tmp_path / "t.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "t.safetensors")
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    for name, stored in file.tensors.items():
        values = file.read(stored).view(dtypes[stored.dtype]).reshape(stored.shape)
        assert torch.equal(values, tensors[name])
    file.close()


@pytest.mark.parametrize("names", [["a.safetensors"], ["../a.safetensors"], ["/a.safetensors"], ["a.bin"]])
def test_an_index_names_whole_safetensors_of_its_folder_only(tmp_path: Path, names: list[str]) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    for place in (folder, tmp_path):
        save_file({"x": torch.zeros(2)}, place / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": names[0], "y": names[0]}}))
    with pytest.raises(InvalidRequest, match=r"index\.json"):
        load_weights(TinyModel(), folder)


def test_single_file_and_index_together_are_ambiguous(tmp_path: Path) -> None:
    save_sharded(tmp_path, checkpoint(1))
    save_single(tmp_path, checkpoint(2))
    with pytest.raises(InvalidRequest, match="both"):
        load_weights(TinyModel(), tmp_path)


def test_case_b10_missing_shard(tmp_path: Path) -> None:
    save_sharded(tmp_path, checkpoint(1))
    (tmp_path / "b.safetensors").unlink()
    model = TinyModel()
    with pytest.raises(InvalidRequest, match=r"b\.safetensors"):
        load_weights(model, tmp_path)
    assert_untouched(model)


def test_case_b10_cut_shard(tmp_path: Path) -> None:
    save_sharded(tmp_path, checkpoint(1))
    shard = tmp_path / "b.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    model = TinyModel()
    with pytest.raises(InvalidRequest, match=r"b\.safetensors"):
        load_weights(model, tmp_path)
    assert_untouched(model)


@pytest.mark.parametrize("change", ["remove", "rewrite", "truncate"])
def test_case_b10_folder_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    save_sharded(tmp_path, checkpoint(1))
    original, reads = SafetensorsFile.read, []

    def slow_read(self, stored):
        reads.append(stored.name)
        if len(reads) == 5:
            shard = tmp_path / "b.safetensors"
            if change == "remove":
                shard.unlink()
            elif change == "rewrite":
                save_sharded(tmp_path, checkpoint(2))
            else:
                with open(shard, "r+b") as file:
                    file.truncate(600)
        return original(self, stored)

    monkeypatch.setattr(folder_module.SafetensorsFile, "read", slow_read)
    model = TinyModel()
    with pytest.raises((Conflict, InvalidRequest), match=r"safetensors"):
        load_weights(model, tmp_path)
    assert_untouched(model)
    monkeypatch.undo()
    load_weights(model, save_sharded(tmp_path, checkpoint(2)))
