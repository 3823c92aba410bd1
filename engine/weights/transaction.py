"""One weight update, from announcement to new parameters.

Owns the staging memory and every check between a trainer's bytes and a live parameter. Ignores
versions, pausing and caches: the engine decides when `apply` runs. Cold load is the same
transaction, so a reload equals a cold load bit for bit.

Values are cast to each parameter's dtype on arrival and staged once. Nothing live changes before
`apply`, and a staging call that fails leaves the transaction as it was before that call.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.errors import Conflict, Corrupt, InvalidRequest, TooLarge
from engine.types import NamedTensor, TensorSpec, UpdateBegin, UpdateProgress
from engine.weights.digest import combined_digest, fingerprint
from engine.weights.folder import WeightFolder
from engine.weights.layout import Layout, WeightedModel
from engine.weights.names import NameResolver, bounded_list
from engine.weights.safetensors_file import WEIGHT_DTYPES


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """What `apply` will do: tensors taken by module, bytes staged, digest of the parameters after it."""

    loaded: dict[str, int]
    staged_bytes: int
    digest: str


class UpdateTransaction:
    """Stages a whole module's tensors and swaps them in.

    `staging_device` None stages beside the live parameters, which makes `apply` a device copy;
    "cpu" spends host memory instead. The manifest must name every tensor the model takes: a
    parameter left out would silently stay at the old policy.
    """

    def __init__(
        self, model: WeightedModel, begin: UpdateBegin, staging_device: torch.device | str | None = None
    ) -> None:
        self.begin = begin
        self._model = model
        self._layout = Layout(model)
        self._resolver = NameResolver(self._layout.weight_map)
        self._staging_device = staging_device
        self._state: Literal["open", "prepared", "applied", "discarded"] = "open"
        self._specs: dict[str, TensorSpec] = {}
        self._arrived: set[str] = set()
        self._filled: set[str] = set()
        self._staged: dict[str, torch.Tensor] = {}
        self._fingerprints: dict[str, torch.Tensor] = {}
        self._read_manifest(begin.manifest)

    def stage(self, tensors: Sequence[NamedTensor]) -> UpdateProgress:
        """Take tensors as raw bytes, in any order and grouping."""
        specs = [TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape) for t in tensors]
        return self._stage_all(specs, zip(specs, (_own_bytes(t) for t in tensors), strict=True))

    def stage_live(self, tensors: Mapping[str, torch.Tensor]) -> UpdateProgress:
        """Take tensors of this process, on whatever device they are; they must not change meanwhile."""
        names = {dtype: name for name, dtype in WEIGHT_DTYPES.items()}
        specs = [
            TensorSpec(name=name, dtype=names.get(value.dtype, str(value.dtype)), shape=list(value.shape))
            for name, value in tensors.items()
        ]
        flat = (value.detach().contiguous().reshape(-1).view(torch.uint8) for value in tensors.values())
        return self._stage_all(specs, zip(specs, flat, strict=True))

    def stage_folder(self, path: Path) -> UpdateProgress:
        """Take every tensor of a safetensors folder; it must not change meanwhile."""
        with WeightFolder(path) as folder:
            before = self._arrived.copy(), self._filled.copy()
            progress = self._stage_all(folder.specs, folder)
            try:
                folder.verify_unchanged()
            except Conflict:
                self._arrived, self._filled = before
                raise
            return progress

    def progress(self) -> UpdateProgress:
        return UpdateProgress(
            txn=self.begin.txn,
            staged=len(self._arrived),
            announced=len(self._specs),
            staged_bytes=sum(self._bytes_of(name) for name in self._filled),
        )

    def prepare(self) -> PreparedUpdate:
        """Check that all announced tensors are here, and digest what the parameters will be."""
        self._require("open")
        missing = set(self._specs) - self._arrived
        if missing:
            raise InvalidRequest(
                f"update {self.begin.txn!a} is incomplete: {bounded_list(missing)} never came",
                field="manifest",
                expected=f"{len(self._specs)} tensors",
                actual=len(self._arrived),
            )
        assert self._filled == set(self._layout.targets) and set(self._fingerprints) == set(self._layout.params)
        digest = combined_digest(self._fingerprints, self._model)
        self._state = "prepared"
        return PreparedUpdate({self.begin.module: len(self._filled)}, self.progress().staged_bytes, digest)

    @torch.no_grad()
    def apply(self) -> None:
        """Copy the staged tensors into the live parameters, which keep their addresses.

        Raises `Corrupt` on any failure: parameters may then be mixed and must not be served.
        """
        self._require("prepared")
        devices = set()
        try:
            for name, staged in self._staged.items():
                param = self._layout.params[name]
                if param.shape != staged.shape or param.dtype != staged.dtype:
                    raise ValueError(f"{name} is {param.dtype} {list(param.shape)}, staged {list(staged.shape)}")
                param.copy_(staged)
                devices.add(param.device)
            for device in devices:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
        except Exception as error:
            raise Corrupt(f"update {self.begin.txn!a} failed while being applied: {error}") from error
        self._state = "applied"
        self._drop()

    def discard(self) -> None:
        """Free the staging memory. Repeats, and calls after `apply`, do nothing."""
        if self._state != "applied":
            self._state = "discarded"
        self._drop()

    def _drop(self) -> None:
        self._staged.clear()
        self._fingerprints.clear()

    def _read_manifest(self, manifest: Sequence[TensorSpec]) -> None:
        weight_map = self._layout.weight_map
        owners: dict[str, str] = {}
        unmatched: list[str] = []
        for spec in manifest:
            known = self._resolver.resolve(spec.name)
            if known is None:
                unmatched.append(spec.name)
                continue
            if weight_map.ignores(known):
                continue
            for part in weight_map.packed[known].names if known in weight_map.packed else (known,):
                if part in owners:
                    raise InvalidRequest(
                        field="manifest", expected="each tensor once", actual=f"{owners[part]} and {spec.name}"
                    )
                owners[part] = spec.name
            self._check_spec(spec)
            self._specs[known] = spec
        absent = set(self._layout.targets) - {part for known in owners for part in weight_map.parts(known)}
        if unmatched or absent:
            raise InvalidRequest(
                f"the tensors do not fit the model: unmatched {bounded_list(unmatched)},"
                f" expected but absent {bounded_list(absent)}",
                field="manifest",
                expected=f"{len(self._layout.targets)} tensors",
                actual=len(manifest),
            )

    def _stage_all(
        self, specs: Sequence[TensorSpec], tensors: Iterable[tuple[TensorSpec, torch.Tensor]]
    ) -> UpdateProgress:
        """Check every spec before the first value, and undo the whole call where a value fails.

        Undoing takes back marks only: rows are written just once, while unmarked.
        """
        self._require("open")
        for spec in specs:
            self._check_announced(spec)
        before = self._arrived.copy(), self._filled.copy()
        try:
            for spec, data in tensors:
                self._stage_one(spec, data)
        except BaseException as error:
            self._arrived, self._filled = before
            if isinstance(error, torch.OutOfMemoryError):
                raise TooLarge(f"no memory to stage update {self.begin.txn!a}: {error}") from error
            raise
        return self.progress()

    def _stage_one(self, spec: TensorSpec, data: torch.Tensor) -> None:
        known = self._resolver.resolve(spec.name)
        assert known is not None
        if self._layout.weight_map.ignores(known):
            return
        label = _label(spec.name)
        expected_bytes = math.prod(spec.shape) * WEIGHT_DTYPES[spec.dtype].itemsize
        if data.numel() != expected_bytes:
            raise InvalidRequest(
                field=label, expected=f"{expected_bytes} bytes for {spec.dtype} {spec.shape}", actual=data.numel()
            )
        digest = self._specs[known].digest
        if digest is not None:
            actual = hashlib.sha256(data.cpu().numpy().data).hexdigest()
            if actual != digest.lower():
                raise InvalidRequest(field=label, expected=f"SHA-256 {digest[:64]}", actual=actual)
        values = data.view(WEIGHT_DTYPES[spec.dtype]).reshape(spec.shape)
        if known in self._layout.weight_map.packed:
            values = values.flatten(0, 1)
        parts = self._layout.weight_map.parts(known)
        target = self._layout.targets[parts[0]]
        rows = self._rows_for(parts)
        values = values.to(rows.device).to(rows.dtype)
        # The whole tensor is judged, not this rank's part, so that all ranks judge alike.
        if not all_finite(values):
            raise InvalidRequest(field=label, expected=f"finite values in {rows.dtype}", actual="NaN or infinity")
        values = self._layout.shard(target, values)
        if self._filled.isdisjoint(parts):
            rows.copy_(values)
        elif not torch.equal(_bits(rows), _bits(values)):
            if known in self._arrived:
                raise Conflict(f"{label} came twice with different values")
            raise InvalidRequest(f"{label} contradicts the tensor it is tied to: both are one matrix in this model")
        self._filled.update(parts)
        self._arrived.add(known)
        if self._layout.parts[target.param] <= self._filled:
            # Here rather than at the end: what is left for the commit, when decoding waits, is small.
            self._fingerprints[target.param] = fingerprint(self._staged[target.param])

    def _rows_for(self, names: tuple[str, ...]) -> torch.Tensor:
        """The staged rows of placements that lie one after the other in one parameter."""
        target = self._layout.targets[names[0]]
        if target.param not in self._staged:
            live = self._layout.params[target.param].detach()
            self._staged[target.param] = torch.empty_like(
                live, device=self._staging_device, memory_format=torch.contiguous_format
            )
        count = sum(self._layout.targets[name].rows for name in names)
        return self._staged[target.param].narrow(0, target.start, count)

    def _bytes_of(self, name: str) -> int:
        target = self._layout.targets[name]
        param = self._layout.params[target.param]
        return target.rows * math.prod(param.shape[1:]) * param.element_size()

    def _check_spec(self, spec: TensorSpec) -> None:
        known = self._resolver.resolve(spec.name)
        assert known is not None
        if spec.dtype not in WEIGHT_DTYPES:
            raise InvalidRequest(
                field=_label(spec.name), expected=f"a dtype of {list(WEIGHT_DTYPES)}", actual=spec.dtype
            )
        shape = list(self._layout.weight_map.shape(known))
        if list(spec.shape) != shape:
            raise InvalidRequest(field=_label(spec.name), expected=f"shape {shape}", actual=list(spec.shape))

    def _check_announced(self, spec: TensorSpec) -> None:
        known = self._resolver.resolve(spec.name)
        if known is not None and self._layout.weight_map.ignores(known):
            return
        if known is None or known not in self._specs:
            expected = bounded_list(set(self._specs) - self._arrived)
            raise InvalidRequest(
                field=_label(spec.name), expected=f"an announced tensor, of {expected}", actual="unknown"
            )
        self._check_spec(spec)
        if spec.dtype != self._specs[known].dtype:
            raise InvalidRequest(field=_label(spec.name), expected=self._specs[known].dtype, actual=spec.dtype)

    def _require(self, state: str) -> None:
        if self._state != state:
            raise Conflict(field=f"update {self.begin.txn!a}", expected=state, actual=self._state)


def all_finite(values: torch.Tensor) -> bool:
    """No NaN and no infinity: one pass, as minimum and maximum carry NaN along."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _label(name: str) -> str:
    return f"tensor {name[:120]!a}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def _own_bytes(tensor: NamedTensor) -> torch.Tensor:
    """A private, aligned copy: wire buffers are read-only views at any offset."""
    owned = torch.empty(tensor.data.nbytes, dtype=torch.uint8)
    owned.numpy()[:] = tensor.data.reshape(-1).view("u1")
    return owned
