"""The streams and buckets as declared: made when missing, never changed and never weakened by a service that starts."""

from __future__ import annotations

from nats.aio.client import Client
from nats.js.api import (
    DiscardPolicy,
    KeyValueConfig,
    ObjectStoreConfig,
    PersistMode,
    StorageType,
    StoreCompression,
    StreamConfig,
)
from nats.js.errors import APIError, BucketNotFoundError, NotFoundError

from stoker_proto import subjects

DAY_S = 86_400
GIB = 2**30


def events(replicas: int) -> StreamConfig:
    """The log: kept for ever, never rewritten, refuses when full instead of forgetting."""
    return StreamConfig(
        name=subjects.EVENTS,
        subjects=[subjects.EVENTS_SUBJECTS],
        storage=StorageType.FILE,
        num_replicas=replicas,
        discard=DiscardPolicy.NEW,
        deny_delete=True,
        deny_purge=True,
        allow_direct=True,
        allow_atomic=True,
        duplicate_window=600,
        compression=StoreCompression.S2,
        max_msg_size=512 * 1024,
    )


def telemetry(replicas: int) -> StreamConfig:
    """Bounded by age and size; fast because it may lose its last moments when power fails."""
    return StreamConfig(
        name=subjects.TELEMETRY,
        subjects=list(subjects.TELEMETRY_SUBJECTS),
        storage=StorageType.FILE,
        num_replicas=replicas,
        discard=DiscardPolicy.OLD,
        max_age=7 * DAY_S,
        max_bytes=4 * GIB,
        duplicate_window=600,
        allow_direct=True,
        compression=StoreCompression.S2,
        persist_mode=PersistMode.ASYNC if replicas == 1 else None,
    )


async def ensure(nc: Client, replicas: int = 1) -> None:
    """Make what is missing. Two services may do so at once: the second finds it made."""
    js = nc.jetstream(timeout=10)
    for config in (events(replicas), telemetry(replicas)):
        try:
            await js.stream_info(str(config.name))
        except NotFoundError:
            await _made(js.add_stream(config))
    for bucket in (
        KeyValueConfig(bucket=subjects.ASSIGNMENTS, history=1, replicas=replicas),
        KeyValueConfig(bucket=subjects.LEASES, history=1, replicas=replicas),
        KeyValueConfig(bucket=subjects.SNAPSHOTS, history=1, replicas=replicas),
    ):
        try:
            await js.key_value(bucket.bucket)
        except (BucketNotFoundError, NotFoundError):
            await _made(js.create_key_value(bucket))
    try:
        await js.object_store(subjects.BLOBS)
    except (BucketNotFoundError, NotFoundError):
        await _made(js.create_object_store(subjects.BLOBS, ObjectStoreConfig(bucket=subjects.BLOBS, replicas=replicas)))


async def _made(creating: object) -> None:
    try:
        await creating  # type: ignore[misc]
    except APIError as error:
        if error.err_code != 10058:  # the stream name is in use: another service was quicker
            raise
