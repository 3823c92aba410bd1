"""The LoRA policies an engine serves beside its own.

Owns what callers may do with adapters between steps, and the leases through which requests hold them.
Ignores what an adapter computes and where it is kept (`lora`), and the order of requests.

A request names a policy; the name is resolved once, at admission, to a version that never changes, and the
request holds that version until it ends. What a new version does to requests under way is their own
choice (`AdapterRef.on_publish`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from engine.cache.prefix_cache import PrefixCache
from engine.errors import Conflict, InvalidRequest, NotFound, SparkrollError, TooLarge, Unsupported
from engine.memory.slab import Slab, make_slab
from engine.models.decoder import CausalLM
from engine.types import AdapterRef, AdapterReport, AdapterUpdate
from engine.validation import check_id
from engine.weights.named_tensors import tensors_of
from lora.config import AdapterConfig
from lora.device_pool import BASE, DevicePool
from lora.errors import AdapterConflict, AdapterError, AdapterMemory, InvalidAdapter, UnknownAdapter, UnsupportedAdapter
from lora.factors import check_weights
from lora.folder import read_folder
from lora.packing import Packed, pack
from lora.registry import Registry
from lora.residency import Order, Residency
from lora.step import AdapterStep, LoopStep
from lora.versions import AdapterVersion

if TYPE_CHECKING:
    from lora.kernel_step import KernelStep, Variant
    from lora.stack import Stack, StackRoom

_KINDS: dict[type[AdapterError], type[SparkrollError]] = {
    InvalidAdapter: InvalidRequest,
    UnsupportedAdapter: Unsupported,
    UnknownAdapter: NotFound,
    AdapterConflict: Conflict,
    AdapterMemory: TooLarge,
}


class AdapterUse(Protocol):
    """What only the scheduler knows: which versions computation may touch now, and when others are wanted."""

    def busy_adapters(self) -> set[AdapterVersion]: ...

    def adapter_order(self) -> Order: ...


class Lease:
    """One request's hold on a version, given back exactly once."""

    def __init__(self, registry: Registry, version: AdapterVersion, on_publish: str) -> None:
        self._registry = registry
        self.version = registry.acquire(version)
        self.on_publish = on_publish
        self._held = True

    def release(self) -> None:
        assert self._held, f"a lease of {self.version!r} ended twice"
        self._held = False
        self._registry.release(self.version)

    def switch(self, version: AdapterVersion) -> None:
        """Hold the other version from now on."""
        old, self.version = self.version, self._registry.acquire(version)
        self._registry.release(old)


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """A checked adapter that no name leads to."""

    digest: str
    packed: Packed


