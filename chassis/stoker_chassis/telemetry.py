"""OpenTelemetry: set-up, and the trace context that travels with every event.

A job's life lies in many services and may take days, so a handler's span links to the one that wrote the event instead
of being its child.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from stoker_proto import Envelope, Recorded

_propagator = TraceContextTextMapPropagator()


def set_up(service: str, instance: str, otlp_endpoint: str | None) -> None:
    """Export spans over OTLP/HTTP when an endpoint is set; otherwise spans cost next to nothing and go nowhere."""
    if otlp_endpoint is None:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    resource = Resource.create({"service.name": f"stoker-{service}", "service.instance.id": instance})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{otlp_endpoint.rstrip('/')}/v1/traces")))
    trace.set_tracer_provider(provider)


def traceparent() -> str | None:
    """The present span's context for an envelope; None outside a recorded span."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent")


def with_trace(envelope: Envelope) -> Envelope:
    """The envelope with the present trace context, unless it carries one already."""
    here = None if envelope.traceparent else traceparent()
    return envelope.model_copy(update={"traceparent": here}) if here else envelope


@contextmanager
def span(
    name: str, attributes: Mapping[str, str | int | float] | None = None, cause: Recorded | None = None
) -> Iterator[None]:
    """A span around some work, linked to the event that caused it."""
    links = []
    if cause is not None and cause.envelope.traceparent:
        context = _propagator.extract({"traceparent": cause.envelope.traceparent})
        links.append(trace.Link(trace.get_current_span(context).get_span_context()))
    with trace.get_tracer("stoker").start_as_current_span(name, links=links, attributes=dict(attributes or {})):
        yield
