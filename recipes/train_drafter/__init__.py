"""Train a block drafter for a target from answers that the target writes."""
