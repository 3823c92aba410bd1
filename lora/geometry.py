"""Where a model can be adapted.

Owns the table of sites that the model describes itself by. Ignores the model's parameters.

A site is one product of the model: a projection, or several packed side by side because they share
their input. Each of its parts is a module of its own to whoever trains adapters.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_PARTS = 3


class Kind(enum.Enum):
    LINEAR = "linear"
    EMBEDDING = "embedding"
    """Its input is one of `inputs` ids."""
    HEAD = "head"
    """A linear site that `all-linear` leaves out."""


class Split(enum.Enum):
    """How a tensor-parallel rank shares in a site."""

    NONE = "none"
    OUTPUTS = "outputs"
    INPUTS = "inputs"


@dataclass(frozen=True, slots=True)
class Part:
    """A module by its name in the model, and its unsharded output width."""

    module: str
    width: int


@dataclass(frozen=True, slots=True)
class Site:
    """`inputs` is the unsharded input width."""

    inputs: int
    parts: tuple[Part, ...]
    kind: Kind = Kind.LINEAR
    split: Split = Split.NONE


class Geometry:
    """All sites of a model, in the order that indexes them, as one of `size` ranks sees them."""

    def __init__(self, sites: tuple[Site, ...], rank: int = 0, size: int = 1) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.sites = sites
        self.rank = rank
        self.size = size
        self.places: dict[str, tuple[int, int]] = {}
        """Module -> (site, part)."""
        for index, site in enumerate(sites):
            assert 1 <= len(site.parts) <= MAX_PARTS, f"site {index} has {len(site.parts)} parts"
            for place, part in enumerate(site.parts):
                assert part.module not in self.places, f"{part.module} has two places"
                self.places[part.module] = index, place

    def inputs(self, site: int) -> int:
        """Input width on this rank."""
        spec = self.sites[site]
        return spec.inputs // self.size if spec.split is Split.INPUTS else spec.inputs

    def widths(self, site: int) -> tuple[int, ...]:
        """Output widths of the parts on this rank."""
        spec = self.sites[site]
        share = self.size if spec.split is Split.OUTPUTS else 1
        return tuple(part.width // share for part in spec.parts)

    def module_shape(self, module: str) -> tuple[int, int]:
        """Unsharded (inputs, outputs)."""
        site, part = self.places[module]
        return self.sites[site].inputs, self.sites[site].parts[part].width

    def kind(self, module: str) -> Kind:
        return self.sites[self.places[module][0]].kind
