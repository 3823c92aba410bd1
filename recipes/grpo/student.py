"""What a run trains, and how engines come by its versions: the whole policy, or a LoRA policy on top of it.

Owns the differences between the two, so that the loop has none. Ignores learning. peft is imported where it is
used: a run of the whole policy does without.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from engine.types import AdapterRef
from recipes.grpo.config import AdapterConfig
from recipes.grpo.policy import Policy
from recipes.grpo.serving import Serving
from trainer_bridge.checkpoint import partial_folder, put_in_place, save_policy
from trainer_bridge.publisher import Publisher
from trainer_bridge.staleness import VersionOf, adapter_rev, policy_version

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

    from trainer_bridge.adapter_publisher import AdapterPublisher


@dataclass(frozen=True, slots=True)
class Published:
    """A version that engines serve now, and how long decoding waited for it."""

    version: int
    pause_ms: float


class Student(Protocol):
    """`model` is what the trainer computes with; whatever of it wants a gradient is trained."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def adapter(self) -> AdapterRef | None:
        """What requests name."""
        ...

    @property
    def version_of(self) -> VersionOf: ...

    def connect(self, served: Serving, timeout_s: float, version: int) -> int:
        """Bring engines that have just started to `version` (0: a new run); the version they serve then."""
        ...

    def publish(self) -> Published: ...

    def save(self, folder: Path) -> None:
        """Put into `folder` what `version` can be served and trained from later."""
        ...


class WholePolicy:
    adapter: AdapterRef | None = None

    def __init__(self, policy: Policy) -> None:
        self.version_of: VersionOf = policy_version
        self.model: nn.Module = policy.model
        self._policy = policy
        self._publisher: Publisher | None = None

    def connect(self, served: Serving, timeout_s: float, version: int) -> int:
        self._publisher = Publisher(served.control, served.transport, timeout_s=timeout_s)
        if version:
            self._publisher.publish(self.model, version)
        return version

    def publish(self) -> Published:
        assert self._publisher is not None, "connect() comes first"
        report = self._publisher.publish(self.model)
        return Published(report.policy_version, report.pause_ms)

    def save(self, folder: Path) -> None:
        save_policy(folder, self._policy.model, self._policy.tokenizer)


class LoraPolicy:
    """One adapter of a peft model that may hold several. Its first revision computes what the base does."""

    def __init__(self, model: PeftModel, name: str, peft_name: str = "default") -> None:
        self.version_of: VersionOf = adapter_rev
        self.model: PeftModel = model
        self.adapter = AdapterRef(name=name)
        self.peft_name = peft_name
        self._publisher: AdapterPublisher | None = None

    def connect(self, served: Serving, timeout_s: float, version: int) -> int:
        from trainer_bridge.adapter_publisher import AdapterPublisher

        self._publisher = AdapterPublisher(served.adapters, self.adapter.name, timeout_s=timeout_s)
        return self._publisher.publish(self.model, self.peft_name, version or None).adapter.rev

    def publish(self) -> Published:
        assert self._publisher is not None, "connect() comes first"
        report = self._publisher.publish(self.model, self.peft_name)
        return Published(report.adapter.rev, report.pause_ms)

    def save(self, folder: Path) -> None:
        """As peft does: `adapter_config.json` beside `adapter_model.safetensors`."""
        partial = partial_folder(folder)
        self.model.save_pretrained(str(partial), selected_adapters=[self.peft_name])
        inner = partial / self.peft_name
        put_in_place(inner if inner.is_dir() else partial, folder)
        shutil.rmtree(partial, ignore_errors=True)


def lora_config(config: AdapterConfig) -> LoraConfig:
    from peft import LoraConfig

    targets = config.targets[0] if config.targets == ("all-linear",) else list(config.targets)
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def make_student(policy: Policy, config: AdapterConfig | None, seed: int, saved: Path | None = None) -> Student:
    """What `policy` is trained as; an adapter has its weights from the folder `saved` where there is one."""
    if config is None:
        return WholePolicy(policy)
    from peft import PeftModel, get_peft_model

    if saved is not None:
        return LoraPolicy(PeftModel.from_pretrained(policy.model, str(saved), is_trainable=True), config.name)
    torch.manual_seed(seed)
    return LoraPolicy(get_peft_model(policy.model, lora_config(config)), config.name)  # type: ignore[arg-type]
