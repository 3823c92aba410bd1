"""Tiny models of every kind of recurrent layer, three layers each.

Owns their shapes. Ignores what is tested of them.
"""

from __future__ import annotations

from pathlib import Path

from tests.support import save_tiny

LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
KINDS: dict[str, dict] = {
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "block_multiple_of": 32,
    },
    "falcon_h1": {
        "num_hidden_layers": 3,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_d_ssm": 128,
        "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": None,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
    "qwen3_next": LINEAR | {"num_experts": 0},
    "qwen3_5_text": LINEAR,
}


def save_recurrent(folder: Path, kind: str, seed: int = 4) -> Path:
    return save_tiny(folder, seed=seed, kind=kind, **KINDS[kind])
