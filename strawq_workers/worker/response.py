"""The response of a generate function's sample: what its turns brought and what it appends itself, aligned.

The rule: the sample that the worker holds can be saved at every moment. What the function adds is checked, with
everything that must cover it, before it counts. Tokens that no engine has read yet have no R3 rows: with R3 they wait
in the sample's metadata (`UNREAD`) until the next turn brings their rows.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from strawq.alignment import check_sample
from strawq.errors import BadInput, Misaligned
from strawq.model import VersionSpan
from strawq.samples import NO_POLICY, Int32, Sample, SegmentInfo, extend
from strawq_workers.worker.generation import no_policy
from strawq_workers.worker.views import TURN, UNREAD, HookFailed, HookSample, Status, with_mask, with_metadata

if TYPE_CHECKING:
    from strawq_workers.worker.group import GroupRun

FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Status that follows from how an answer ended."""
_NAME = "generate function"


class Response:
    """The sample that the worker holds, and the view of it that the function has."""

    def __init__(self, run: GroupRun, index: int, view: HookSample) -> None:
        self.run = run
        self.index = index
        self.view = view

    @property
    def sample(self) -> Sample:
        return self.run.samples[self.index]

    @property
    def prompt(self) -> Int32:
        return self.run.prompt if self.sample.prompt_tokens is None else self.sample.prompt_tokens

    @property
    def unread(self) -> Int32:
        return np.asarray(self.sample.metadata.get(UNREAD, ()), np.int32)

    @property
    def length(self) -> int:
        """Response tokens, those that no engine has read included."""
        return len(self.sample.tokens) + len(self.unread)

    def put(self, sample: Sample, **notes: Any) -> None:
        """Keeps the sample with these notes in its metadata; None removes one."""
        metadata = {**sample.metadata, **notes}
        metadata = {name: value for name, value in metadata.items() if value is not None}
        self.run.put(msgspec.structs.replace(sample, metadata=metadata))

    def last_turn(self) -> tuple[int, str] | None:
        """Start and end of the turn that the sample's last tokens are of, if nothing has followed it."""
        noted = self.sample.metadata.get(TURN)
        if not noted or len(self.unread) or noted[1] != len(self.sample.tokens):
            return None
        return int(noted[0]), str(noted[2])

    def show(self) -> None:
        """Brings the view's tokens and what covers them up to date."""
        sample, view, unread = self.sample, self.view, self.unread.tolist()
        view.tokens = self.prompt.tolist() + sample.tokens.tolist() + unread
        view.response_length = self.length
        view.loss_mask = sample.loss_mask.tolist() + [0] * len(unread)
        if self.run.place.options.logprobs:
            known = [] if sample.logprobs is None else sample.logprobs.tolist()
            view.rollout_log_probs = known + [0.0] * len(unread)
        view.weight_versions = [span.version for span in sample.versions if span.version]

    # -- what the function changes in the view ------------------------------------------------------------------

    def absorb(self) -> None:
        """Takes over what the function has changed in the view: tokens after those that were there, masks, metadata.
        Raises `HookFailed` or `Misaligned`, with the sample as it was."""
        view = self.view
        ids = list(view.tokens)
        self._absorb_prompt(ids)
        there = self.prompt.tolist() + self.sample.tokens.tolist() + self.unread.tolist()
        if ids[: len(there)] != there:
            at = next((at for at, (a, b) in enumerate(zip(ids, there, strict=False)) if a != b), len(ids))
            raise HookFailed(f"{_NAME} changed token {at} of sample {self.index}: tokens are only added")
        count = len(ids) - len(self.prompt)
        if view.response_length != count:
            raise Misaligned(
                f"{_NAME}: sample {self.index} says {view.response_length} response tokens, and has {count} after "
                f"its prompt of {len(self.prompt)}"
            )
        mask = view.loss_mask
        for what, given in (("loss mask", mask), ("log-probs", view.rollout_log_probs)):
            if given is not None and len(given) != count:
                raise Misaligned(
                    f"{_NAME}: sample {self.index} has {count} response tokens, its {what} {len(given)} entries"
                )
        if len(ids) > len(there):
            self._absorb_tail(ids[len(there) :], mask)
        shown = HookSample(
            loss_mask=None if mask is None else list(mask[: len(self.sample.tokens)]), remove_sample=view.remove_sample
        )
        before = with_mask(self.sample, shown, _NAME)
        after = with_metadata(self.run.group.prompt, before, view)
        last = self.last_turn()
        noted = last is not None and last[1] != "abort" and after.metadata != before.metadata
        self.put(after, **({TURN: None} if noted else {}))  # what the function has taken note of is not given again

    def _absorb_prompt(self, ids: list[int]) -> None:
        """A function may put other ids in front as long as there is no response: its own chat template, tools."""
        if self.length or ids[: len(self.prompt)] == self.prompt.tolist():
            return
        start = len(ids) - self.view.response_length
        if start < 1:
            raise HookFailed(
                f"{_NAME}: of the {len(ids)} tokens of sample {self.index} {self.view.response_length} are response: "
                "no prompt is left"
            )
        self.run.put(msgspec.structs.replace(self.sample, prompt_tokens=np.asarray(ids[:start], np.int32)))

    def _absorb_tail(self, tail: list[int], mask: list[int] | None) -> None:
        """Tokens that the function has put behind the others itself, after requests of its own."""
        view, count = self.view, len(tail)
        flags = [1] * count if mask is None else list(mask[-count:])
        if not any(flags):
            self.add_no_policy(tail)
            return
        logprobs = None if view.rollout_log_probs is None else view.rollout_log_probs[-count:]
        seen = [span.version for span in self.sample.versions if span.version]
        self.add(tail, logprobs, flags, list(view.weight_versions)[len(seen) :], view.rollout_routed_experts)

    # -- adding -------------------------------------------------------------------------------------------------

    def append(self, tokens: Any, log_probs: Any, *, trainable: bool, meta_info: Mapping[str, Any]) -> None:
        """See `HookSample.append_response_tokens`."""
        self.absorb()
        ids = np.asarray(tokens, np.int32).reshape(-1).tolist()
        if trainable:
            version = meta_info.get("weight_version")
            self.add(ids, log_probs, [1] * len(ids), [version] if version else [], _routes(meta_info))
        elif log_probs is not None:
            raise BadInput("tokens that are not trainable have no log-probs: leave log_probs out")
        else:
            self.add_no_policy(ids)
        self.show()

    def add_no_policy(self, ids: list[int]) -> None:
        """With R3 they wait for the turn that reads them; without, they are the sample's at once."""
        if not ids:
            return
        if self.run.place.options.routed_experts:
            self.put(self.sample, **{UNREAD: self.unread.tolist() + ids})
            return
        more = no_policy(self.index, np.asarray(ids, np.int32), self.run.place.plan)
        self.put(_open(extend(self.sample, more)))

    def add(self, ids: list[int], log_probs: Any, flags: list[int], versions: list[str], routes: Any) -> None:
        """Tokens of a policy, from a request of the function's own."""
        place, sample, count = self.run.place, self.sample, len(ids)
        what = f"generate function: sample {self.index}: {count} tokens"
        if not count:
            return
        if place.options.logprobs and log_probs is None:
            raise BadInput(f"{what} came without log-probs: give log_probs, or run the worker without logprobs")
        if log_probs is not None and len(log_probs) != count:
            raise Misaligned(f"{what} came with {len(log_probs)} log-probs")
        if place.options.top_logprobs:
            raise Misaligned(f"{what} came without SC rows: ask through strawq_workers.agents.generate")
        unread = self.unread
        first, last = (versions[0], versions[-1]) if versions else (NO_POLICY, NO_POLICY)
        span = VersionSpan(0, count, first, "" if first == last else last)
        more = Sample(
            index=self.index,
            tokens=np.asarray(ids, np.int32),
            logprobs=np.asarray(log_probs, np.float32) if place.options.logprobs else None,
            loss_mask=np.asarray(flags, np.uint8),
            versions=(span,),
            segments=(SegmentInfo(0, count, place.plan.record, place.options.logprob_mode),),
        )
        if len(unread):
            more = extend(no_policy(self.index, unread, place.plan), more)
        if place.options.routed_experts:
            more = msgspec.structs.replace(more, r3=self._new_routes(routes, len(more.tokens), what))
        joined = _open(extend(sample, more))
        check_sample(joined, len(self.prompt), since=len(sample.tokens))
        place.counters.tokens_generated += count
        self.put(joined, **{UNREAD: None})

    def _new_routes(self, given: Any, added: int, what: str) -> Int32:
        """The R3 rows that are missing, out of all rows of the sample or of the new ones alone."""
        if given is None:
            raise Misaligned(f"{what} came without R3 rows: ask through strawq_workers.agents.generate")
        shape = self.run.place.fleet.shape
        have = 0 if self.sample.r3 is None else len(self.sample.r3)
        due = len(self.prompt) + len(self.sample.tokens) + added - 1 - have
        rows = np.asarray(given, np.int32).reshape(-1, shape.layers, shape.topk)
        if len(rows) not in (due, due + have):
            raise Misaligned(f"{what} came with {len(rows)} R3 rows, {due} are due after the {have} that are there")
        return rows[len(rows) - due :]


def _open(sample: Sample) -> Sample:
    return msgspec.structs.replace(sample, status="aborted", finish_reason="")


def _routes(meta_info: Mapping[str, Any]) -> Any:
    given = meta_info.get("routed_experts")
    if not isinstance(given, (str, bytes)):
        return given
    try:
        return np.frombuffer(base64.b64decode(given, validate=True), "<i4")
    except (binascii.Error, ValueError) as error:
        raise Misaligned(f"routed_experts of an answer cannot be decoded: {error}") from error
