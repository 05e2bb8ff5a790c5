"""A sample as slime users know it: the same fields, defaults and methods, for hosts without slime.

The rule: code that is written for slime's `Sample` runs on this one, and where slime is importable its own class is
used (`sample_class`). Per-token lists cover the response: `loss_mask`, `rollout_log_probs` and rows of the SC
captures have `response_length` entries, `rollout_routed_experts` has `len(tokens) - 1` rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from typing import Any

from strawq.errors import BadInput, Misaligned


class Status(Enum):
    """What became of a sample. `ABORTED` ones are continued, `FAILED` ones are not."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


def word(status: Any) -> str:
    """A status as its word, of whichever enumeration it is."""
    return str(getattr(status, "value", status))


@dataclasses.dataclass
class SpecInfo:
    """Counts of speculative decoding, summed over a sample's requests."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclasses.dataclass
class PrefixCacheInfo:
    """Prompt tokens that the engine had cached, and all prompt tokens, summed over a sample's requests."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0


@dataclasses.dataclass
class Sample:
    """One answer with its prompt. `tokens` are those of prompt and response; `prompt` is text or chat messages.

    `weight_versions` has one entry for each request that added tokens. `rollout_routed_experts` is [len(tokens) - 1,
    layers, top_k], or a list of such chunks while the sample grows. Attributes that are not fields are kept too."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_topk_token_ids: Any = None
    rollout_topk_log_probs: Any = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_top_p_log_probs: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = dataclasses.field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = dataclasses.field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        """All fields and further attributes; the status as its word, infos as dictionaries."""
        values = dict(vars(self))
        values["status"] = self.status.value
        values["spec_info"] = dataclasses.asdict(self.spec_info)
        values["prefix_cache_info"] = dataclasses.asdict(self.prefix_cache_info)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`; keys that are no fields become attributes. `BadInput` for an unknown status."""
        given = dict(values)
        word = given.pop("status", "pending")
        try:
            status = word if isinstance(word, Status) else Status(word)
        except ValueError as error:
            words = ", ".join(known.value for known in Status)
            raise BadInput(f"status {word!r} is none of {words}") from error
        sample = cls(
            status=status,
            spec_info=_info(SpecInfo, given.pop("spec_info", None)),
            prefix_cache_info=_info(PrefixCacheInfo, given.pop("prefix_cache_info", None)),
        )
        for name, value in given.items():
            setattr(sample, name, value)
        return sample

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its entry `args.reward_key` where that is set."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, dict) else self.reward

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def append_response_tokens(
        self,
        args: Any,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Add response tokens: those of a policy (`trainable`, with log-probs) or those of a tool (without).

        Log-probs of tool tokens are 0.0, their SC rows a uniform head over ids 0 to k - 1, their top-p spans empty.
        `meta_info` of an engine's answer gives the weight version and, with `update_terminal_info`, the status. Rows
        of captures for trainable tokens are the caller's to add. Raises `Misaligned` with the counts."""
        count, before = len(tokens), self.response_length
        if trainable and log_probs is None:
            raise Misaligned("trainable response tokens require rollout log probabilities.")
        if not trainable and log_probs is not None:
            raise Misaligned("tokens that are not trainable have no rollout log probabilities; leave them out")
        if log_probs is not None and len(log_probs) != count:
            raise Misaligned(f"{len(log_probs)} log probabilities for {count} response tokens")
        if before and self.rollout_log_probs is None:
            raise Misaligned(f"the {before} response tokens that are there have no rollout log probabilities")
        self.loss_mask = (self.loss_mask if self.loss_mask is not None else [1] * before) + [int(trainable)] * count
        self.rollout_log_probs = [*(self.rollout_log_probs or []), *(log_probs or [0.0] * count)]
        self.tokens = [*self.tokens, *tokens]
        self.response_length = before + count
        if not trainable:
            self._pad_captures(count)
        if text is not None:
            self.response += text
        if meta_info:
            self._take_meta_info(meta_info, count, update_terminal_info)
        for name in ("loss_mask", "rollout_log_probs"):
            length = len(getattr(self, name))
            if length != self.response_length:
                raise Misaligned(f"{name} covers {length} tokens, the response has {self.response_length}")

    def _pad_captures(self, count: int) -> None:
        """Rows of SC captures for tokens that no policy made."""
        if self.rollout_topk_token_ids is not None:
            k = len(self.rollout_topk_token_ids[0])
            rows: list[Any] = [list(range(k))] * count
            self.rollout_topk_token_ids = _with_rows(self.rollout_topk_token_ids, rows)
            rows = [[-math.log(k)] * k] * count
            self.rollout_topk_log_probs = _with_rows(self.rollout_topk_log_probs, rows)
        if self.rollout_top_p_token_offsets is not None:
            last = [int(self.rollout_top_p_token_offsets[-1])] * count
            self.rollout_top_p_token_offsets = _with_rows(self.rollout_top_p_token_offsets, last)

    def _take_meta_info(self, meta_info: dict[str, Any], count: int, terminal: bool) -> None:
        if count and meta_info.get("weight_version") is not None:
            self.weight_versions = [*self.weight_versions, str(meta_info["weight_version"])]
        reason = meta_info.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if terminal and kind in _FINISH:
            self.status = _FINISH[kind]


# slime's code reaches these through the class.
Sample.Status = Status  # type: ignore[attr-defined]
Sample.SpecInfo = SpecInfo  # type: ignore[attr-defined]
Sample.PrefixCacheInfo = PrefixCacheInfo  # type: ignore[attr-defined]

_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def _with_rows(rows: Any, more: list[Any]) -> Any:
    """`rows` (list, array or tensor) followed by `more`, of the same kind and dtype."""
    if isinstance(rows, list):
        return [*rows, *more]
    if hasattr(rows, "new_tensor"):
        import torch

        return torch.cat([rows, rows.new_tensor(more)])
    import numpy as np

    return np.concatenate([rows, np.asarray(more, dtype=rows.dtype)])


def _info(kind: Any, given: Any) -> Any:
    if isinstance(given, kind):
        return given
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in (given or {}).items() if name in names})


def sample_class() -> type[Any]:
    """slime's `Sample` where slime is importable, else ours."""
    try:
        module = import_module("slime.utils.types")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "slime":
            raise
        return Sample
    found: type[Any] = module.Sample
    return found
