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
        if spec.layers[index].kind == "conv":
            mixer = Part(f"{layer}.conv.in_proj", 3 * spec.hidden), Part(f"{layer}.conv.out_proj", spec.hidden)
            sites += [
                Site(spec.hidden, mixer[:1], split=Split.OUTPUTS),
                Site(spec.hidden, mixer[1:], split=Split.INPUTS),
            ]
        else:
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
