"""`--metrics-port`: the run's counters for Prometheus, on this host only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hsdump.errors import UsageError
from hsdump.extract.state import RunState

Metric = tuple[str, str, float, dict[str, str]]
"""Name, what it says, value, labels."""


def metrics_of(state: RunState) -> Iterator[Metric]:
    """List every number of a run. Counters end in `_total`."""
    yield "hsdump_samples_committed_total", "Samples in the store by this run.", state.committed, {}
    yield "hsdump_tokens_committed_total", "Tokens of these.", state.tokens, {}
    yield "hsdump_state_bytes_total", "States of these, as they left the model.", state.state_bytes, {}
    yield "hsdump_retries_total", "Tries that failed and were repeated.", state.retries, {}
    yield "hsdump_server_deaths_total", "Requests whose server died under them.", state.server_deaths, {}
    yield "hsdump_samples_in_flight", "Requests on their way.", state.in_flight, {}
    yield "hsdump_tokens_in_flight", "Tokens of these.", state.in_flight_tokens, {}
    yield "hsdump_samples_waiting", "Answered, and not in the store yet.", state.waiting, {}
    if state.to_do is not None:
        yield "hsdump_samples_to_do", "Samples left, as far as the input's size is known.", state.to_do, {}
    if state.disk_free is not None:
        yield "hsdump_disk_free_bytes", "Free bytes where the store lies.", state.disk_free, {}
    for reason, count in sorted(state.failed.items()):
        yield "hsdump_samples_failed_total", "Samples that failed, by reason.", count, {"reason": reason}
    for reason, count in sorted(state.skipped.items()):
        yield "hsdump_rows_skipped_total", "Rows that gave no sample, by reason.", count, {"reason": reason}
    for lane in state.lanes:
        labels = {"server": lane.name}
        yield "hsdump_server_up", "1 when the server takes requests.", lane.status == "up", labels
        yield "hsdump_server_in_flight", "Our requests at the server.", lane.in_flight, labels
        yield "hsdump_server_tokens_total", "Tokens captured there.", lane.tokens, labels
        yield "hsdump_server_spool_bytes", "Spool bytes that our requests may take now.", lane.in_flight_bytes, labels
        yield "hsdump_server_others", "Requests of others there.", lane.others, labels


def serve_metrics(state: RunState, port: int) -> Callable[[], None]:
    """Answer Prometheus at 127.0.0.1.

    Returns:
        What ends it.

    Raises:
        UsageError: prometheus-client is not installed, or the port is taken.
    """
    try:
        import prometheus_client
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        fix = "install it: pip install 'hsdump[metrics]'"
        raise UsageError("--metrics-port needs prometheus-client, which is not installed", fix) from None

    class Source:
        """Asked by the library at each scrape."""

        def collect(self) -> Iterator[Any]:
            families: dict[str, Any] = {}
            for name, text, value, labels in metrics_of(state):
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families.setdefault(name, kind(name.removesuffix("_total"), text, labels=list(labels)))
                family.add_metric(list(labels.values()), float(value))
            yield from families.values()

    registry = prometheus_client.CollectorRegistry()
    registry.register(Source())
    try:
        server, thread = prometheus_client.start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise UsageError(f"--metrics-port {port} cannot be used: {error.strerror}", "choose a free port") from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end
