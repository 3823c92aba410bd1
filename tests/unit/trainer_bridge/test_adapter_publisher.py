"""What peft trains is what engines serve: its factors, alone or with the base."""

from __future__ import annotations

import time

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import DeadlineExceeded, InvalidRequest
from engine.types import AdapterRef, ScoreRequest
from tests.support import begin_of, make_engine, prompt, state_tensors
from trainer_bridge.adapter_publisher import AdapterPublisher
from trainer_bridge.transports.in_process import InProcessControl


def trained(folder, seed: int) -> peft.PeftModel:
    """Two adapters on one model, as a population has them, with ranks by module."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "rank_pattern": {"up_proj": 7}}
    model = peft.get_peft_model(base, peft.LoraConfig(**config), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(**config, use_rslora=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    return model


@torch.inference_mode()
def logprobs(model, adapter: str, ids) -> torch.Tensor:
    model.set_adapter(adapter)
    tokens = torch.tensor([[int(i) for i in ids]])
    logits = torch.log_softmax(model(tokens, use_cache=False).logits[0].float(), -1)
    return logits[:-1].gather(1, tokens[0, 1:, None])[:, 0]


def served(engine, name: str, ids) -> torch.Tensor:
    output = engine.score(ScoreRequest(sequences=[ids], adapter=AdapterRef(name=name)))
    return torch.from_numpy(output.sequences[0].logprobs[1:].copy())


def test_each_adapter_of_a_model_is_published_as_it_is_and_a_bad_one_is_not(t_full):
    engine, model, ids = make_engine(t_full), trained(t_full, 0), prompt(20)
    publishers = {name: AdapterPublisher(InProcessControl(engine), f"policy-{name}") for name in ("one", "two")}
    for name, publisher in publishers.items():
        report = publisher.publish(model, name)
        assert report.adapter.rev == 1 and publisher.stats.bytes_sent < 200_000 < engine.gauges().weights_bytes
    for name in publishers:
        torch.testing.assert_close(served(engine, f"policy-{name}", ids), logprobs(model, name, ids), atol=1e-4, rtol=0)
    before = served(engine, "policy-one", ids)
    factor = next(value for name, value in model.named_parameters() if "lora_A.one" in name)
    factor.data[0, 0] = float("nan")
    with pytest.raises(InvalidRequest, match="finite"):
        publishers["one"].publish(model, "one")
    assert publishers["one"].stats.failed == 1 and engine.adapters.current == {"policy-one": 1, "policy-two": 1}
    assert torch.equal(served(engine, "policy-one", ids), before)
    engine.check()


def test_base_and_adapter_are_published_by_one_commit(t_full, t_full_w1):
    engine, old, new, ids = make_engine(t_full), trained(t_full, 0), trained(t_full_w1, 1), prompt(20)
    control, tensors = InProcessControl(engine), state_tensors(t_full_w1)
    publisher = AdapterPublisher(control, "policy")
    publisher.publish(old, "one")
    control.update_begin(begin_of(tensors, "both", 0, 1))
    assert publisher.publish(new, "one", txn="both").adapter.state == "staged"
    torch.testing.assert_close(served(engine, "policy", ids), logprobs(old, "one", ids), atol=1e-4, rtol=0)
    control.update_tensors("both", tensors)
    assert control.update_commit("both").loaded["adapters"] == 1
    torch.testing.assert_close(served(engine, "policy", ids), logprobs(new, "one", ids), atol=1e-4, rtol=0)
    engine.check()


def test_silence_ends_within_its_bound(t_full):
    class Silent:
        def update_adapter(self, name, **revision):
            time.sleep(30)

    publisher = AdapterPublisher(Silent(), "policy", timeout_s=0.1)
    with pytest.raises(DeadlineExceeded):
        publisher.publish(trained(t_full, 0), "one")
    assert publisher.stats.failed == 1
