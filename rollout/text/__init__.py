"""Text beside the engine: encoding prompts, decoding samples, stop strings."""

from rollout.text.codec import TextCodec
from rollout.text.detokenizer import IncrementalDetokenizer
from rollout.text.stop import StopStringWatcher

__all__ = ["IncrementalDetokenizer", "StopStringWatcher", "TextCodec"]
