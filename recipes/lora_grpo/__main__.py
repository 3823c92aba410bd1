"""Command line: `python -m recipes.lora_grpo --preset tiny --set adapter.rank=4`."""

from __future__ import annotations

import typer

from recipes.grpo.__main__ import command
from recipes.lora_grpo.config import PRESETS

main = command(PRESETS, "tiny", "Train a LoRA policy with GRPO and publish its factors alone.")

if __name__ == "__main__":
    typer.run(main)
