"""Failures that only exist where there are several engines."""

from __future__ import annotations

from engine.errors import SparkrollError


class EngineLost(SparkrollError):
    """The engine's process or connection ended; whatever it had not sent is gone.

    A router goes on elsewhere. A caller meets this only when there is no elsewhere.
    """

    code = "DRAINING"
    retryable = True


class Behind(SparkrollError):
    """The engine is sound but not at the fleet's policy version; it catches up before it serves."""

    code = "DRAINING"
    retryable = True
