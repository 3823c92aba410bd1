"""Where the dense decoders can be adapted.

Owns the one table from their products to the modules that trainers adapt. Ignores parameters and
adapters.
"""

from __future__ import annotations

from engine.models.shape import ModelSpec
from engine.parallel import TensorParallel
from lora.geometry import Geometry, Kind, Part, Site, Split


def dense_geometry(spec: ModelSpec, parallel: TensorParallel) -> Geometry:
    """The embedding, then each layer's products (two or, without experts, four), then the head."""
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sites = [Site(spec.vocab_size, (Part("model.embed_tokens", spec.hidden),), Kind.EMBEDDING)]
    names = spec.names
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        qkv = (
            Part(f"{layer}.{names.q}", q_width),
            Part(f"{layer}.{names.k}", kv_width),
            Part(f"{layer}.{names.v}", kv_width),
        )
        mixer = spec.layers[index].mixer
        if mixer is not None:
            prefix, (out, width) = f"{layer}.{mixer.name}", mixer.output(spec.hidden)
            parts = tuple(Part(f"{prefix}.{name}", rows) for name, rows in mixer.inputs(spec.hidden).items())
            sites += [
                Site(spec.hidden, parts, split=Split.OUTPUTS),
                Site(width, (Part(f"{prefix}.{out}", spec.hidden),), split=Split.INPUTS),
            ]
        if spec.layers[index].attends:
            sites += [
                Site(spec.hidden, qkv, split=Split.OUTPUTS),
                Site(q_width, (Part(f"{layer}.{names.o}", spec.hidden),), split=Split.INPUTS),
            ]
        if spec.experts is not None:
            continue
        gates = Part(f"{layer}.{names.gate}", spec.intermediate), Part(f"{layer}.{names.up}", spec.intermediate)
        sites += [
            Site(spec.hidden, gates, split=Split.OUTPUTS),
            Site(spec.intermediate, (Part(f"{layer}.{names.down}", spec.hidden),), split=Split.INPUTS),
        ]
    sites.append(Site(spec.hidden, (Part("lm_head", spec.vocab_size),), Kind.HEAD))
    return Geometry(tuple(sites), parallel.rank, parallel.size)
