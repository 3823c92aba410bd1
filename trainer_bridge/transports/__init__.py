"""Ways for a trainer's tensors to reach an engine's staging area."""

from trainer_bridge.transports.base import Transport
from trainer_bridge.transports.body import BodyTransport
from trainer_bridge.transports.disk import DiskTransport
from trainer_bridge.transports.in_process import InProcessControl, InProcessTransport

__all__ = ["BodyTransport", "DiskTransport", "InProcessControl", "InProcessTransport", "Transport"]
