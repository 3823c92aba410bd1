"""Training block drafters and their confidence heads from what the target answers."""
