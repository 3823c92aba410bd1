"""Tensors inside request bodies, in buckets that each fit the body limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.errors import TooLarge
from engine.types import NamedTensor, UpdateProgress
from trainer_bridge.control import UpdateControl
from trainer_bridge.tensors import encode, num_bytes

OVERHEAD = 1024
"""Bytes allowed for each tensor's name, shape and framing beside its data."""


@dataclass(frozen=True, slots=True)
class BodyTransport:
    """`bucket_bytes` must not exceed the server's body limit. Buckets are encoded one at a time,
    so that at most one is held in host memory beside the model."""

    bucket_bytes: int = 32 * 2**20
    name: str = "body"
    digests: bool = True

    def stage(
        self, control: UpdateControl, txn: str, new_version: int, tensors: Mapping[str, Tensor]
    ) -> UpdateProgress:
        progress = UpdateProgress(txn=txn, staged=0, announced=len(tensors), staged_bytes=0)
        for bucket in buckets(tensors, self.bucket_bytes):
            progress = control.update_tensors(txn, bucket)
        return progress

    def release(self, txn: str) -> None:
        """Nothing outlives a call."""


def buckets(tensors: Mapping[str, Tensor], limit: int) -> Iterator[list[NamedTensor]]:
    """Consecutive tensors, as many to a bucket as its limit allows.

    Raises `TooLarge` before anything is sent if one tensor alone is over the limit.
    """
    sizes = {name: num_bytes(name, tensor) + OVERHEAD for name, tensor in tensors.items()}
    for name, size in sizes.items():
        if size > limit:
            raise TooLarge(field=name, expected=f"at most {limit} bytes in one body (or use disk)", actual=size)

    def pack() -> Iterator[list[NamedTensor]]:
        names: list[str] = []
        used = 0
        for name, size in sizes.items():
            if names and used + size > limit:
                yield [encode(item, tensors[item]) for item in names]
                names, used = [], 0
            names.append(name)
            used += size
        yield [encode(item, tensors[item]) for item in names]

    return pack()
