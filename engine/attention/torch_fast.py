"""placeholder to be replaced"""

from engine.attention.base import refuse_special_layers
from engine.attention.torch_ref import TorchReference


class TorchAttention(TorchReference):
    name = "torch"

    def __init__(self, spec, deterministic=False):
        refuse_special_layers(spec, "torch")
        super().__init__(spec)
