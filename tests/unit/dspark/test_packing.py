"""Drafters in 8 bits: what comes back, what is served, what is refused by name."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.dspark.block_spec import drafter_spec_from_config, read_drafter_spec
from engine.dspark.packing import expand_drafter, folder_bytes, pack_drafter, pack_rows, unpack_rows
from engine.errors import InvalidRequest, SparkrollError, Unsupported
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import dspark, save_random

TEMPERATURES = [1.5, 1.25, 2.0, 0.5]
STORED = dict(temperatures=TEMPERATURES, dataset="d", num_samples=1, ece_before=0.0, ece_after=0.0, rule="coupled")
MATRIX, SCALES, NORM = "fc.weight", "fc.weight.scale", "norm.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = save_random(tmp_path_factory.mktemp("drafters") / "d0")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"target_digest": "0" * 64}))
    (folder / "sts-coupled.json").write_text(json.dumps(STORED))
    (folder / "README.md").write_text("a card")
    return folder


@pytest.fixture(scope="module")
def packed(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "d0"
    report = pack_drafter(source, folder)
    assert report.after == folder_bytes(folder) < 0.5 * report.before == 0.5 * folder_bytes(source)
    assert 0 < max(report.errors.values()) < 0.01
    return folder


def test_rows_come_back_within_half_a_step():
    values = torch.randn(6, 40) * torch.tensor([1e-30, 1e-6, 1.0, 7.0, 1e6, 0.0])[:, None]
    ints, scales = pack_rows(values)
    back = unpack_rows(ints, scales).float()
    step = scales[:, None] / 2 + values.abs() * 2**-8
    assert ints.abs().amax(dim=1).tolist() == [127] * 5 + [0] and bool(((back - values).abs() <= step).all())
    assert bool((back[5] == 0).all())


def test_an_expanded_drafter_is_the_source_with_its_matrices_rounded(source, packed, tmp_path):
    spec = expand_drafter(packed, tmp_path / "back")
    backbone = replace(spec.backbone, dtype=torch.float32)
    assert replace(spec, backbone=backbone) == read_drafter_spec(source) and spec.backbone.dtype is torch.bfloat16
    ours, theirs = load_file(tmp_path / "back" / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype is torch.bfloat16 and ours[name].shape == value.shape
        if value.dim() == 1 or len(value) == 1:
            assert torch.equal(ours[name], value.bfloat16()), name
        else:
            assert (ours[name].float() - value).norm() < 0.01 * value.norm(), name
    for name in ("README.md", "sts-coupled.json"):
        assert (tmp_path / "back" / name).read_text() == (source / name).read_text()


def test_an_engine_takes_temperatures_from_the_folder_and_says_whose_drafter_it_is(t_full, packed, tmp_path, caplog):
    expand_drafter(packed, tmp_path / "back")
    with caplog.at_level(logging.WARNING):
        engine = make_engine(t_full, dspark=dspark(tmp_path / "back"))
    assert engine._parts.speculation.scaling.temperatures_G.tolist() == TEMPERATURES
    assert "target_digest" in caplog.text and "000000000000" in caplog.text
    said = [e.generate([ask("a", prompt(7))])[0].samples[0].ids.tolist() for e in (engine, make_engine(t_full))]
    assert said[0] == said[1] and engine.draft_report().total("steps") > 0
    other = make_engine(t_full, dspark=dspark(tmp_path / "back", rule="rejection"))
    assert set(other._parts.speculation.scaling.temperatures_G.tolist()) == {1.0}, "fitted for one rule"


def changed(tensors, **values):
    return {name: value for name, value in (tensors | values).items() if value is not None}


REFUSED = {
    "no scales": (SCALES, lambda t: changed(t, **{SCALES: None})),
    "scales of another length": (SCALES, lambda t: changed(t, **{SCALES: t[SCALES][1:].clone()})),
    "scales that are not finite": (SCALES, lambda t: changed(t, **{SCALES: t[SCALES] / 0})),
    "scales of 16 bits": (SCALES, lambda t: changed(t, **{SCALES: t[SCALES].bfloat16()})),
    "scales of nothing": (SCALES, lambda t: changed(t, **{MATRIX: None})),
    "integers without rows": (NORM, lambda t: changed(t, **{NORM: t[NORM].to(torch.int8)})),
    "64 bits": (NORM, lambda t: changed(t, **{NORM: t[NORM].to(torch.int64)})),
    "a tensor too few": (NORM, lambda t: changed(t, **{NORM: None})),
    "another shape": (NORM, lambda t: changed(t, **{NORM: t[NORM][1:].clone()})),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_packed_drafter_is_refused_by_tensor(packed, tmp_path, case):
    name, change = REFUSED[case]
    shutil.copytree(packed, tmp_path / "bad")
    save_file(change(load_file(packed / "model.safetensors")), tmp_path / "bad" / "model.safetensors")
    with pytest.raises(InvalidRequest) as caught:
        expand_drafter(tmp_path / "bad", tmp_path / "out")
    assert name in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_other_packings_other_sources_and_folders_that_exist_are_refused(source, packed, tmp_path):
    config = json.loads((packed / "config.json").read_text())
    with pytest.raises(Unsupported, match=r"drafter expand"):
        drafter_spec_from_config(config)
    shutil.copytree(packed, tmp_path / "bad")
    for value in ("int4", None):
        (tmp_path / "bad" / "config.json").write_text(json.dumps(config | {"packing": value}))
        with pytest.raises(Unsupported, match=r"config\.json: packing: expected int8-rows"):
            expand_drafter(tmp_path / "bad", tmp_path / "out")
    tensors = load_file(source / "model.safetensors")
    tensors[MATRIX][3, 3] = float("nan")
    shutil.copytree(source, tmp_path / "nan")
    save_file(tensors, tmp_path / "nan" / "model.safetensors")
    for bad in (tmp_path / "nan", packed):
        with pytest.raises(SparkrollError, match=rf"{MATRIX}|packing"):
            pack_drafter(bad, tmp_path / "out")
    for write in (pack_drafter, expand_drafter):
        with pytest.raises(InvalidRequest, match="does not exist yet"):
            write(packed, tmp_path / "bad")
    assert not (tmp_path / "out").exists()
