"""GRPO on arithmetic questions, through the whole service."""
