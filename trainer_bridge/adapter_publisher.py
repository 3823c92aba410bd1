"""Brings a LoRA policy that peft trains to engines: its factors alone, never the base.

Owns what is read from the model and what peft's configuration looks like as plain values. Ignores how a
service publishes a revision everywhere or nowhere.
"""

from __future__ import annotations

import json
import time
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor

from engine.types import AdapterUpdateReport
from trainer_bridge.control import AdapterControl, bounded
from trainer_bridge.publisher import PublisherStats
from trainer_bridge.tensors import encode


class AdapterPublisher:
    """Publishes revisions of the policy `name`, which are the service's to number. `timeout_s` bounds a call."""

    def __init__(self, control: AdapterControl, name: str, *, timeout_s: float = 60.0) -> None:
        self._control = control
        self._name = name
        self._timeout_s = timeout_s
        self.stats = PublisherStats()

    def publish(
        self, model: PeftModel, adapter: str = "default", rev: int | None = None, txn: str | None = None
    ) -> AdapterUpdateReport:
        """The present factors of peft's `adapter`; with `txn` they wait for that open update's commit. Raises what
        the service refuses; the revision before then goes on serving."""
        began = time.monotonic()
        config, factors = adapter_of(model, adapter)
        tensors = [encode(name, tensor) for name, tensor in factors.items()]
        try:
            report = bounded(
                "update_adapter",
                self._timeout_s,
                lambda: self._control.update_adapter(self._name, config=config, tensors=tensors, rev=rev, txn=txn),
            )
        except BaseException:
            self.stats.failed += 1
            raise
        self.stats.published += 1
        self.stats.bytes_sent += sum(tensor.data.nbytes for tensor in tensors)
        self.stats.seconds += time.monotonic() - began
        return report


def adapter_of(model: PeftModel, adapter: str = "default") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and factors as peft would save them, embeddings of the base left out."""
    config = json.loads(json.dumps(model.peft_config[adapter].to_dict(), default=_plain))
    return config, get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)


def _plain(value: Any) -> Any:
    assert isinstance(value, set | frozenset), f"{value!r} in a configuration"
    return sorted(value)
