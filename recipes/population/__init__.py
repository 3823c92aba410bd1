"""Several LoRA policies trained at once from one base, by one fleet of engines; the best are forked."""
