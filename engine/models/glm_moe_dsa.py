"""GLM-5: DeepSeek-V3.2 whose layers may share the choice of the last layer that made one."""

from __future__ import annotations

from typing import Any

from engine.errors import InvalidRequest
from engine.models import config_fields as fields
from engine.models.deepseek import describe_latent, index_of
from engine.models.family import Family


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    count = fields.integer(config, "num_hidden_layers")
    fields.layer_types(config, ["indexed_attention"] * count, ("indexed_attention",))
    kinds = [{"full": "own", "shared": "shared"}[kind] for kind in _indexer_types(config, count)]
    if kinds[0] != "own":
        raise InvalidRequest(field="indexer_types", expected="'full' first: nothing to share", actual="shared")
    spec = describe_latent({**config, "rope_interleave": True}, index_of(config, True), kinds)
    return {"rms_eps": float(config.get("rms_norm_eps", 1e-5))} | spec


def _indexer_types(config: dict[str, Any], count: int) -> list[str]:
    """As listed, or from a pattern of letters, or one layer in `index_topk_freq` from an offset on."""
    kinds = config.get("indexer_types")
    pattern = config.get("index_topk_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    elif kinds is None:
        kinds = pattern
    if kinds is None:
        every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(count)]
    if len(kinds) != count or not set(kinds) <= {"full", "shared"}:
        raise InvalidRequest(field="indexer_types", expected=f"{count} of 'full' and 'shared'", actual=kinds)
    return kinds


GLM_MOE_DSA = Family("GlmMoeDsaForCausalLM", "glm_moe_dsa", _describe)
