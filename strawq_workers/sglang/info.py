"""What an engine says about itself: model, policy version, load.

The rule: a fact is read from the engine or given by the caller, never assumed. SGLang publishes neither its vocabulary
nor its R3 shape over HTTP, so these come from the caller, from extra fields of an engine that sends them, or from the
model directory if this machine sees it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from strawq.errors import BadInput, EngineUnavailable, Misaligned
from strawq_workers.sglang.wire import ModelShape

S = TypeVar("S")

LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer")
TOPK_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_router_topk", "moe_topk", "moe_k", "top_k_experts")
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length")


class ModelInfo(msgspec.Struct, frozen=True):
    """`/model_info`. `weight_version` is the engine's own string; "" if it reports none."""

    model_path: str = ""
    weight_version: str | None = None

    @property
    def version(self) -> str:
        return self.weight_version or ""


class ServerInfo(msgspec.Struct, frozen=True):
    """The part of `/server_info` that is used. None: the engine does not say."""

    version: str | None = None
    context_length: int | None = None
    incremental_streaming_output: bool | None = None
    enable_return_routed_experts: bool | None = None
    enable_deterministic_inference: bool | None = None


class RankLoad(msgspec.Struct, frozen=True):
    num_running_reqs: int
    num_waiting_reqs: int
    queues: dict[str, int] = msgspec.field(default_factory=dict)


class Loads(msgspec.Struct, frozen=True):
    """`/v1/loads`: one row per data-parallel rank."""

    loads: list[RankLoad]

    @property
    def running(self) -> int:
        return sum(rank.num_running_reqs for rank in self.loads)

    @property
    def waiting(self) -> int:
        return sum(max(rank.num_waiting_reqs, sum(rank.queues.values())) for rank in self.loads)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits, in any queue of any rank. A paused engine's held requests are in none of
        them."""
        return self.running == 0 and self.waiting == 0


class RouterWorker(msgspec.Struct, frozen=True):
    url: str
    is_healthy: bool = True


class RouterWorkers(msgspec.Struct, frozen=True):
    """`GET /workers` of sglang-router. An engine answers 404 there, which is how the two are told apart."""

    workers: list[RouterWorker]


def decode_info(body: bytes, kind: type[S], *, what: str) -> S:
    """A control answer as `kind`. `Misaligned` for a missing or wrong field, `EngineUnavailable` if it is not JSON."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as wrong:
        raise Misaligned(f"{what}: {wrong}") from wrong
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        raise EngineUnavailable(f"{what}: the answer is not JSON: {broken}") from broken


def config_beside(model_path: str) -> dict[str, Any]:
    """`config.json` of a model directory that this machine can read, else an empty mapping. Blocks on the file
    system."""
    path = Path(model_path) / "config.json"
    if not model_path or not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as broken:
        raise BadInput(f"{path} is not JSON: {broken}") from broken
    return found if isinstance(found, dict) else {}


def shape_from(sources: list[dict[str, Any]], *, url: str) -> ModelShape:
    """The first value found for each fact, in the order of `sources`; a multimodal model's text part counts as well.

    Raises `BadInput` if nobody knows the vocabulary: an id outside it would kill the engine."""
    flat = [part for source in sources for part in (source, source.get("text_config")) if isinstance(part, dict)]

    def first(*keys: str) -> int:
        for part in flat:
            for key in keys:
                value = part.get(key)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return 0

    vocab_size = first("vocab_size")
    if not vocab_size:
        raise BadInput(
            f"{url} does not say its vocabulary size, and its model directory is not readable here: give "
            "ModelShape(vocab_size=...). SGLang dies of a token id outside the vocabulary"
        )
    return ModelShape(
        vocab_size=vocab_size,
        layers=first(*LAYER_KEYS),
        topk=first(*TOPK_KEYS),
        experts=first(*EXPERT_KEYS),
        context_tokens=first("context_length", "max_model_len", *CONTEXT_KEYS),
    )
