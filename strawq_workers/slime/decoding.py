"""strawq's groups as slime's samples: the inverse of `strawq_workers.slime.codec`.

The rule: a column that a worker has changed since counts, else the field comes back exactly as it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from strawq.errors import Damaged
from strawq.samples import Group, Sample
from strawq_workers.slime import captures
from strawq_workers.slime import sample as ours
from strawq_workers.slime.columns import REMOVED, classes_of, log_prob_column, mask_column
from strawq_workers.slime.exactness import same, shrink_reward
from strawq_workers.slime.payload import NOT_AS_WRITTEN, Body, Template, copy_json, decode_payload, listed_versions
from strawq_workers.slime.tree import TreeReader, build


def samples_of(group: Group, cls: Any = None) -> list[Any]:
    """The group as samples of `cls` (slime's class where it is installed, else ours), nested as they came.

    Samples that have not been started are there too. Tensors are read. A field that the class does not have becomes
    an attribute. Raises `Damaged`, `Gone` or `FormatUnsupported` for what cannot be read."""
    kind = cls or ours.sample_class()
    template = Template(group.prompt)
    by_index = {sample.index: sample for sample in group.samples}
    nested: dict[tuple[int, ...], Any] = {}
    flat = []
    for index in sorted({*by_index, *range(group.prompt.samples)}):
        try:
            place, sample = _decode_sample(by_index.get(index, Sample(index)), template, kind)
        except NOT_AS_WRITTEN as error:
            raise Damaged(
                f"task {group.task_id}: what is stored of sample {index} cannot be read as {kind.__name__}: {error!r}"
            ) from error
        flat.append(sample)
        nested[place or (index,)] = sample
    return _nest(nested) if any(len(place) > 1 for place in nested) else flat


def _decode_sample(sample: Sample, template: Template, kind: Any) -> tuple[tuple[int, ...], Any]:
    """Where the sample stands in a nested group (empty: it was not nested), and the sample."""
    body = decode_payload(sample.payload, Body) or Body()
    reader = TreeReader(classes_of(kind), sample.tensors)
    values = template.fields(reader)
    for name in body.lacks:
        values.pop(name, None)
    values["index"] = template.index(sample.index)
    ids = sample.prompt_tokens if sample.prompt_tokens is not None else template.prompt.tokens
    count = len(sample.tokens)
    untouched = count == 0 and body.exact.get("tokens")
    metadata = _decode_metadata(sample, template, reader, body)
    values.update(
        tokens=[] if ids is None or untouched else ids.tolist() + sample.tokens.tolist(),
        response_length=count,
        response=None if body.exact.get("response") and sample.text is None else sample.text or "",
        reward=_decode_reward(sample.reward, reader, body),
        loss_mask=_decode_mask(sample, reader, body),
        rollout_log_probs=_decode_log_probs(sample, reader, body),
        weight_versions=listed_versions(sample),
        status=reader.classes["Status"](sample.status),
        metadata=None if body.exact.get("metadata") and not metadata else metadata,
    )
    if ids is None and count:
        values["tokens"] = sample.tokens.tolist()
    if sample.metadata.get(REMOVED):
        values[REMOVED] = True
    values.update(captures.decode(sample, body.kinds))
    values.update((name, reader.decode(node)) for name, node in body.fields.items())
    return tuple(body.place), build(kind, values)


def _decode_metadata(sample: Sample, template: Template, reader: TreeReader, body: Body) -> dict[str, Any]:
    values = template.metadata(reader)
    for name in body.metadata_lacks:
        values.pop(name, None)
    values.update((name, value) for name, value in copy_json(sample.metadata).items() if name != REMOVED)
    values.update((name, reader.decode(node)) for name, node in body.metadata)
    return values


def _decode_reward(column: Any, reader: TreeReader, body: Body) -> Any:
    if "reward" in body.exact:
        exact = reader.decode(body.exact["reward"])
        if same(shrink_reward(exact), column):
            return exact
    return copy_json(column) if isinstance(column, dict) else column


def _decode_mask(sample: Sample, reader: TreeReader, body: Body) -> Any:
    removed = bool(sample.metadata.get(REMOVED))
    if "loss_mask" in body.exact:
        exact = reader.decode(body.exact["loss_mask"])
        column = mask_column(exact, len(sample.loss_mask), removed)
        if column is not None and np.array_equal(column, sample.loss_mask):
            return exact
    return sample.loss_mask.tolist() if len(sample.loss_mask) else None


def _decode_log_probs(sample: Sample, reader: TreeReader, body: Body) -> Any:
    if sample.logprobs is None:
        return None
    if "rollout_log_probs" in body.exact:
        node, floats = body.exact["rollout_log_probs"]
        exact = reader.decode(node)
        column, count = log_prob_column(exact), len(exact)
        if np.array_equal(column, sample.logprobs[:count]):
            if count == len(sample.logprobs):
                return exact.tolist() if floats else exact
            if floats:
                return exact.tolist() + sample.logprobs[count:].tolist()
    return sample.logprobs.tolist()


def _nest(placed: Mapping[tuple[int, ...], Any]) -> list[Any]:
    """Nested lists from places and samples."""
    found: list[Any] = []
    inner: dict[int, dict[tuple[int, ...], Any]] = {}
    for place, sample in sorted(placed.items()):
        inner.setdefault(place[0], {})[place[1:]] = sample
    for items in inner.values():
        found.append(items[()] if () in items else _nest(items))
    return found
