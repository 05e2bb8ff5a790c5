"""Answers of `/generate`, in SGLang's fields and in its order.

The rule: every per-token field covers exactly the output tokens of the answer (or, in an incremental chunk, those of
the chunk), and a field that was not asked for is absent.

Score centering: a request with `top_logprobs_num` and the field `return_output_topk` (or an engine started with
`--output-topk`) also gets `output_topk_token_ids` (base64 of little-endian int32), `output_topk_log_probs` (base64 of
little-endian float32, normalised over the whole vocabulary) and `output_topk_shape` = [tokens, k]. Stock SGLang has
no such fields, ignores the request field, and offers the same numbers as `output_top_logprobs`.
"""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np

from strawq_workers.engine.model import Floats
from strawq_workers.engine.request import ABORTED_IN_QUEUE, Request, TopRows
from strawq_workers.engine.vocabulary import decode_tokens


class AnswerWriter:
    """Writes the chunks, or the one answer, of one request.

    incremental makes chunks carry only new tokens; `completion_tokens` and `output_token_logprobs_length` stay
    cumulative.
    """

    def __init__(self, request: Request, *, incremental: bool, with_text: bool) -> None:
        self._request = request
        self._incremental = incremental
        self._with_text = with_text
        self._sent_tokens = 0
        self._sent_text = ""
        self._chunks = 0

    def has_news(self) -> bool:
        return self._request.closed or self._request.published > self._sent_tokens

    def write(self, *, streaming: bool) -> dict[str, Any]:
        """The answer for what is published now."""
        request, wanted = self._request, self._request.spec.wanted
        finish = request.finish if request.closed else None
        count = request.published
        queued = finish is ABORTED_IN_QUEUE
        first = self._sent_tokens if self._incremental else 0
        answer: dict[str, Any] = {}
        if self._with_text:
            text = self._text(count, finish is not None)
            answer["text"] = text[len(self._sent_text) :] if self._incremental else text
            self._sent_text = max(self._sent_text, text, key=len)
        answer["output_ids"] = request.tokens[request.prompt_length + first : request.prompt_length + count]
        answer["meta_info"] = self._queued_meta() if queued else self._meta(first, count, finish)
        if queued or not streaming or self._chunks == 0:
            answer["meta_info"]["response_sent_to_client_ts"] = time.time()
        if wanted.prompt_ids:
            answer["prompt_token_ids"] = list(request.spec.prompt)
        if streaming and request.spec.index is not None:
            answer["index"] = request.spec.index
        self._sent_tokens = count
        self._chunks += 1
        return answer

    def _text(self, count: int, final: bool) -> str:
        request = self._request
        if final:
            return bytes(request.data[: request.text_end]).decode("utf-8", errors="replace")
        tokens = request.tokens[request.prompt_length : request.prompt_length + count]
        return decode_tokens(tokens, skip_special=request.spec.params.skip_special_tokens, final=False)

    def _versions(self) -> list[dict[str, Any]]:
        spans = self._request.spans or [(self._request.version, 0, 0)]
        return [{"version": version, "start": start, "end": end} for version, start, end in spans]

    def _meta(self, first: int, count: int, finish: dict[str, Any] | None) -> dict[str, Any]:
        request, wanted = self._request, self._request.spec.wanted
        meta: dict[str, Any] = {
            "id": request.spec.rid,
            "finish_reason": finish,
            "prompt_tokens": request.prompt_length,
            "weight_version": request.version,
            "num_retractions": request.retractions,
        }
        if wanted.logprobs:
            self._logprobs(meta, first, count)
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = count
        meta["cached_tokens"] = request.cached
        if finish is not None:
            meta["weight_versions"] = self._versions()
        meta["cached_tokens_details"] = {"device": request.cached, "host": 0} if request.cached else None
        if finish is not None and wanted.routes:
            rows = request.routes[wanted.routes_start : max(wanted.routes_start, request.prompt_length + count - 1)]
            meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode("ascii")
        meta["dp_rank"] = None
        if finish is not None:
            meta["e2e_latency"] = time.monotonic() - request.arrived
        return meta

    def _queued_meta(self) -> dict[str, Any]:
        request = self._request
        meta: dict[str, Any] = {
            "id": request.spec.rid,
            "finish_reason": request.finish,
            "weight_version": request.version,
            "e2e_latency": time.monotonic() - request.arrived,
            "weight_versions": self._versions(),
        }
        if request.spec.wanted.logprobs:
            meta.update(input_token_logprobs=[], output_token_logprobs=[], output_token_logprobs_length=0)
        meta["completion_tokens"] = 0
        return meta

    def _logprobs(self, meta: dict[str, Any], first: int, count: int) -> None:
        request, wanted = self._request, self._request.spec.wanted
        output = request.tokens[request.prompt_length + first : request.prompt_length + count]
        inputs = (
            request.tokens[wanted.logprob_start : request.prompt_length] if wanted.logprob_start is not None else []
        )
        # The first input token has no log-prob: nothing came before it that was looked at.
        meta["input_token_logprobs"] = [
            self._triple(None if place == 0 else request.input_logprobs[place - 1], token)
            for place, token in enumerate(inputs)
        ]
        pairs = zip(request.logprobs[first:count], output, strict=True)
        meta["output_token_logprobs"] = [self._triple(logprob, token) for logprob, token in pairs]
        meta["output_token_logprobs_length"] = count
        if wanted.top:
            self._top(meta, first, count, bool(inputs))
        if wanted.token_ids:
            meta["input_token_ids_logprobs"] = self._chosen(request.input_token_ids_logprobs, padded=bool(inputs))
            meta["output_token_ids_logprobs"] = self._chosen(request.token_ids_logprobs[first:count], padded=False)
        if wanted.sampling_mask:
            meta["output_token_sampling_mask"] = request.sampling_masks[first:count]
            meta["output_token_sampling_logprobs"] = [_f32(value) for value in request.sampling_logprobs[first:count]]
            meta["output_token_sampling_mask_length"] = count

    def _top(self, meta: dict[str, Any], first: int, count: int, has_inputs: bool) -> None:
        request, wanted = self._request, self._request.spec.wanted
        if wanted.flat_both:
            self._flat(meta, "input", request.input_top, 0, len(request.input_top.ids), int(has_inputs))
        else:
            meta["input_top_logprobs"] = self._rows(request.input_top, 0, len(request.input_top.ids), padded=has_inputs)
        if wanted.flat_output:
            self._flat(meta, "output", request.top, first, count, 0)
        else:
            meta["output_top_logprobs"] = self._rows(request.top, first, count, padded=False)
        if wanted.output_topk:
            ids, logprobs = _arrays(request.top, first, count, wanted.top)
            meta["output_topk_token_ids"] = base64.b64encode(ids.tobytes()).decode("ascii")
            meta["output_topk_log_probs"] = base64.b64encode(logprobs.tobytes()).decode("ascii")
            meta["output_topk_shape"] = list(ids.shape)

    def _flat(self, meta: dict[str, Any], side: str, top: TopRows, first: int, count: int, null_prefix: int) -> None:
        wanted = self._request.spec.wanted
        ids, logprobs = _arrays(top, first, count, wanted.top)
        name = f"{side}_top_logprobs"
        if wanted.flat_base64:
            meta[f"{name}_val_flat_b64"] = base64.b64encode(logprobs.tobytes()).decode("ascii")
            meta[f"{name}_idx_flat_b64"] = base64.b64encode(ids.tobytes()).decode("ascii")
            meta[f"{name}_val_flat_b64_dtype"] = "float32"
            meta[f"{name}_idx_flat_b64_dtype"] = "int32"
        else:
            meta[f"{name}_val_flat"] = logprobs.ravel().tolist()
            meta[f"{name}_idx_flat"] = ids.ravel().tolist()
        meta[f"{name}_shape"] = list(ids.shape)
        meta[f"{name}_null_prefix"] = null_prefix

    def _rows(self, top: TopRows, first: int, count: int, *, padded: bool) -> list[Any]:
        rows: list[Any] = [None] if padded else []
        for ids, logprobs in zip(top.ids[first:count], top.logprobs[first:count], strict=True):
            rows.append([self._triple(float(p), int(t)) for p, t in zip(logprobs, ids, strict=True)])
        return rows

    def _chosen(self, rows: list[Floats], *, padded: bool) -> list[Any]:
        ids = self._request.spec.wanted.token_ids
        chosen: list[Any] = [None] if padded else []
        chosen += [[self._triple(float(p), t) for p, t in zip(row, ids, strict=True)] for row in rows]
        return chosen

    def _triple(self, logprob: float | None, token: int) -> list[Any]:
        text = None
        if self._request.spec.wanted.text_in_logprobs:
            text = decode_tokens((token,), skip_special=False, final=True)
        return [None if logprob is None else _f32(logprob), token, text]


def _arrays(top: TopRows, first: int, count: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """ids <i4 and log-probs <f4, both [count - first, k]."""
    ids = np.array(top.ids[first:count], dtype="<i4").reshape(-1, k)
    return ids, np.array(top.logprobs[first:count], dtype="<f4").reshape(-1, k)


def _f32(value: float) -> float:
    """The nearest float32, as SGLang sends: it survives storage in 32 bits unchanged."""
    return float(np.float32(value))
