"""/v1/blobs: content-addressed uploads, hashed again on arrival."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from stoker_chassis.stores import MAX_BLOB
from stoker_proto import ProblemError, problem

from .given import BusOf
from .identity import DIGEST

router = APIRouter(prefix="/v1", tags=["blobs"])


class Digests(BaseModel):
    digests: list[str] = Field(max_length=10_000)


class Missing(BaseModel):
    missing: list[str]


@router.post("/blobs:missing")
async def missing(body: Digests, bus: BusOf) -> Missing:
    """Which of these blobs are not there yet."""
    return Missing(missing=[d for d in body.digests if not await bus.blobs.has(checked(d))])


@router.put("/blobs/{digest}", status_code=201)
async def put(digest: str, request: Request, bus: BusOf) -> dict[str, str]:
    """Store a blob under the SHA-256 of its content."""
    checked(digest)
    declared = request.headers.get("Content-Length", "0")
    if declared.isdecimal() and int(declared) > MAX_BLOB:
        raise _too_large()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blob"
        hashed, size = hashlib.sha256(), 0
        with path.open("wb") as file:
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BLOB:
                    raise _too_large()
                hashed.update(chunk)
                file.write(chunk)
        if hashed.hexdigest() != digest:
            told = f"The content's SHA-256 is {hashed.hexdigest()}, not {digest}"
            raise ProblemError(problem("blob_mismatch", told))
        await bus.blobs.put(path)
    return {"digest": digest}


@router.head("/blobs/{digest}")
async def head(digest: str, bus: BusOf) -> Response:
    """Whether the blob is there: 200 or 404."""
    if not await bus.blobs.has(checked(digest)):
        raise ProblemError(problem("not_found", f"There is no blob {digest}"))
    return Response()


def _too_large() -> ProblemError:
    told = f"A blob holds {MAX_BLOB} bytes at most; send less code, or keep data out of it"
    return ProblemError(problem("blob_too_large", told))


def checked(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise ProblemError(problem("invalid_request", f"{digest!r} is not a SHA-256 in lower-case hex"))
    return digest
