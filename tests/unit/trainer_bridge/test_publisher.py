"""Publishing: order, digests, versions, failures. Cases B1-B3, B11 (the sender's side), I4."""

from __future__ import annotations

import hashlib
import random
import threading
import time

import pytest
import torch
from torch import nn

from engine.errors import Conflict, DeadlineExceeded, InvalidRequest, TooLarge
from engine.types import NamedTensor, UpdateBegin, UpdateProgress, UpdateReport
from trainer_bridge.names import checkpoint_name, checkpoint_tensors
from trainer_bridge.publisher import Publisher
from trainer_bridge.tensors import decode, encode, specify
from trainer_bridge.transports import BodyTransport, DiskTransport
from trainer_bridge.transports.body import OVERHEAD, buckets


class Receiver:
    """A receiving end that keeps what it was sent, in memory; the rules are an engine's."""

    def __init__(self, version: int = 0) -> None:
        self.policy_version = version
        self.drafter_version = 0
        self.begin: UpdateBegin | None = None
        self.staged: dict[str, NamedTensor] = {}
        self.serving: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.fail_at: str | None = None
        self.hang_at: str | None = None
        self.released = threading.Event()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.hang_at:
            self.released.wait(30)
        if name == self.fail_at:
            raise InvalidRequest(field=name, expected="nothing", actual="a call")

    def version(self) -> Receiver:
        return self

    def update_begin(self, begin: UpdateBegin) -> UpdateProgress:
        self._called("begin")
        if begin.base_version != self.policy_version:
            raise Conflict(field="base_version", expected=self.policy_version, actual=begin.base_version)
        self.begin, self.staged = begin, {}
        return self._progress()

    def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        self._called("tensors")
        assert self.begin is not None and self.begin.txn == txn
        specs = {spec.name: spec for spec in self.begin.manifest}
        for tensor in tensors:
            assert hashlib.sha256(tensor.data).hexdigest() == specs[tensor.name].digest
            self.staged[tensor.name] = tensor
        return self._progress()

    def update_disk(self, txn: str, uri: str) -> UpdateProgress:
        raise NotImplementedError

    def update_commit(self, txn: str) -> UpdateReport:
        self._called("commit")
        assert self.begin is not None
        self.policy_version = self.begin.new_version
        self.serving = {name: decode(tensor) for name, tensor in self.staged.items()}
        return UpdateReport(
            policy_version=self.policy_version, drafter_version=0, loaded={"policy": len(self.staged)},
            pause_ms=0.0, flushed_tokens=0, retracted=0, digest="",
        )  # fmt: skip

    def update_rollback(self, txn: str) -> None:
        self.calls.append("rollback")
        self.begin, self.staged = None, {}

    def _progress(self) -> UpdateProgress:
        assert self.begin is not None
        return UpdateProgress(
            txn=self.begin.txn, staged=len(self.staged), announced=len(self.begin.manifest), staged_bytes=0
        )


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(4 + i, 8) for i in range(6)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_survive_the_way(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    for view in (
        tensor,
        tensor.t(),
        tensor[:, 1:4],
        tensor[1],
        torch.zeros(0, 4, dtype=dtype),
        torch.tensor(2.5).to(dtype),
    ):
        assert torch.equal(decode(encode("x", view)), view)


def test_case_b3_declared_dtype_must_fit_the_bytes() -> None:
    named = encode("w", torch.zeros(4, 4))
    wrong = NamedTensor(name="w", dtype="BF16", shape=[4, 4], data=named.data)
    with pytest.raises(InvalidRequest, match="w: expected 32 bytes"):
        decode(wrong)
    with pytest.raises(InvalidRequest, match="w: expected a dtype"):
        encode("w", torch.zeros(4, dtype=torch.int64))


def test_case_b1_any_order_and_chunking_arrives_whole() -> None:
    source = weights()
    for seed in range(20):
        rng = random.Random(seed)
        names = list(source)
        rng.shuffle(names)
        receiver = Receiver()
        limit = rng.choice([400, 600, 1000]) + OVERHEAD
        Publisher(receiver, BodyTransport(limit)).publish({name: source[name] for name in names})
        assert receiver.serving.keys() == source.keys()
        assert all(torch.equal(receiver.serving[name], source[name]) for name in source)


def test_buckets_keep_the_limit_and_refuse_a_tensor_that_cannot() -> None:
    source = weights()
    limit = 2 * (9 * 8 * 4 + OVERHEAD)
    packed = list(buckets(source, limit))
    assert len(packed) > 1
    assert [tensor.name for bucket in packed for tensor in bucket] == list(source)
    assert all(sum(t.data.nbytes + OVERHEAD for t in bucket) <= limit for bucket in packed)
    receiver = Receiver()
    with pytest.raises(TooLarge, match=r"layer\.5\.weight"):
        Publisher(receiver, BodyTransport(9 * 8 * 4 + OVERHEAD - 1)).publish(source)
    assert receiver.calls == ["begin", "rollback"]


@pytest.mark.parametrize("stage", ["begin", "tensors", "commit"])
def test_failure_rolls_back_and_the_next_publish_succeeds(stage: str) -> None:
    receiver = Receiver()
    publisher = Publisher(receiver, BodyTransport())
    publisher.publish(weights(0))
    receiver.fail_at = stage
    with pytest.raises(InvalidRequest, match=stage):
        publisher.publish(weights(1))
    assert receiver.calls[-1] == "rollback" and receiver.policy_version == 1
    assert torch.equal(receiver.serving["layer.0.weight"], weights(0)["layer.0.weight"])
    receiver.fail_at = None
    assert publisher.publish(weights(1)).policy_version == 2
    assert (publisher.stats.published, publisher.stats.failed) == (2, 1)


@pytest.mark.parametrize("stage", ["begin", "tensors", "commit"])
def test_case_b2_every_call_ends_within_the_timeout(stage: str) -> None:
    receiver = Receiver()
    receiver.hang_at = stage
    publisher = Publisher(receiver, BodyTransport(), timeout_s=0.2)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=rf"update_{stage}: expected an answer within 0\.2 s"):
        publisher.publish(weights())
    assert time.monotonic() - started < 5
    receiver.hang_at = None
    receiver.released.set()


