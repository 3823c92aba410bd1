"""Block drafter checkpoints: loading, foreign layouts, and refusals by name."""

import json

import pytest
import torch

from engine.dspark.block_model import BlockDrafterModel
from engine.dspark.block_spec import check_fits, drafter_spec_from_config, read_drafter_spec
from engine.dspark.config import DSparkConfig, number_of_drafts
from engine.dspark.drafter import DrafterTraits
from engine.dspark.layouts import convert_drafter
from engine.errors import InvalidRequest, SparkrollError, Unsupported
from engine.models.spec import spec_from_config
from engine.weights.loader import load_weights
from engine.weights.transaction import UpdateTransaction
from tests.support import begin_of, to_named
from tests.unit.dspark.drafters import checkpoint, drafter_config, random_drafter, save_drafter

TARGET = spec_from_config(
    dict(
        architectures=["LlamaForCausalLM"],
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
)
INNER = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
)


def load(folder):
    model = BlockDrafterModel(read_drafter_spec(folder), torch.float32)
    load_weights(model, folder, module="drafter")
    return model


def assert_same(model, other):
    for (name, value), (_, expected) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "none"])
def test_a_checkpoint_loads_into_the_fused_parameters(tmp_path, kind):
    overrides = (
        {"markov_rank": 0, "confidence_head_with_markov": False} if kind == "none" else {"markov_head_type": kind}
    )
    model = random_drafter(**overrides)
    tensors = checkpoint(model) | {"embed_tokens.weight": torch.zeros(512, 64), "lm_head.weight": torch.zeros(512, 64)}
    assert_same(load(save_drafter(tmp_path / "d", drafter_config(**overrides), tensors)), model)


def test_a_live_update_equals_a_cold_load(tmp_path):
    live, new = random_drafter(seed=0), random_drafter(seed=1)
    named = [to_named(name, value) for name, value in checkpoint(new).items()]
    begin = begin_of(named, "d1", 0, 1, module="drafter")
    addresses = [value.data_ptr() for value in live.parameters()]
    transaction = UpdateTransaction(live, begin)
    for tensor in reversed(named):
        transaction.stage([tensor])
    transaction.prepare()
    transaction.apply()
    assert_same(live, new)
    assert [value.data_ptr() for value in live.parameters()] == addresses


@pytest.mark.parametrize("change", ["absent", "extra", "shape"])
def test_tensors_that_do_not_fit_are_named(tmp_path, change):
    tensors = checkpoint(random_drafter())
    name = "layers.1.mlp.up_proj.weight"
    if change == "absent":
        del tensors[name]
    elif change == "extra":
        name = "layers.7.mlp.up_proj.weight"
        tensors[name] = torch.zeros(3)
    else:
        tensors[name] = tensors[name][:-1].clone()
    with pytest.raises(InvalidRequest, match=name.replace(".", "[.]")):
        load(save_drafter(tmp_path / "d", drafter_config(), tensors))


