"""Samples as the user's functions see them, under slime's names, and what of their changes is kept.

The rule: a view is a copy, and what comes back from it is checked before it counts. A hook may change the reward, the
loss mask, `remove_sample`, the metadata, the response text and a final status; it may not change tokens or log-probs,
and a mask of another length than the response is refused with both lengths. Metadata that is the prompt's own is not
copied into the sample.

Whatever the user's code left behind is read inside `taking`: it may be anything, and what reading it raises fails the
attempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np

from strawq.errors import BadInput, Misaligned, StrawqError
from strawq.json_values import json_text
from strawq.samples import Group, Prompt, Sample, UInt8
from strawq_workers.stale_groups import STALE_DROPS
from strawq_workers.worker.generation import MIXED_SAMPLING

REMOVED = "remove_sample"
"""Key of `Sample.metadata`: a hook has taken the sample out of training; its loss mask is 0."""
UNREAD = "strawq_unread_tokens"
"""Key of `Sample.metadata`: ids that a generate function has appended and no engine has read yet (see `turns`)."""
TURN = "strawq_turn"
"""Key of `Sample.metadata`: where the last turn of a generate function starts, and how it ended."""

OWN = (REMOVED, UNREAD, TURN, STALE_DROPS, MIXED_SAMPLING)
"""Keys of `Sample.metadata` that are the worker's: what the user's code does to them is not kept."""

_SLIME = b"strawq.slime"


class HookFailed(StrawqError):
    """A hook raised, or answered what it may not. The attempt fails with this message."""

    kind = "hook_failed"
    exit_code = 2  # it is the user's code that is to be mended, and no fault of strawq


class Status(str, enum.Enum):
    """slime's states of a sample. Equal to their words, and to slime's own enumeration."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    def __eq__(self, other: object) -> bool:
        return self.value == getattr(other, "value", other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(eq=False)
class HookSample:
    """A sample as hooks see it. `tokens` are those of prompt and response; `response` is "" where nobody can decode
    them; `loss_mask` and `rollout_log_probs` have one entry for each response token."""

    Status: ClassVar[type[Status]] = Status

    index: int = 0
    group_index: str = ""
    prompt: Any = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    status: Any = Status.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    remove_sample: bool = False
    rollout_id: int | None = None
    rollout_routed_experts: Any = None
    multimodal_inputs: Any = None
    train_metadata: Any = None
    session_id: str | None = None
    turns: Any = dataclasses.field(default=None, repr=False)
    """The run of a generate function that the sample belongs to; None elsewhere."""

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or what `args.reward_key` names in it."""
        key = getattr(args, "reward_key", None)
        if not key:
            return self.reward
        if not isinstance(self.reward, Mapping) or key not in self.reward:
            raise BadInput(f"the reward of sample {self.index} is {repr(self.reward)[:100]}: it has no {key!r}")
        return self.reward[key]

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any,
        *,
        tokens: Any,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Add tokens to the response of a generate function's sample, with everything that must cover them.

        `trainable`: a policy made them, and `log_probs` (one each) must be given if the worker records them;
        `meta_info` is the engine's, of which `weight_version`, `finish_reason` and `routed_experts` are used. Not
        trainable (tool output): loss mask 0, log-prob 0.0, no policy. Raises `Misaligned` with the counts, `HookFailed`
        for what cannot be taken, `BadInput` outside of a generate function."""
        if self.turns is None:
            raise BadInput("only a generate function may append tokens to a sample")
        self.turns.append(
            self,
            tokens,
            log_probs,
            trainable=trainable,
            meta_info=meta_info or {},
            text=text,
            terminal=update_terminal_info,
        )


@contextlib.contextmanager
def taking(name: str, answer: Any) -> Iterator[None]:
    """The boundary to the user's code: what stands inside reads what `name` has answered or left in its sample. All
    that it raises becomes `HookFailed` with the answer, but for `Misaligned`, which says more, and what is not the
    answer's fault (storage, a stop)."""
    try:
        yield
    except (HookFailed, Misaligned):
        raise
    except BadInput as error:
        raise HookFailed(str(error) if str(error).startswith(name) else f"{name}: {error}") from error
    except StrawqError:
        raise
    except BaseException as error:  # properties and methods of the answer are others' code, and may raise anything
        raise HookFailed(
            f"{name} answered {shown(answer)}, which cannot be taken: {type(error).__name__}: {shown(error, str, 300)}"
        ) from error


def word(status: Any) -> str:
    """A status as its word, of whichever enumeration it is."""
    return str(getattr(status, "value", status))


def hook_view(group: Group, sample: Sample) -> HookSample:
    """A view of the sample; its text as far as it is known."""
    prompt = group.prompt
    ids = sample.prompt_tokens if sample.prompt_tokens is not None else prompt.tokens
    said: Any = prompt.text if prompt.text is not None else prompt.messages
    fields, submitted = _given(prompt, sample)
    own = {name: value for name, value in sample.metadata.items() if name not in (REMOVED, UNREAD, TURN)}
    view = HookSample(
        index=sample.index,
        group_index=prompt.group_id or group.task_id,
        prompt=said if said is not None else "",
        tokens=([] if ids is None else ids.tolist()) + sample.tokens.tolist(),
        response=sample.text or "",
        response_length=len(sample.tokens),
        label=prompt.label,
        reward=sample.reward,
        status=Status(sample.status),
        metadata={**submitted, **own},
        loss_mask=sample.loss_mask.tolist(),
        rollout_log_probs=None if sample.logprobs is None else sample.logprobs.tolist(),
        weight_versions=[span.version for span in sample.versions if span.version],
        remove_sample=bool(sample.metadata.get(REMOVED)),
    )
    for name, value in fields.items():
        setattr(view, name, value)
    return view


def _given(prompt: Prompt, sample: Sample) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields that a slime user gave with the sample, and the metadata that are not its own columns'."""
    if prompt.payload is None or not prompt.payload.startswith(_SLIME):
        return {}, dict(prompt.metadata)
    from strawq_workers.slime.given import given  # on demand: only those who use slime's samples need it

    return given(prompt, sample)


def changed_by_hook(prompt: Prompt, sample: Sample, view: HookSample, before: HookSample, name: str) -> Sample:
    """The sample with what a hook may change. `before` is the view as the hook got it. Raises `HookFailed`, or
    `Misaligned` for a loss mask of another length."""
    what = f"{name} changed sample {sample.index}"
    if list(view.tokens) != before.tokens or view.response_length != len(sample.tokens):
        raise HookFailed(
            f"{what}: {len(before.tokens)} tokens with a response of {len(sample.tokens)} before, "
            f"{len(view.tokens)} and {view.response_length} now; only a generate function makes tokens"
        )
    if _differs(view.rollout_log_probs, before.rollout_log_probs):
        raise HookFailed(f"{what}: its log-probs are the policy's, and stay as they are")
    status = word(view.status)
    if status != sample.status and status not in ("completed", "truncated", "failed"):
        raise HookFailed(f"{what}: status {status!r} is not one that a finished sample can have")
    sample = with_metadata(prompt, sample, view)
    sample = with_mask(sample, view, what)
    text = response_text(view, name) if view.response != before.response else sample.text
    reward = reward_value(view.reward, sample.index, name)
    return msgspec.structs.replace(sample, text=text, status=status, reward=reward)


def with_mask(sample: Sample, view: HookSample, what: str) -> Sample:
    """The sample with the view's loss mask, all 0 where the view takes it out of training."""
    count = len(sample.tokens)
    mask = sample.loss_mask if view.loss_mask is None else mask_of(view.loss_mask, count, what)
    metadata = {name: value for name, value in sample.metadata.items() if name != REMOVED}
    if view.remove_sample:
        mask, metadata = np.zeros(count, np.uint8), {**metadata, REMOVED: True}
    return msgspec.structs.replace(sample, loss_mask=mask, metadata=metadata)


def mask_of(given: Any, count: int, what: str) -> UInt8:
    """A loss mask as it is stored, uint8 [count]. `Misaligned` if it has another length, `HookFailed` for anything else
    than 0 and 1."""
    if len(given) != count:
        raise Misaligned(f"{what}: its loss mask has {len(given)} entries, the response {count} tokens")
    mask = np.asarray(given)
    if mask.ndim != 1 or (count and (mask.dtype.kind not in "iubf" or not np.isin(mask, (0, 1)).all())):
        raise HookFailed(f"{what}: its loss mask holds something else than 0 and 1 ({shown(given)})")
    return mask.astype(np.uint8)


def response_text(view: HookSample, name: str) -> str | None:
    """The view's response as it is stored; None: nobody knows it. `HookFailed` if it is no text."""
    text: Any = view.response
    if text is not None and not isinstance(text, str):
        raise HookFailed(f"{name} left {shown(text)} as the response of sample {view.index}: it must be text")
    return text


def with_metadata(prompt: Prompt, sample: Sample, view: HookSample) -> Sample:
    """The sample with the view's metadata, less what is the prompt's own; what is the worker's own (`OWN`) stays as it
    was. `HookFailed` if it is not JSON."""
    if not isinstance(view.metadata, Mapping):
        raise HookFailed(f"the metadata of sample {sample.index} are {shown(view.metadata)} now: leave them a dict")
    kept = {name: sample.metadata[name] for name in OWN if name in sample.metadata}
    _, own = _given(prompt, sample)
    theirs = {name: value for name, value in view.metadata.items() if name not in OWN}
    added = {name: value for name, value in theirs.items() if name not in own or not _same(own[name], value)}
    _require_json(added, f"metadata of sample {sample.index}")
    return msgspec.structs.replace(sample, metadata={**added, **kept})


def reward_value(given: Any, index: int, name: str = "reward hook") -> float | dict[str, Any] | None:
    """A hook's reward as it is stored. `HookFailed` if it is neither a number nor a JSON dict."""
    if given is None:
        return None
    answer = given
    if hasattr(given, "item") and not isinstance(given, dict) and getattr(given, "shape", ()) in ((), (1,)):
        given = given.item()  # a NumPy or torch scalar
    if not isinstance(given, (bool, int, float, dict)):
        raise HookFailed(f"{name} answered {shown(answer)} for sample {index}: return a number or dict")
    if isinstance(given, dict):
        _require_json(given, f"reward of sample {index}")
        return given
    try:
        reward = float(given)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise HookFailed(f"{name} answered {shown(given)} for sample {index}, which cannot be trained on")
    return reward


def shown(value: Any, show: Callable[[Any], str] = repr, characters: int = 100) -> str:
    """The beginning of a value in words, for a message that is stored. What a user's object raises when it is shown is
    not worth another failure."""
    try:
        text = show(value)[:characters]
    except BaseException as error:  # noqa: BLE001 (others' code)
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text.encode("utf-8", "backslashreplace").decode()


def _require_json(value: Any, what: str) -> None:
    try:
        json_text(value, what)
    except BadInput as error:
        raise HookFailed(str(error)) from error


def _same(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except (ValueError, RuntimeError):  # arrays and tensors say that their comparison is ambiguous
        return np.array_equal(np.asarray(first), np.asarray(second))


def _differs(now: Any, before: list[float] | None) -> bool:
    if now is None or before is None:
        return (now is None) != (before is None)
    return len(now) != len(before) or list(now) != before
