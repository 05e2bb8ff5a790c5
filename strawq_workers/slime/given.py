"""What a slime user gave with a sample beyond the columns, for the functions that a worker calls.

The rule: reading only. A function of a worker sees every field and attribute of the sample as it was submitted; what of
its changes is kept is the worker's rule (`worker.views`).
"""

from __future__ import annotations

from typing import Any

from strawq.errors import BadInput, Damaged
from strawq.samples import Prompt, Sample
from strawq_workers.slime import sample as ours
from strawq_workers.slime.columns import COLUMNS, classes_of
from strawq_workers.slime.payload import NOT_AS_WRITTEN, Body, Template, decode_payload
from strawq_workers.slime.tree import TreeReader


def given(prompt: Prompt, sample: Sample) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and metadata of the sample that no column of its own holds, those of its prompt included. Raises `Damaged`
    or `FormatUnsupported` for a payload that cannot be read, `BadInput` for a value whose library is not here."""
    try:
        return _given(prompt, sample)
    except ImportError as error:
        raise BadInput(f"sample {sample.index} holds what only {error.name or error} reads: install it here") from error
    except NOT_AS_WRITTEN as error:
        raise Damaged(f"what is stored of sample {sample.index} cannot be read: {error!r}") from error


def _given(prompt: Prompt, sample: Sample) -> tuple[dict[str, Any], dict[str, Any]]:
    template = Template(prompt)
    body = decode_payload(sample.payload, Body) or Body()
    reader = TreeReader(classes_of(ours.Sample), sample.tensors)
    fields = {name: value for name, value in template.fields(reader).items() if name not in body.lacks}
    fields["index"] = template.index(sample.index)
    fields |= {name: reader.decode(node) for name, node in body.fields.items()}
    metadata = {name: value for name, value in template.metadata(reader).items() if name not in body.metadata_lacks}
    metadata |= {name: reader.decode(node) for name, node in body.metadata}
    kept = {name: value for name, value in fields.items() if name == "index" or name not in COLUMNS}
    return {name: value for name, value in kept.items() if value is not None}, metadata
