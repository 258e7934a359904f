"""The read model's tables: views as documents, with the columns that lists filter and sort by."""

from __future__ import annotations

from sqlalchemy import Index, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class JobRow(Base):
    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    submitted_seq: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(String(16))
    queue: Mapped[str] = mapped_column(String(100))
    priority_class: Mapped[str] = mapped_column(String(100))
    window: Mapped[str | None] = mapped_column(String(100))
    array_id: Mapped[str | None] = mapped_column(String(64))
    view: Mapped[str] = mapped_column(Text)

    __table_args__ = (
        Index("jobs_by_seq", "submitted_seq"),
        Index("jobs_by_state", "state", "submitted_seq"),
        Index("jobs_by_array", "array_id", "submitted_seq"),
    )


class NodeRow(Base):
    __tablename__ = "nodes"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    view: Mapped[str] = mapped_column(Text)


class ClusterRow(Base):
    """The configuration in force: one row."""

    __tablename__ = "cluster"

    one: Mapped[int] = mapped_column(Integer, primary_key=True)
    version: Mapped[int] = mapped_column(Integer)
    cluster: Mapped[str] = mapped_column(Text)


class CheckpointRow(Base):
    """How far the log is folded in: one row, written in the same transaction as what it covers."""

    __tablename__ = "checkpoint"

    one: Mapped[int] = mapped_column(Integer, primary_key=True)
    seq: Mapped[int] = mapped_column(Integer)
    event_id: Mapped[str] = mapped_column(String(255))
    schema: Mapped[int] = mapped_column(Integer)
