"""GRPO that trains one LoRA policy with peft and publishes its factors alone."""
