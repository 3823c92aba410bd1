"""Counters of the HTTP server itself, in Prometheus text.

Owns requests by route and status, running operations and attached repeats. Ignores the engine's
metrics, which the service brings.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from rollout.idempotency import OperationRegistry


class ServerMetrics:
    """One server's counters, in a registry of their own: servers in one process do not mix."""

    def __init__(self, operations: OperationRegistry) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "sparkroll_http_requests",
            "Requests answered, by route and HTTP status (499: the caller left first).",
            ["route", "status"],
            registry=self._registry,
        )
        running = Gauge("sparkroll_http_operations_running", "Operations that have not ended.", registry=self._registry)
        running.set_function(lambda: operations.running)
        repeats = Gauge(
            "sparkroll_http_repeats", "Calls that attached to an earlier one of their op_id.", registry=self._registry
        )
        repeats.set_function(lambda: operations.repeats)

    def count(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def text(self) -> str:
        return generate_latest(self._registry).decode()
