"""What stands in `payload` of a prompt and of a sample, and what a prompt says about its samples.

The rule: the bytes start with a mark and a version, so that a payload of somebody else is told from ours and one of a
newer version is refused; behind it are msgpack values, never code.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar

import msgspec

from strawq.errors import Damaged, FormatUnsupported
from strawq.samples import Prompt, Sample
from strawq_workers.slime.policies import versions_listed
from strawq_workers.slime.tree import Tree, TreeReader

T = TypeVar("T")

MARK, VERSION = b"strawq.slime", b"\x01"
MAGIC = MARK + VERSION

# Digests cover the bytes of a pool; what was written under one by somebody else may still be no tree.
NOT_AS_WRITTEN = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


class Head(msgspec.Struct, array_like=True):
    """Payload of a prompt: fields of the first sample, and the index of the group's first sample."""

    fields: dict[str, Any]
    index: int | None = None
    metadata: dict[str, Any] = {}


class Body(msgspec.Struct, array_like=True):
    """Payload of a sample: fields that differ from the prompt's, names of those that it lacks, further metadata and
    names that it lacks, exact values of columns, kinds of captures, and its place in a nested group."""

    fields: dict[str, Any] = {}
    lacks: list[str] = []
    metadata: list[Any] = []
    metadata_lacks: list[str] = []
    exact: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    place: list[int] = []


class Template:
    """What a prompt says about each of its samples."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.head = decode_payload(prompt.payload, Head) or Head({})

    def plain(self) -> dict[str, Any]:
        """Fields that stand in columns; fresh values, so that samples do not share what can be changed."""
        prompt = self.prompt
        number = prompt.group_id
        return {
            "prompt": copy_json(prompt.messages) if prompt.messages is not None else prompt.text or "",
            "label": prompt.label,
            "group_index": int(number) if number.isdecimal() and number.isascii() else number or None,
        }

    def fields(self, reader: TreeReader) -> dict[str, Any]:
        return {**self.plain(), **{name: reader.decode(node) for name, node in self.head.fields.items()}}

    def metadata(self, reader: TreeReader) -> dict[str, Any]:
        further = {name: reader.decode(node) for name, node in self.head.metadata.items()}
        return {**copy_json(self.prompt.metadata), **further}

    def index(self, at: int) -> int | None:
        return None if self.head.index is None else self.head.index + at

    @cached_property
    def nodes(self) -> dict[str, bytes]:
        """The fields as bytes, for comparison."""
        tree = Tree()
        nodes = {name: tree.encode(value, name) for name, value in self.plain().items()}
        return {name: msgspec.msgpack.encode(node) for name, node in {**nodes, **self.head.fields}.items()}


def decode_payload(payload: bytes | None, kind: type[T]) -> T | None:
    """None for a payload that is not this module's."""
    if payload is None or not payload.startswith(MARK):
        return None
    if not payload.startswith(MAGIC):
        raise FormatUnsupported("a sample was stored by a newer version of strawq_workers.slime: upgrade strawq here")
    try:
        return msgspec.msgpack.decode(payload[len(MAGIC) :], type=kind)
    except msgspec.MsgspecError as error:
        raise Damaged(f"the payload of a sample is damaged: {error}") from error


def listed_versions(sample: Sample) -> list[Any]:
    """`weight_versions` of a sample: as they were given, then those of the tokens since."""
    body = decode_payload(sample.payload, Body)
    if body is None or "weight_versions" not in body.exact:
        return list(versions_listed(sample))
    node, count = body.exact["weight_versions"]
    if count > len(sample.tokens):
        return list(versions_listed(sample))
    return [*TreeReader({}, {}).decode(node), *versions_listed(sample, since=count)]


def copy_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))
