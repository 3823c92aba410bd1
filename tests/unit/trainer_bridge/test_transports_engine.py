"""One suite over every transport, against a real engine. Cases B1, B3, B11, C1 end to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import Conflict, InvalidRequest
from engine.types import GroupRequest, SamplingParams
from trainer_bridge.config import OptimConfig
from trainer_bridge.publisher import Publisher
from trainer_bridge.samples import Episode
from trainer_bridge.trainer import PolicyTrainer
from trainer_bridge.transports import BodyTransport, DiskTransport, InProcessControl, InProcessTransport, Transport

TRANSPORTS: dict[str, Callable[[Path], Transport]] = {
    "body": lambda _: BodyTransport(),
    "body, small buckets": lambda _: BodyTransport(bucket_bytes=40_000),
    "disk": lambda root: DiskTransport(root / "updates"),
    "disk, small shards": lambda root: DiskTransport(root / "updates", shard_bytes=20_000),
    "in process": lambda _: InProcessTransport(),
}


def policy(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    policy(0).save_pretrained(path)
    return path


@pytest.fixture
def engine(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, EngineConfig(device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def digest(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an engine that was loaded with the new weights from cold."""
    path = tmp_path_factory.mktemp("new-policy")
    policy(1).save_pretrained(path)
    return Engine.from_pretrained(path, EngineConfig(device="cpu", dtype="float32")).digest()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_update_equals_a_cold_load(engine: Engine, digest: str, tmp_path: Path, name: str) -> None:
    publisher = Publisher(InProcessControl(engine), TRANSPORTS[name](tmp_path))
    assert engine.digest() != digest
    report = publisher.publish(policy(1))
    assert report.digest == engine.digest() == digest
    assert (report.policy_version, engine.policy.version, publisher.next_version) == (1, 1, 2)
    assert sum(report.loaded.values()) > 0
    publisher.publish(policy(0))
    assert engine.digest() != digest and engine.policy.version == 2


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("fault", ["misspelt", "missing", "extra", "shape"])
def test_case_b11_weights_that_do_not_fit_change_nothing(engine: Engine, tmp_path: Path, name: str, fault: str) -> None:
    publisher = Publisher(InProcessControl(engine), TRANSPORTS[name](tmp_path))
    before = engine.digest()
    weights = dict(policy(1).state_dict())
    key = "model.layers.1.mlp.up_proj.weight"
    if fault == "misspelt":
        weights["model.layers.1.mlp.upp_proj.weight"] = weights.pop(key)
    elif fault == "missing":
        del weights[key]
    elif fault == "extra":
        weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(64, 32)
    else:
        weights[key] = weights[key][:-1]
    with pytest.raises(InvalidRequest, match="up_proj" if fault != "misspelt" else "upp_proj"):
        publisher.publish(weights)
    assert (engine.digest(), engine.policy.version, engine.policy.pending) == (before, 0, None)
    assert publisher.publish(policy(1)).policy_version == 1
    if (tmp_path / "updates").exists():
        assert list((tmp_path / "updates").iterdir()) == []


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "language_model."])
def test_case_b11_wrapped_names_load_the_same_weights(engine: Engine, digest: str, prefix: str) -> None:
    weights = {prefix + name: value for name, value in policy(1).state_dict().items()}
    assert Publisher(InProcessControl(engine), BodyTransport()).publish(weights).digest == digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_case_b3_a_sender_of_another_dtype_is_cast_not_reinterpreted(engine: Engine, dtype: torch.dtype) -> None:
    publisher = Publisher(InProcessControl(engine), BodyTransport())
    sent = publisher.publish({name: value.to(dtype) for name, value in policy(1).state_dict().items()})
    cast = publisher.publish({name: value.to(dtype).float() for name, value in policy(1).state_dict().items()})
    assert sent.digest == cast.digest


def test_case_i4_an_engine_refuses_a_version_that_goes_back(engine: Engine) -> None:
    publisher = Publisher(InProcessControl(engine), BodyTransport())
    publisher.publish(policy(1), 57)
    for version in (57, 1):
        with pytest.raises(Conflict, match="more than 57"):
            Publisher(InProcessControl(engine), BodyTransport()).publish(policy(0), version)
    assert engine.policy.version == 57


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_case_c1_rollout_and_trainer_agree_after_an_update(engine: Engine, temperature: float) -> None:
    model = policy(1)
    Publisher(InProcessControl(engine), InProcessTransport()).publish(model)
    prompt_ids = np.array([1, 9, 30, 17, 5], np.uint32)
    sampling = SamplingParams(temperature=temperature, max_new=12, seed=3)
    (group,) = engine.generate([GroupRequest(group_id="g", prompt_ids=prompt_ids, n=6, sampling=sampling)])
    samples = []
    for output in group.samples:
        episode = Episode("g", output.index, prompt_ids, temperature)
        episode.record(output)
        samples.append(episode.close(0.0))
    assert len(samples) == 6 and all(span.policy_version == 1 for s in samples for span in s.spans)
    trainer = PolicyTrainer(model, OptimConfig(), pad_id=0)
    for sample, scores in zip(samples, trainer.score(samples), strict=True):
        np.testing.assert_allclose(sample.rollout_logprobs, scores.numpy(), atol=1e-4)


def test_a_failed_transport_leaves_the_old_policy_serving(engine: Engine) -> None:
    class Broken(BodyTransport):
        def stage(self, control, txn, new_version, tensors):
            super().stage(control, txn, new_version, dict(list(tensors.items())[:3]))
            raise ConnectionError("the sender died")

    before = engine.digest()
    with pytest.raises(ConnectionError):
        Publisher(InProcessControl(engine), Broken()).publish(policy(1))
    assert engine.policy.pending is None and engine.digest() == before
    (group,) = engine.generate([GroupRequest(group_id="g", prompt_ids=np.array([1, 2], np.uint32))])
    assert group.policy_version == 0
