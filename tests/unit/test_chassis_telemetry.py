"""Trace context travels with events, and a handler's span links to the span that wrote the event."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stoker_chassis.clock import stamp
from stoker_chassis.telemetry import set_up, span, traceparent, with_trace
from stoker_proto import Recorded
from tests.builders import ready


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def test_without_an_endpoint_nothing_is_traced() -> None:
    set_up("scheduler", "scheduler-1", None)
    with span("decide"):
        assert traceparent() is None
        assert with_trace(stamp(ready("n1"), "test")).traceparent is None


def test_an_event_carries_the_span_that_wrote_it(spans: InMemorySpanExporter) -> None:
    with span("decide"):
        envelope = with_trace(stamp(ready("n1"), "test"))
    (written,) = spans.get_finished_spans()
    assert written.context is not None
    assert envelope.traceparent is not None
    version, trace_id, span_id, flags = envelope.traceparent.split("-")
    assert (version, int(trace_id, 16), int(span_id, 16)) == ("00", written.context.trace_id, written.context.span_id)
    assert int(flags, 16) & 1  # sampled; other bits may be set


def test_a_context_that_an_event_has_already_is_kept(spans: InMemorySpanExporter) -> None:
    given = f"00-{1:032x}-{2:016x}-01"
    with span("forward"):
        assert with_trace(stamp(ready("n1"), "test", traceparent=given)).traceparent == given


def test_a_handler_links_to_the_cause_instead_of_being_its_child(spans: InMemorySpanExporter) -> None:
    with span("submit"):
        envelope = with_trace(stamp(ready("n1"), "test"))
    with span("place", {"seq": 1}, Recorded(seq=1, at_ms=1, envelope=envelope, event=ready("n1"))):
        pass
    submit, place = spans.get_finished_spans()
    assert submit.context is not None
    assert place.context is not None
    assert place.parent is None
    assert place.context.trace_id != submit.context.trace_id
    assert [link.context.span_id for link in place.links] == [submit.context.span_id]