class Adapters:
    """`fused` says that steps are made of kernels; those that are captured take first factors from the `room` behind
    the model's weights, where there is some. `on_publish(old, new)` lets running requests follow, before the old
    version may end."""

    def __init__(
        self,
        config: AdapterConfig,
        model: CausalLM,
        dtype: torch.dtype,
        device: torch.device,
        cache: PrefixCache,
        deterministic: bool,
        fused: bool,
        room: StackRoom | None = None,
    ) -> None:
        assert isinstance(config.device_mib, int), "device_mib was never resolved"
        self._config = config
        self._room = config.device_mib << 20
        self._model = model
        # Products of few rows are faster in fp32 than in bfloat16 on many CPUs, and never less exact.
        self._dtype = torch.float32 if device.type == "cpu" else dtype
        self._device = device
        self._cache = cache
        self._deterministic = deterministic
        self._fused = fused
        self._registry = Registry(config.host_mib << 20, self._freed)
        self._stack_room = room
        self._stack: Stack | None = None
        self._slab: Slab | None = None
        self._residency: Residency | None = None
        self._use: AdapterUse | None = None
        self._on_publish: Callable[[AdapterVersion, AdapterVersion], None] | None = None

    def attach(self, use: AdapterUse, on_publish: Callable[[AdapterVersion, AdapterVersion], None]) -> None:
        self._use = use
        self._on_publish = on_publish

    # --- for callers -----------------------------------------------------------------------------

    def register(
        self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], rev: int | None = None
    ) -> AdapterReport:
        """Check an adapter, stage it and let its name lead to it. `config` and `tensors` are peft's own."""
        staged = self.stage(name, self.prepare(config, tensors), rev)
        return self.publish(name, staged.rev)

    def register_folder(self, name: str, folder: str | Path, rev: int | None = None) -> AdapterReport:
        """The same for a folder that peft saved."""
        staged = self.stage(name, self.prepare_folder(folder), rev)
        return self.publish(name, staged.rev)

    def prepare(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> PreparedAdapter:
        """All that takes time and most that can fail: checks, the digest, the copy laid out for the device. It
        changes nothing and may run in any thread while the engine steps."""
        with translated():
            sites, most = self._model.adapter_sites, self._config.max_rank
            weights = check_weights(config, tensors, sites, most, self._same_base)
            packed = pack(weights, sites, self._dtype, pinned=self._device.type == "cuda")
            room = self._room
            if DevicePool.size_of(packed) > room:
                raise AdapterMemory("adapters.device_mib", f"room for {packed.num_bytes} bytes", f"{room} bytes")
        return PreparedAdapter(weights.digest, packed)

    def prepare_update(self, update: AdapterUpdate) -> PreparedAdapter:
        """The same from raw bytes."""
        return self.prepare(update.config, tensors_of(update.tensors))

    def prepare_folder(self, folder: str | Path) -> PreparedAdapter:
        with translated():
            config, tensors = read_folder(Path(folder))
        return self.prepare(config, tensors)

    def stage(self, name: str, prepared: PreparedAdapter, rev: int | None = None) -> AdapterReport:
        """Phase one. Nobody sees the revision yet; the one served goes on."""
        check_id("name", name)
        with translated():
            version = self._registry.stage(name, prepared.digest, prepared.packed, rev)
        self._prefetch(version)
        return _report(version)

    def publish(self, name: str, rev: int, keep_previous: bool = False) -> AdapterReport:
        """Phase two: from now on the name leads to the staged revision. The one before serves the requests
        that hold it, then ends; with `keep_previous` others may still ask for it by its number."""
        with translated():
            version = self._registry.staged(name, rev)
            previous = self._registry.publish(version, keep_previous=True)
        if previous is not None:
            if self._on_publish is not None:
                self._on_publish(previous, version)
            if not keep_previous:
                self._registry.retire(name, previous.rev)
        return _report(version)

    def check_publishable(self, name: str, rev: int) -> None:
        """Raise what `publish` would."""
        with translated():
            self._registry.check_publishable(self._registry.staged(name, rev))

    def discard(self, name: str, rev: int) -> None:
        """Drop a staged revision; its number is not used again."""
        with translated():
            self._registry.discard(self._registry.staged(name, rev))

    def retire(self, name: str, rev: int | None = None) -> None:
        """Let no further request find the policy, or one revision of it. Those that hold it run to their end."""
        with translated():
            self._registry.retire(name, rev)

    @property
    def current(self) -> dict[str, int]:
        """Names and the revisions they lead to."""
        return self._registry.current

    @property
    def versions(self) -> list[AdapterVersion]:
        return self._registry.versions

    def reports(self) -> list[AdapterReport]:
        """All revisions that have not been freed, by name and number."""
        return [_report(version) for version in self._registry.versions]

    # --- for the engine ---------------------------------------------------------------------------

    def lease(self, ref: AdapterRef | None) -> Lease | None:
        """A request's hold on what it names; None for the base policy."""
        if ref is None:
            return None
        with translated():
            version = self._registry.find(ref.name, ref.rev)
        lease = Lease(self._registry, version, "finish" if ref.rev is not None else ref.on_publish)
        self._prefetch(version)
        return lease

    def make_resident(self, version: AdapterVersion) -> bool:
        """Whether the version is on the device now; idle ones may have left for it."""
        if version.slot is not None:
            return True
        assert self._use is not None
        return self.residency.ensure(version, self._use.busy_adapters(), self._use.adapter_order())

    def step(self, slots_T: np.ndarray) -> AdapterStep | None:
        """What adapters add in a step, from each token's slot."""
        if not slots_T.any():
            return None
        pool = self.residency.pool
        if self._fused or self._device.type == "cuda":
            from lora.kernel_step import KernelStep  # needs Triton

            return KernelStep(pool, slots_T, self._deterministic)
        return LoopStep(pool, slots_T, self._deterministic)

    def variant(self, slots_T: np.ndarray) -> Variant:
        """Which captured step serves rows of these slots."""
        from lora.kernel_step import Variant

        return Variant.of(self.residency.pool, slots_T, self._deterministic, self._made_stack())

    def uneven_variant(self, slots: np.ndarray, rows: int) -> Variant:
        """The same for `rows` rows of which nobody knows how many belong to each of these slots."""
        from lora.kernel_step import Variant

        return Variant.uneven(self.residency.pool, slots, rows, self._made_stack())

    def captured(self, rows: int, variant: Variant) -> KernelStep:
        """A step to be captured, of rows of the base until it is filled."""
        from lora.kernel_step import KernelStep

        slots_T = np.full(rows, BASE, dtype=np.int64)
        step = KernelStep(self.residency.pool, slots_T, self._deterministic, variant, self._made_stack())
        assert step.tiles.num_tiles == variant.tiles, "tables are filled before anything is captured"
        return step

    @property
    def residency(self) -> Residency:
        """Made when the first adapter comes: an engine without any sets nothing aside."""
        if self._residency is None:
            sites, most = self._model.adapter_sites, self._config.max_resident
            self._slab = make_slab(self._room, self._device, "adapters.device_mib")
            pool = DevicePool(sites, self._dtype, self._device, self._room, most, self._slab.data_U)
            self._residency = Residency(pool)
        return self._residency

    @property
    def num_resident(self) -> int:
        """Adapters on the device."""
        return 0 if self._residency is None else self._residency.pool.num_held

    @property
    def num_bytes(self) -> int:
        """Of the device, held now; 0 while released."""
        return self._room if self._slab is not None and self._slab.mapped else 0

    def release(self) -> None:
        """Give the device memory back; nobody computes. What was there is on the host too. Idempotent."""
        if self._residency is not None and self._slab is not None:
            for version in self._residency.resident:
                self._residency.drop(version)
            self._slab.unmap()

    def restore(self) -> None:
        """Take it again, empty, at the same addresses. Idempotent."""
        if self._slab is not None:
            self._slab.map()

    def check(self, held: list[Lease]) -> None:
        """Assert that every reference is held by a lease, where `held` are all open ones."""
        for version in self._registry.versions:
            count = sum(lease.version is version for lease in held)
            assert version.references == count, f"{version!r} is held by {count} leases"
        if self._residency is not None:
            self._residency.check()

    # --- inside ---------------------------------------------------------------------------------

    def _made_stack(self) -> Stack | None:
        if self._stack is None and self._stack_room is not None:
            from lora.stack import Stack

            self._stack = Stack(self.residency.pool, self._stack_room)
        return self._stack

    def _same_base(self, module: str, tensor: torch.Tensor) -> bool:
        weight = self._model.base_weight(module)
        if weight is None or weight.shape != tensor.shape:
            return False
        return torch.equal(weight, tensor.to(weight.device, weight.dtype))

    def _prefetch(self, version: AdapterVersion) -> None:
        residency = self.residency
        if self._slab is not None and self._slab.mapped:
            residency.prefetch(version)

    def _freed(self, version: AdapterVersion) -> None:
        if self._residency is not None:
            self._residency.drop(version)
        self._cache.retire(lambda space: (space.adapter, space.adapter_rev) == version.key)


def slot_of(lease: Lease | None) -> int:
    """Where the lease's version is on the device; the base's place without one."""
    if lease is None:
        return BASE
    assert lease.version.slot is not None, f"{lease.version!r} runs without being resident"
    return lease.version.slot


def _report(version: AdapterVersion) -> AdapterReport:
    return AdapterReport(
        name=version.name, rev=version.rev, digest=version.digest, num_bytes=version.num_bytes,
        state=version.state.value, references=version.references,
    )  # fmt: skip


@contextmanager
def translated() -> Iterator[None]:
    """The adapters' exceptions as the engine's."""
    try:
        yield
    except AdapterError as error:
        kind = _KINDS[type(error)]
        raise kind(field=error.field, expected=error.expected, actual=error.actual) from error