def test_case_i4_versions_never_go_back() -> None:
    receiver = Receiver(version=57)
    restarted = Publisher(receiver, BodyTransport())
    with pytest.raises(Conflict, match="new_version: expected more than 57, got 1"):
        restarted.publish(weights(), 1)
    assert receiver.calls == [] and restarted.stats.refused == 1
    assert restarted.next_version == 58
    assert restarted.publish(weights()).policy_version == 58
    with pytest.raises(Conflict):
        restarted.publish(weights(), 58)


def test_case_i4_a_publisher_follows_others() -> None:
    receiver = Receiver()
    first, second = (Publisher(receiver, BodyTransport()) for _ in range(2))
    assert [first.publish(weights()).policy_version, second.publish(weights()).policy_version] == [1, 2]
    assert first.publish(weights()).policy_version == 3


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "base_model.model.", "module._orig_mod.", "_fsdp_wrapped_module.module."]
)
def test_case_b11_known_wrappers_are_stripped(prefix: str) -> None:
    assert (
        checkpoint_name(f"{prefix}model.layers.0.self_attn.q_proj.weight") == "model.layers.0.self_attn.q_proj.weight"
    )


def test_case_b11_inner_wrappers_are_stripped_and_others_kept() -> None:
    assert checkpoint_name("model.layers.0._checkpoint_wrapped_module.mlp.up_proj.base_layer.weight") == (
        "model.layers.0.mlp.up_proj.weight"
    )
    adapter = "base_model.model.model.layers.0.q_proj.lora_A.default.weight"
    assert checkpoint_name(adapter) == "model.layers.0.q_proj.lora_A.default.weight"
    assert checkpoint_name("modulation.weight") == "modulation.weight"


def test_case_b11_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"_orig_mod\.w: expected one tensor per name"):
        checkpoint_tensors({"w": torch.zeros(2), "_orig_mod.w": torch.ones(2)})


def test_tied_weights_travel_once_and_buffers_along() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    assert list(checkpoint_tensors(nn.DataParallel(Tied()))) == ["embed.weight"]
    with pytest.raises(InvalidRequest, match="at least one tensor"):
        checkpoint_tensors({})


def test_manifest_announces_every_tensor_with_its_digest() -> None:
    spec = specify(encode("w", torch.tensor([[1.0, 2.0]])))
    assert (spec.dtype, spec.shape) == ("F32", [1, 2])
    assert spec.digest == hashlib.sha256(b"\x00\x00\x80\x3f\x00\x00\x00\x40").hexdigest()


def test_disk_folder_is_whole_sharded_and_dropped_after_the_commit(tmp_path) -> None:
    from transformers.modeling_utils import load_state_dict

    seen: dict[str, torch.Tensor] = {}
    source = weights()

    class Disk(Receiver):
        def update_disk(self, txn: str, uri: str) -> UpdateProgress:
            from pathlib import Path

            folder = Path(uri)
            assert folder.parent == tmp_path and not list(tmp_path.glob(".*partial"))
            for shard in sorted(folder.glob("*.safetensors")):
                seen.update(load_state_dict(str(shard)))
            self.staged = {name: encode(name, tensor) for name, tensor in seen.items()}
            return self._progress()

    receiver = Disk()
    Publisher(receiver, DiskTransport(tmp_path, shard_bytes=400)).publish(source)
    assert all(torch.equal(seen[name], source[name]) for name in source)
    assert list(tmp_path.iterdir()) == []
    kept = Publisher(receiver, DiskTransport(tmp_path, keep=True))
    kept.publish(source)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("policy-00000002-") and (folder / "model.safetensors.index.json").exists()


def test_incomplete_staging_is_never_committed() -> None:
    class Forgetful(BodyTransport):
        def stage(self, control, txn, new_version, tensors):
            return super().stage(control, txn, new_version, dict(list(tensors.items())[:-1]))

    receiver = Receiver()
    with pytest.raises(Conflict, match="expected 6 tensors staged, got 5"):
        Publisher(receiver, Forgetful()).publish(weights())
    assert "commit" not in receiver.calls and receiver.calls[-1] == "rollback"
