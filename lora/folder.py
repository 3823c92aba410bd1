"""Reading an adapter as peft saves it: `adapter_config.json` beside `adapter_model.safetensors`.

Owns the files' names and what makes them unreadable. Ignores what they mean. Nothing is unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lora.errors import InvalidAdapter, UnsupportedAdapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidAdapter(CONFIG, "a readable JSON file in the adapter's folder", str(error)) from None
    if not isinstance(config, dict):
        raise InvalidAdapter(CONFIG, "a JSON object", type(config).__name__)
    return config


def weights_file(folder: Path) -> Path:
    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / "adapter_model.bin").exists():
            raise UnsupportedAdapter("adapter_model.bin", f"{WEIGHTS}: pickled weights are never read", "a .bin file")
        raise InvalidAdapter(WEIGHTS, "a file in the adapter's folder", None)
    return path


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(configuration, tensors by their saved names)."""
    config, path = read_config(folder), weights_file(folder)
    try:
        return config, load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidAdapter(WEIGHTS, "a readable safetensors file", str(error)) from None
