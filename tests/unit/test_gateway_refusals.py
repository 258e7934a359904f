"""Whatever is refused, the answer is a Problem."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import stoker_gateway.blobs
import stoker_gateway.given
from stoker_chassis.eventlog import Unavailable
from stoker_chassis.memory import MemoryLog, memory_bus
from stoker_gateway.app import create_app
from stoker_gateway.openapi import document
from stoker_gateway.store import Views, open_engine
from stoker_proto import Problem, Recorded
from tests.builders import ListLog, submitted
from tests.unit.gateway_api import SPEC, TOKEN, Gateway, gateway

ROOT = Path(__file__).parents[2]
DIGEST = hashlib.sha256(b"content").hexdigest()


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(memory_bus(tmp_path / "blobs")) as api:
        yield api


def problem_in(answer: httpx.Response) -> Problem:
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["X-Request-Id"]
    told = Problem.model_validate_json(answer.content)
    assert told.status == answer.status_code
    assert told.instance == answer.request.url.path
    return told


@pytest.mark.parametrize(
    ("method", "path", "more", "code"),
    [
        ("GET", "/nowhere", {}, "not_found"),
        ("GET", "/v1/jobs/job-none", {}, "not_found"),
        ("GET", "/v1/jobs/*", {}, "not_found"),
        ("GET", "/v1/jobs/job-none/events", {}, "not_found"),
        ("GET", "/v1/jobs/job-none/logs", {}, "not_found"),
        ("GET", "/v1/jobs/job-none/explanation", {}, "not_found"),
        ("GET", "/v1/jobs/job-none/timeline", {}, "not_found"),
        ("POST", "/v1/jobs/job-none:cancel", {}, "not_found"),
        ("POST", "/v1/nodes/n9:retest", {}, "not_found"),
        ("DELETE", "/v1/jobs", {}, "method_not_allowed"),
        ("POST", "/v1/jobs", {}, "invalid_request"),
        ("POST", "/v1/jobs", {"content": b"{"}, "invalid_request"),
        ("POST", "/v1/jobs", {"content": b"[" * 100_000}, "invalid_request"),
        ("POST", "/v1/jobs", {"json": {}}, "invalid_request"),
        ("POST", "/v1/jobs", {"json": {"spec": SPEC, "spec_yaml": "a: 1"}}, "invalid_request"),
        ("POST", "/v1/jobs", {"content": b'{"\\ud800": 1}'}, "invalid_request"),
        ("POST", "/v1/jobs", {"json": {"spec": []}}, "invalid_request"),
        ("POST", "/v1/jobs", {"json": {"spec": {}}}, "invalid_spec"),
        ("POST", "/v1/jobs", {"content": b'{"spec": {"parameters": {"lr": NaN}}}'}, "invalid_spec"),
        ("POST", "/v1/jobs", {"content": b'{"spec": {"parameters": {"x": "\\ud800"}}}'}, "invalid_spec"),
        ("POST", "/v1/jobs", {"json": {"spec_yaml": "- a list"}}, "invalid_spec"),
        ("GET", "/v1/jobs?state=running", {}, "invalid_request"),
        ("GET", "/v1/jobs?limit=0", {}, "invalid_request"),
        ("GET", "/v1/jobs?cursor=99999999999999999999", {}, "invalid_request"),
        ("GET", "/v1/events?after=-1", {}, "invalid_request"),
        ("GET", "/v1/events?after=7", {}, "invalid_request"),
        ("GET", "/v1/events", {"headers": {"Last-Event-ID": b"\xb2"}}, "invalid_request"),
        ("POST", "/v1/blobs:missing", {"json": {"digests": ["x"]}}, "invalid_request"),
        ("PUT", "/v1/blobs/x", {"content": b""}, "invalid_request"),
        ("PUT", f"/v1/blobs/{DIGEST}", {"content": b"other"}, "blob_mismatch"),
        ("PUT", f"/v1/blobs/{DIGEST}", {"headers": {"Content-Length": str(10**12)}}, "blob_too_large"),
    ],
)
async def test_every_refusal_is_a_problem(
    api: Gateway, method: str, path: str, more: dict[str, Any], code: str
) -> None:
    api.http.headers["Content-Type"] = "application/json"
    answer = await api.http.request(method, path, **more)
    assert problem_in(answer).code == code


async def test_a_wrong_method_names_the_right_ones(api: Gateway) -> None:
    assert (await api.http.delete("/v1/nodes")).headers["Allow"] == "GET"


async def test_mistakes_in_a_request_are_pointed_at(api: Gateway) -> None:
    told = problem_in(await api.http.post("/v1/jobs", json={"spec": SPEC, "spek": 1}))
    assert [(e.pointer, e.code) for e in told.errors] == [("/body/spek", "unknown_field")]


@pytest.mark.parametrize("given", [None, "Bearer wrong", TOKEN, "Bearer", f"Basic {TOKEN}", "Bearer \xff"])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/openapi.json", "/nowhere", f"/v1/blobs/{DIGEST}"])
async def test_nothing_is_told_or_read_without_the_token(api: Gateway, path: str, given: str | None) -> None:
    headers = httpx.Headers({"Authorization": given} if given else {}, encoding="latin-1")
    del api.http.headers["Authorization"]
    answer = await api.http.post(path, content=b"{", headers=headers)
    assert problem_in(answer).code == "unauthorized"
    assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_without_a_token_in_the_settings_nobody_gets_in(tmp_path: Path) -> None:
    app = create_app(memory_bus(tmp_path), Views(open_engine(None)), "")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        assert (await http.get("/v1/jobs", headers={"Authorization": "Bearer "})).status_code == 401


async def test_health_needs_no_token(api: Gateway) -> None:
    del api.http.headers["Authorization"]
    assert (await api.http.get("/healthz")).json() == {"status": "ok"}
    assert (await api.http.get("/readyz")).json() == {"end": 0, "behind": 0}


async def test_a_fault_of_ours_is_a_problem_with_the_request_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = dataclasses.replace(memory_bus(tmp_path), blobs=None)  # type: ignore[arg-type]
    app = create_app(broken, Views(open_engine(None)), TOKEN)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g", headers=headers) as http:
        answer = await http.post("/v1/blobs:missing", json={"digests": [DIGEST]})
    told = problem_in(answer)
    assert (told.code, told.facts["request_id"]) == ("internal", answer.headers["X-Request-Id"])
    assert answer.headers["X-Request-Id"] in caplog.text


class SilentLog(MemoryLog):
    """Its server is away, and reads wait for it."""

    async def read(self, after: int = 0, subject: str = ">") -> AsyncIterator[Recorded]:
        await asyncio.Event().wait()
        async for recorded in super().read(after, subject):
            yield recorded

    async def end(self) -> int:
        raise Unavailable("no answer")


async def test_while_the_log_is_away_views_answer_and_the_rest_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stoker_gateway.given, "READ_S", 0.05)
    views = Views(open_engine(None))
    views.fold([ListLog().append(submitted("j"))])
    app = create_app(dataclasses.replace(memory_bus(tmp_path), log=SilentLog()), views, TOKEN)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g", headers=headers) as http:
        assert (await http.get("/v1/jobs/j")).json()["state"] == "queued"
        for path in ("/v1/jobs/j/events", "/v1/jobs/j/timeline", "/v1/events", "/readyz"):
            told = problem_in(await http.get(path))
            assert (told.code, told.retryable) == ("log_unavailable", True)


async def test_a_blob_is_stored_once_under_its_own_digest(api: Gateway) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    ask = {"digests": [DIGEST, other]}
    assert (await api.http.post("/v1/blobs:missing", json=ask)).json() == {"missing": [DIGEST, other]}
    for _ in range(2):
        assert (await api.http.put(f"/v1/blobs/{DIGEST}", content=b"content")).status_code == 201
    assert (await api.http.head(f"/v1/blobs/{DIGEST}")).status_code == 200
    assert (await api.http.head(f"/v1/blobs/{other}")).status_code == 404
    assert (await api.http.post("/v1/blobs:missing", json=ask)).json() == {"missing": [other]}


async def test_a_blob_that_grows_too_large_on_the_way_is_refused(api: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stoker_gateway.blobs, "MAX_BLOB", 10)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"12345"

    assert problem_in(await api.http.put(f"/v1/blobs/{DIGEST}", content=chunks())).code == "blob_too_large"


def test_the_committed_description_of_the_api_is_current() -> None:
    stale = "run: python -m stoker_gateway.openapi proto/openapi.json"
    assert (ROOT / "proto" / "openapi.json").read_text() == document(), stale
