"""slime's samples as strawq's groups, and back.

The rule: `samples_of(group_of(...))` gives every field and every further attribute back, equal and of the same type, or
`group_of` refuses it by the path of the field. What strawq knows about goes into its own columns and tensors, where
every reader of the pool finds it: tokens, log-probs, loss mask, status, reward, text, versions, R3, SC. The rest goes
into `payload`: a tagged msgpack tree behind a magic number (`strawq_workers.slime.tree`), no pickle. What all samples
of a group share stands once, in the payload of the prompt.

A column may hold less than the field did (a reward of 1 is 1.0 there). Then the payload has the field too, and it
counts for as long as the column is what it would become again: when a worker has changed the column, that is newer.

Attributes that start with `_strawq_` belong to whoever holds the sample now, and are not stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec
import numpy as np

from strawq.alignment import check_group
from strawq.errors import BadInput, Misaligned, StrawqError
from strawq.rows import Rows, whole_numbers
from strawq.samples import Group, Prompt, Sample, Status
from strawq_workers.slime import captures
from strawq_workers.slime.columns import COLUMNS, OWN, REMOVED, classes_of, log_prob_column, mask_column
from strawq_workers.slime.decoding import samples_of
from strawq_workers.slime.exactness import json_exact, same, shrink_reward
from strawq_workers.slime.payload import MAGIC, Body, Head, Template, listed_versions
from strawq_workers.slime.policies import continues, spans_for, versions_listed
from strawq_workers.slime.sample import word
from strawq_workers.slime.tree import Tree, attributes
from strawq_workers.stale_groups import STALE_DROPS
from strawq_workers.worker.generation import MIXED_SAMPLING

PRIVATE = "_strawq_"
NOTED = frozenset({STALE_DROPS, MIXED_SAMPLING})
"""Keys of `Sample.metadata` under which workers note something of one sample."""
_INDEX_MAX = 1 << 62

__all__ = ["group_of", "prompt_of", "samples_of"]


def prompt_of(sample: Any, group_index: Any = None, samples: int = 0) -> Prompt:
    """The prompt that a group of such samples answers; `samples` is G (0: the worker's default).

    Of `sample` everything is taken that is not an answer, its index as that of the group's first sample. Text, chat
    messages, token ids, label and metadata go into the prompt's columns where JSON gives them back equal. Raises
    `BadInput` that names the field."""
    with _refused_as("a prompt"):
        return _prompt_of(sample, group_index, samples)


def _prompt_of(sample: Any, group_index: Any, samples: int) -> Prompt:
    given = _stored(sample)
    group_index = given.get("group_index") if group_index is None else group_index
    if "group_index" in given or group_index is not None:
        given["group_index"] = group_index
    tokens, count = _token_counts(given, "prompt")
    columns: dict[str, Any] = {}
    prompt, label, metadata = given.pop("prompt", ""), given.pop("label", None), given.get("metadata") or {}
    if isinstance(prompt, str):
        columns["text"] = prompt if prompt or not tokens else None
    elif isinstance(prompt, list) and prompt and all(map(_is_message, prompt)) and json_exact(prompt):
        columns["messages"] = prompt
    else:
        given["prompt"] = prompt
    if label is None or type(label) is str:
        columns["label"] = label
    else:
        given["label"] = label
    tree = Tree(None, _names(cast(Hashable, type(sample))))
    common, further = _divide_metadata(metadata, tree, "metadata")
    fields = {
        name: tree.encode(value, name)
        for name, value in sorted(given.items())
        if name not in COLUMNS and name not in OWN
    }
    head = Head(fields, _first_index(given.get("index")), further)
    prompt_tokens = tokens[: len(tokens) - count]
    return Prompt(
        group_id="" if group_index is None else str(group_index),
        tokens=_ids(prompt_tokens, "tokens") if prompt_tokens else None,
        metadata=common,
        samples=samples,
        payload=MAGIC + msgspec.msgpack.encode(head),
        **columns,
    )


def group_of(task_id: str, prompt: Prompt, samples: Sequence[Any], before: Group | None = None) -> Group:
    """The group that these samples are, which may be nested lists (an answer that was split into several samples).

    `before` is the group as the queue has it. With it, tokens that were there keep the versions that they had, and
    tensors that were saved are not saved again. Without it, tokens of a sample with several weight versions get a mixed
    span. Raises `Misaligned` for captures that do not cover the tokens, with the counts, and `BadInput` for a field
    that cannot be stored, with its path."""
    flat = list(_flatten(samples, ()))
    nested = any(len(place) > 1 for place, _ in flat)
    known = {sample.index: sample for sample in before.samples} if before else {}
    template = Template(prompt)
    encoded = []
    for at, (place, given) in enumerate(flat):
        with _refused_as(f"sample {at}"):
            encoded.append(_encode_sample(at, given, template, known.get(at), place if nested else ()))
    group = Group(task_id, prompt, tuple(encoded))
    check_group(group)
    return group


def _encode_sample(at: int, given: Any, template: Template, before: Sample | None, place: tuple[int, ...]) -> Sample:
    values, what = _stored(given), f"sample {at}"
    tokens, count = _token_counts(values, what)
    start = len(tokens) - count
    response = _ids(tokens[start:], f"{what}.tokens")
    kept = {} if before is None else {name: n for name, n in before.metadata.items() if name == STALE_DROPS}
    before = before if before is not None and continues(response, before) else None
    tensors: dict[str, Rows] = dict(before.tensors) if before else {}
    tree, body = Tree(tensors, _names(cast(Hashable, type(given)))), Body(place=list(place))
    own_prompt = _own_prompt(tokens[:start], count, template.prompt, what, body)
    removed = bool(values.get(REMOVED))
    captured = captures.encode(values, len(tokens), count, what)
    body.kinds.update(captured.kinds)
    listed = _listed(values.get("weight_versions"), what)
    _other_fields(values, captured.left, type(given), template, tree, what, body)
    if not same(values.get("index"), template.index(at)):
        body.fields["index"] = tree.encode(values.get("index"), f"{what}.index")
    metadata = {**_metadata(values.get("metadata"), template, tree, what, body), **kept}
    status = word(values.get("status", "pending"))
    built = Sample(
        index=at,
        tokens=response,
        logprobs=_log_probs(values.get("rollout_log_probs"), count, what, body),
        loss_mask=_mask(values.get("loss_mask"), count, removed, what, body),
        versions=spans_for([str(v) for v in listed], count, before, listed_versions(before) if before else []),
        status=cast(Status, status),
        finish_reason=before.finish_reason if before and before.status == status else "",
        reward=_reward(values.get("reward"), tree, what, body),
        text=_text(values.get("response", ""), what, body),
        metadata={**metadata, REMOVED: True} if removed else metadata,
        segments=before.segments if before else (),
        prompt_tokens=own_prompt,
        r3=captured.routes,
        sc=captured.sc,
        tensors=tensors,
    )
    if listed != versions_listed(built):
        body.exact["weight_versions"] = [tree.encode(listed, f"{what}.weight_versions"), count]
    saved = before is not None and before.payload is not None
    payload = MAGIC + msgspec.msgpack.encode(body) if saved or body != Body() else None
    return msgspec.structs.replace(built, payload=payload)


@contextlib.contextmanager
def _refused_as(what: str) -> Iterator[None]:
    """Values of a user's own classes may raise anything when they are looked at."""
    try:
        yield
    except StrawqError:
        raise
    except Exception as error:
        raise BadInput(f"{what} cannot be stored: {type(error).__name__}: {error}") from error


def _stored(sample: Any) -> dict[str, Any]:
    return {name: value for name, value in attributes(sample).items() if not name.startswith(PRIVATE)}


def _token_counts(values: Mapping[str, Any], what: str) -> tuple[list[int], int]:
    """Token ids of prompt and response as a list, and how many are the response's."""
    tokens = values.get("tokens")
    tokens = [] if tokens is None else tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    count = values.get("response_length") or 0
    whole: Any = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
    if not whole or not 0 <= count <= len(tokens):
        raise Misaligned(f"{what}: response_length is {count!r}, and there are {len(tokens)} tokens with the prompt's")
    return tokens, int(count)


def _ids(tokens: list[int], path: str) -> Any:
    ids = whole_numbers(tokens, np.int32, path, least=0)
    if ids.ndim != 1:
        raise BadInput(f"{path}: shape {list(ids.shape)} where one axis is needed")
    return ids


def _first_index(index: Any) -> int | None:
    if index is None:
        return None
    whole = isinstance(index, (int, np.integer)) and not isinstance(index, bool)
    if not whole or not -_INDEX_MAX < index < _INDEX_MAX:
        raise BadInput(f"index: {index!r:.60} is no whole number below 2**62")
    return int(index)


def _listed(given: Any, what: str) -> list[Any]:
    if isinstance(given, (str, bytes)):
        raise BadInput(f"{what}.weight_versions is {given!r:.60}; it must be a list of versions")
    return list(given or [])


def _own_prompt(tokens: list[int], count: int, prompt: Prompt, what: str, body: Body) -> Any:
    """The sample's prompt where it is not the group's."""
    if not tokens and not count:
        if prompt.tokens is not None:
            body.exact["tokens"] = True  # not tokenised yet
        return None
    ids = _ids(tokens, f"{what}.tokens")
    return None if prompt.tokens is not None and np.array_equal(prompt.tokens, ids) else ids


def _text(response: Any, what: str, body: Body) -> str | None:
    if response is None:
        body.exact["response"] = True
        return None
    if type(response) is not str:
        raise BadInput(f"Unsupported durable Sample field type: {type(response).__name__} at {what}.response; use text")
    return response or None


def _mask(given: Any, count: int, removed: bool, what: str, body: Body) -> Any:
    if given is not None and len(given) != count:
        raise Misaligned(f"{what}: loss_mask covers {len(given)} tokens, the response has {count}")
    column = mask_column(given, count, removed)
    if column is None:
        raise BadInput(f"{what}: loss_mask holds something else than 0 and 1")
    usual = _list_of(given, int) and given == column.tolist() if count else given is None
    if not usual:
        body.exact["loss_mask"] = Tree().encode(given, f"{what}.loss_mask")
    return column


def _list_of(value: Any, kind: type) -> bool:
    return type(value) is list and all(type(item) is kind for item in value)


def _log_probs(given: Any, count: int, what: str, body: Body) -> Any:
    if given is None:
        return None
    if len(given) != count:
        raise Misaligned(f"{what}: rollout_log_probs cover {len(given)} tokens, the response has {count}")
    column = log_prob_column(given)
    if column is None:
        raise BadInput(f"{what}: rollout_log_probs are not numbers")
    if not (_list_of(given, float) and np.array_equal(np.asarray(given), column)):
        # A list of doubles is kept as an array: an eighth of the time, and of the size with tags.
        floats = _list_of(given, float)
        kept = np.asarray(given, np.float64) if floats else given
        body.exact["rollout_log_probs"] = [Tree().encode(kept, f"{what}.rollout_log_probs"), floats]
    return column


def _reward(given: Any, tree: Tree, what: str, body: Body) -> Any:
    column = shrink_reward(given)
    if not same(column, given):
        body.exact["reward"] = tree.encode(given, f"{what}.reward")
    return column


def _divide_metadata(metadata: Mapping[Any, Any], tree: Tree, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Entries that JSON gives back equal, and the nodes of the others."""
    plain, further = {}, {}
    for name, value in metadata.items():
        if type(name) is not str:
            raise BadInput(f"{what}: key {name!r} is no text; metadata are keyed by text")
        if name != REMOVED and json_exact(name) and json_exact(value):
            plain[name] = value
        else:
            further[name] = tree.encode(value, f"{what}[{name!r}]")
    return plain, further


def _metadata(given: Any, template: Template, tree: Tree, what: str, body: Body) -> dict[str, Any]:
    if given is not None and type(given) is not dict:
        raise BadInput(f"{what}.metadata is a {type(given).__name__}; it must be a dict")
    plain, further = _divide_metadata(given or {}, tree, f"{what}.metadata")
    common, common_further = template.prompt.metadata, template.head.metadata
    lacks = (common.keys() | common_further.keys()) - plain.keys() - further.keys()
    body.metadata_lacks.extend(sorted(lacks))
    body.metadata.extend([name, node] for name, node in further.items() if common_further.get(name) != node)
    if given is None:
        body.exact["metadata"] = True
    # What workers note is the sample's own, also where the prompt was made of this sample.
    return {
        name: value
        for name, value in plain.items()
        if name in NOTED or name not in common or not same(common[name], value)
    }


def _other_fields(
    values: Mapping[str, Any], left: frozenset[str], kind: Any, template: Template, tree: Tree, what: str, body: Body
) -> None:
    """Fields without a column that are neither the prompt's nor the default of the class."""
    defaults = _defaults(kind)
    for name in sorted(values):
        if name in COLUMNS and name not in left:
            continue
        value, path, common = values[name], f"{what}.{name}", template.nodes.get(name)
        if common is not None:
            if msgspec.msgpack.encode(Tree(None, tree.names).encode(value, path)) != common:
                body.fields[name] = tree.encode(value, path)
            continue
        node = tree.encode(value, path)
        if name not in defaults or defaults[name] != msgspec.msgpack.encode(node):
            body.fields[name] = node
    body.lacks.extend(sorted(template.nodes.keys() - values.keys()))


@lru_cache(maxsize=16)
def _defaults(kind: Any) -> dict[str, bytes]:
    """Fields of a new instance, as bytes."""
    try:
        values = _stored(kind())
    except TypeError:
        return {}  # it cannot be made without arguments: every field is stored
    return {
        name: msgspec.msgpack.encode(Tree(None, _names(kind)).encode(value, name)) for name, value in values.items()
    }


@lru_cache(maxsize=16)
def _names(kind: Any) -> dict[Any, str]:
    """Names in a tree of the classes that belong to this class of samples."""
    return {found: name for name, found in classes_of(kind).items()}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict)


def _flatten(samples: Sequence[Any], above: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    for at, item in enumerate(samples):
        if isinstance(item, (list, tuple)):
            if not item:
                raise BadInput(f"a group holds an empty list of samples at {[*above, at]}")
            yield from _flatten(item, (*above, at))
        else:
            yield (*above, at), item
