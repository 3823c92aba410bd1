"""Where the dense decoders can be adapted.

Owns the one table from their products to the modules that trainers adapt. Ignores parameters and
adapters.
"""

from __future__ import annotations

from engine.models.shape import ModelSpec
from engine.parallel import TensorParallel
from lora.geometry import MAX_PARTS, Geometry, Kind, Part, Site, Split


def block_inputs(spec: ModelSpec) -> dict[str, int]:
    """The products of a block's input and their widths: gate and up, both in one, or up alone."""
    names, width = spec.names, spec.intermediate
    if not spec.gated:
        return {names.up: width}
    return {names.gate: width, names.up: width} if names.up else {names.gate: 2 * width}


def dense_geometry(spec: ModelSpec, parallel: TensorParallel) -> Geometry:
    """The embedding, then each layer's products (of mixer, attention and block), then the head. Experts are no
    sites, but a shared one is. Of a mixer's product the first parts can be adapted, as many as a site has."""
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sites = [Site(spec.vocab_size, (Part(f"model.{spec.names.embedding}", spec.hidden),), Kind.EMBEDDING)]
    names = spec.names
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        qkv = (
            Part(f"{layer}.{names.q}", q_width * (1 + spec.attention_gate)),
            Part(f"{layer}.{names.k}", kv_width),
            Part(f"{layer}.{names.v}", kv_width),
        )
        mixer = spec.layers[index].mixer
        if mixer is not None:
            prefix, (out, width) = f"{layer}.{mixer.name}", mixer.output(spec.hidden)
            parts = tuple(Part(f"{prefix}.{name}", rows) for name, rows in mixer.inputs(spec.hidden).items())
            sites += [
                Site(spec.hidden, parts[:MAX_PARTS], split=Split.OUTPUTS),
                Site(width, (Part(f"{prefix}.{out}", spec.hidden),), split=Split.INPUTS),
            ]
        if spec.latent is not None and spec.layers[index].attends:
            sites += _latent_sites(spec, layer, spec.layers[index].index == "own")
        elif spec.layers[index].attends:
            sites += [
                Site(spec.hidden, qkv, split=Split.OUTPUTS),
                Site(q_width, (Part(f"{layer}.{names.o}", spec.hidden),), split=Split.INPUTS),
            ]
        if not spec.layers[index].block:
            continue
        inputs, down, width = block_inputs(spec), names.down, spec.intermediate
        if spec.experts is not None and not spec.layers[index].dense:
            if spec.experts.gate is None:
                continue
            width = spec.experts.gate.shared
            gate, up, down = (f"{names.shared_expert}.{part}_proj" for part in ("gate", "up", "down"))
            inputs = {gate: width, up: width} if spec.gated else {up: width}
        gates = tuple(Part(f"{layer}.{name}", rows) for name, rows in inputs.items())
        sites += [
            Site(spec.hidden, gates, split=Split.OUTPUTS),
            Site(width, (Part(f"{layer}.{down}", spec.hidden),), split=Split.INPUTS),
        ]
    sites.append(Site(spec.hidden, (Part("lm_head", spec.vocab_size),), Kind.HEAD))
    return Geometry(tuple(sites), parallel.rank, parallel.size)


def _latent_sites(spec: ModelSpec, layer: str, own_index: bool) -> list[Site]:
    """Inputs, queries where they have a rank of their own, what expands latents, output; then an indexer's."""
    latent, name, heads = spec.latent, f"{layer}.self_attn", spec.num_heads
    assert latent is not None, "the spec has latents"
    queries = heads * (latent.nope_dim + latent.rope_dim)
    query = "q_proj" if latent.query_rank is None else "q_a_proj"
    first = Part(f"{name}.{query}", latent.query_rank or queries), Part(f"{name}.kv_a_proj_with_mqa", latent.row)
    sites = [Site(spec.hidden, first)]
    if latent.query_rank is not None:
        sites.append(Site(latent.query_rank, (Part(f"{name}.q_b_proj", queries),)))
    expanded = Part(f"{name}.kv_b_proj", heads * (latent.nope_dim + latent.value_dim))
    sites += [
        Site(latent.rank, (expanded,)),
        Site(heads * latent.value_dim, (Part(f"{name}.o_proj", spec.hidden),)),
    ]
    if own_index and latent.index is not None and latent.query_rank is not None:
        index, name = latent.index, f"{name}.indexer"
        sites += [
            Site(latent.query_rank, (Part(f"{name}.wq_b", index.heads * index.head_dim),)),
            Site(spec.hidden, (Part(f"{name}.wk", index.head_dim),)),
            Site(spec.hidden, (Part(f"{name}.weights_proj", index.heads),)),
        ]
    return sites