REFUSED = {
    "architectures": ["Gemma4DSparkModel"],
    "markov_head_type": "transformer",
    "target_layer_ids": [0, 3],
    "block_size": 0,
    "mask_token_id": 512,
    "num_target_layers": None,
    "attention_bias": True,
    "sample_from_anchor": "yes",
    "draft_vocab_size": 64,
    "confidence_head_with_markov": 1,
    "markov_rank": None,
    "hidden_act": "gelu",
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_configuration_that_is_not_built_is_refused_by_name(field):
    config = drafter_config() | {field: REFUSED[field]}
    with pytest.raises(SparkrollError) as caught:
        drafter_spec_from_config(config)
    assert (caught.value.field or "").split("[")[0] in (field, "draft_vocab_ids")


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_configuration_that_is_none_is_refused(tmp_path, text):
    folder = save_drafter(tmp_path / "d", {}, checkpoint(random_drafter()))
    (folder / "config.json").write_text(text)
    for read in (read_drafter_spec, lambda source: convert_drafter(source, tmp_path / "out", TARGET)):
        with pytest.raises(InvalidRequest, match=r"config\.json"):
            read(folder)
    assert not (tmp_path / "out").exists()


def test_a_drafter_of_another_target_is_refused():
    check_fits(drafter_spec_from_config(drafter_config()), TARGET)
    for field, value in (("hidden_size", 128), ("vocab_size", 1024), ("num_target_layers", 5)):
        with pytest.raises(Unsupported, match=field):
            check_fits(drafter_spec_from_config(drafter_config(**{field: value})), TARGET)


def test_case_f5_no_more_drafts_than_the_block_was_trained_for():
    spec = drafter_spec_from_config(drafter_config())
    traits = DrafterTraits(name="block", max_drafts=spec.num_drafts)
    allowed = [None, 1, 3, 4]
    assert [number_of_drafts(DSparkConfig(drafts=drafts), traits) for drafts in allowed] == [4, 1, 3, 4]
    for drafts in (0, 5, 8):
        with pytest.raises(InvalidRequest, match=r"dspark\.drafts"):
            number_of_drafts(DSparkConfig(drafts=drafts), traits)


def speculators_config(**overrides):
    config = drafter_config()
    outer = dict(
        speculators_model_type="dspark",
        architectures=["DSparkSpeculator"],
        transformer_layer_config={key: config[key] for key in INNER},
        aux_hidden_state_layer_ids=[1, 3],
        sample_from_anchor=True,
        draft_vocab_size=512,
        block_size=4,
        mask_token_id=511,
        markov_rank=8,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        speculators_config={"algorithm": "dspark"},
    )
    return {key: value for key, value in (outer | overrides).items() if value is not None}


def test_speculators_checkpoints_are_converted(tmp_path):
    model = random_drafter()
    tensors = checkpoint(model)
    del tensors["confidence_head.proj.bias"]
    source = save_drafter(tmp_path / "s", speculators_config(), tensors)
    spec = convert_drafter(source, tmp_path / "d", TARGET)
    assert spec.target_layers == (0, 2)
    converted = load(tmp_path / "d")
    assert float(converted.confidence_head.bias) == 0.0
    model.confidence_head.bias.data.zero_()
    assert_same(converted, model)


def test_specforge_checkpoints_are_converted(tmp_path):
    config = drafter_config()
    moved = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    source = {key: value for key, value in config.items() if key not in moved}
    source |= {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "x"}}
    source["dflash_config"] = {key: config[key] for key in moved} | {"projector_type": "dspark"}
    model = random_drafter()
    folder = save_drafter(tmp_path / "s", source, checkpoint(model))
    assert convert_drafter(folder, tmp_path / "d", TARGET) == model.spec
    assert_same(load(tmp_path / "d"), model)
    source["dflash_config"]["projector_type"] = "dflash"
    folder = save_drafter(tmp_path / "s2", source, checkpoint(model))
    with pytest.raises(Unsupported, match="projector_type"):
        convert_drafter(folder, tmp_path / "d2", TARGET)


@pytest.mark.parametrize("flag", [None, "true"])
def test_case_f10_a_missing_or_senseless_slot_convention_is_an_error(tmp_path, flag):
    source = save_drafter(tmp_path / "s", speculators_config(sample_from_anchor=flag), checkpoint(random_drafter()))
    with pytest.raises(InvalidRequest, match="sample_from_anchor"):
        convert_drafter(source, tmp_path / "d", TARGET)
    assert not (tmp_path / "d").exists()


def test_case_f10_the_slot_convention_is_stored_and_changes_the_drafts(tmp_path):
    source = save_drafter(tmp_path / "s", speculators_config(sample_from_anchor=False), checkpoint(random_drafter()))
    spec = convert_drafter(source, tmp_path / "d", TARGET)
    assert (spec.first_slot, spec.num_drafts) == (1, 3)
    assert json.loads((tmp_path / "d" / "config.json").read_text())["sample_from_anchor"] is False
    assert read_drafter_spec(tmp_path / "d") == spec


class TestCaseJ7:
    def source(self, tmp_path, size, **tables):
        tensors = checkpoint(random_drafter())
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:size].clone()
        return save_drafter(tmp_path / "s", speculators_config(draft_vocab_size=size), tensors | tables)

    def test_i_the_table_holds_offsets(self, tmp_path):
        kept = torch.arange(0, 512, 8)
        mask = torch.zeros(512, dtype=torch.bool)
        mask[kept] = True
        source = self.source(tmp_path, 64, d2t=kept - torch.arange(64), t2d=mask)
        spec = convert_drafter(source, tmp_path / "d", TARGET)
        assert spec.draft_ids is not None and spec.draft_ids[3] == 24
        narrow = checkpoint(random_drafter())["markov_head.markov_w2.weight"][:64]
        assert torch.equal(load(tmp_path / "d").markov_head.w2[kept], narrow)

    def test_ii_no_table_and_all_ids_is_the_identity(self, tmp_path):
        assert convert_drafter(self.source(tmp_path, 512), tmp_path / "d", TARGET).draft_ids is None

    def test_iii_fewer_ids_and_no_table_is_refused(self, tmp_path):
        with pytest.raises(InvalidRequest, match="d2t"):
            convert_drafter(self.source(tmp_path, 64), tmp_path / "d", TARGET)

    def test_absolute_ids_in_place_of_offsets_are_refused(self, tmp_path):
        with pytest.raises(InvalidRequest, match=r"draft_vocab_ids|t2d"):
            convert_drafter(self.source(tmp_path, 64, d2t=torch.arange(0, 512, 8)), tmp_path / "d", TARGET)
