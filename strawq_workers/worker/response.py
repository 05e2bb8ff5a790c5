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
from strawq.rows import whole_numbers
from strawq.samples import NO_POLICY, Int32, Sample, SegmentInfo, UInt8, extend
from strawq_workers.worker.generation import no_policy
from strawq_workers.worker.views import (
    TURN,
    UNREAD,
    HookFailed,
    HookSample,
    Status,
    mask_of,
    shown,
    taking,
    with_mask,
    with_metadata,
)

if TYPE_CHECKING:
    from strawq_workers.worker.group import GroupRun

FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Status that follows from how an answer ended."""
NAME = "generate function"
"""What its user's code is called in messages."""


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
        before = self.sample
        try:
            with taking(NAME, self.view):
                self._absorb()
        except BaseException:
            if self.sample is not before:
                self.run.put(before)
            raise

    def _absorb(self) -> None:
        view = self.view
        ids = whole_numbers(view.tokens, np.int32, f"tokens of sample {self.index}", least=0)
        self._absorb_prompt(ids)
        there = np.concatenate([self.prompt, self.sample.tokens, self.unread])
        if not np.array_equal(ids[: len(there)], there):
            at = next((at for at, (a, b) in enumerate(zip(ids, there, strict=False)) if a != b), len(ids))
            raise HookFailed(f"{NAME} changed token {at} of sample {self.index}: tokens are only added")
        count = len(ids) - len(self.prompt)
        if view.response_length != count:
            raise Misaligned(
                f"{NAME}: sample {self.index} says {view.response_length} response tokens, and has {count} after "
                f"its prompt of {len(self.prompt)}"
            )
        mask = view.loss_mask
        for what, given in (("loss mask", mask), ("log-probs", view.rollout_log_probs)):
            if given is not None and len(given) != count:
                raise Misaligned(
                    f"{NAME}: sample {self.index} has {count} response tokens, its {what} {len(given)} entries"
                )
        flags = None if mask is None else mask_of(mask, count, f"{NAME}: sample {self.index}")
        if len(ids) > len(there):
            self._absorb_tail(self._in_vocabulary(ids[len(there) :]), flags)
        masked = HookSample(
            loss_mask=None if flags is None else flags[: len(self.sample.tokens)].tolist(),
            remove_sample=view.remove_sample,
        )
        before = with_mask(self.sample, masked, NAME)
        after = with_metadata(self.run.group.prompt, before, view)
        last = self.last_turn()
        noted = last is not None and last[1] != "abort" and after.metadata != before.metadata
        self.put(after, **({TURN: None} if noted else {}))  # what the function has taken note of is not given again

    def _in_vocabulary(self, ids: Int32) -> Int32:
        """The ids, if the engines have them all: one that they have not would be refused with the next request, or be
        trained on without one."""
        size, what = self.run.place.fleet.shape.vocab_size, f"{NAME}: sample {self.index}"
        beyond = ids[ids >= size]
        if len(beyond):
            raise HookFailed(f"{what}: token id {int(beyond[0])} is outside the vocabulary of {size} tokens")
        return ids

    def _absorb_prompt(self, ids: Int32) -> None:
        """A function may put other ids in front as long as there is no response: its own chat template, tools."""
        if self.length or np.array_equal(ids[: len(self.prompt)], self.prompt):
            return
        start = len(ids) - self.view.response_length
        if start < 1:
            raise HookFailed(
                f"{NAME}: of the {len(ids)} tokens of sample {self.index} {self.view.response_length} are response: "
                "no prompt is left"
            )
        self.run.put(msgspec.structs.replace(self.sample, prompt_tokens=self._in_vocabulary(ids[:start])))

    def _absorb_tail(self, tail: Int32, mask: UInt8 | None) -> None:
        """Tokens that the function has put behind the others itself, after requests of its own."""
        view, count = self.view, len(tail)
        flags = np.ones(count, np.uint8) if mask is None else mask[-count:]
        if not flags.any():
            self.add_no_policy(tail)
            return
        logprobs = None if view.rollout_log_probs is None else view.rollout_log_probs[-count:]
        seen = [span.version for span in self.sample.versions if span.version]
        self.add(tail, logprobs, flags, _versions(view.weight_versions)[len(seen) :], view.rollout_routed_experts)

    # -- adding -------------------------------------------------------------------------------------------------

    def append(self, tokens: Any, log_probs: Any, *, trainable: bool, meta_info: Mapping[str, Any]) -> None:
        """See `HookSample.append_response_tokens`."""
        self.absorb()
        ids = whole_numbers(tokens, np.int32, f"tokens added to sample {self.index}", least=0).reshape(-1)
        ids = self._in_vocabulary(ids)
        if trainable:
            version = meta_info.get("weight_version")
            self.add(ids, log_probs, np.ones_like(ids, np.uint8), [str(version)] if version else [], _routes(meta_info))
        elif log_probs is not None:
            raise BadInput("tokens that are not trainable have no log-probs: leave log_probs out")
        else:
            self.add_no_policy(ids)
        self.show()

    def add_no_policy(self, ids: Int32) -> None:
        """With R3 they wait for the turn that reads them; without, they are the sample's at once."""
        if not len(ids):
            return
        if self.run.place.options.routed_experts:
            self.put(self.sample, **{UNREAD: self.unread.tolist() + ids.tolist()})
            return
        more = no_policy(self.index, ids, self.run.place.plan)
        self.put(_open(extend(self.sample, more)))

    def add(self, ids: Int32, log_probs: Any, flags: UInt8, versions: list[str], routes: Any) -> None:
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
            tokens=ids,
            logprobs=log_probs if place.options.logprobs else None,
            loss_mask=flags,
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
        rows = whole_numbers(given, np.int32, f"{what}: R3 rows").reshape(-1, shape.layers, shape.topk)
        if len(rows) not in (due, due + have):
            raise Misaligned(f"{what} came with {len(rows)} R3 rows, {due} are due after the {have} that are there")
        return rows[len(rows) - due :]


def _open(sample: Sample) -> Sample:
    return msgspec.structs.replace(sample, status="aborted", finish_reason="")


def _versions(given: Any) -> list[str]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(version, (str, int)) for version in given):
        raise HookFailed(f"{NAME} left {shown(given)} as weight_versions: list the versions as text")
    return [str(version) for version in given]


def _routes(meta_info: Mapping[str, Any]) -> Any:
    given = meta_info.get("routed_experts")
    if not isinstance(given, (str, bytes)):
        return given
    try:
        return np.frombuffer(base64.b64decode(given, validate=True), "<i4")
    except (binascii.Error, ValueError) as error:
        raise Misaligned(f"routed_experts of an answer cannot be decoded: {error}") from error
