"""Asking a pool until the answer is known.

The rule: a call whose reply was lost is made again with the same request id, so it happens once, whatever the mount
does in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from strawq.errors import BadInput, OutcomeUnknown
from strawq.model import policy_number
from strawq.pool import Pool

T = TypeVar("T")
AGAIN_SECONDS = (0.05, 0.5, 2.0, 5.0)


def sure(pool: Pool, call: Callable[[str], T]) -> T:
    """`call` with a request id, again with the same one while nobody knows whether it happened. `OutcomeUnknown` in
    the end."""
    request = pool.new_request()
    for seconds in AGAIN_SECONDS:
        try:
            return call(request)
        except OutcomeUnknown:
            pool.clock.sleep(seconds)
    return call(request)


def publish_if_newer(pool: Pool, version: str, branch: str) -> None:
    """Publish a version with a number on that branch, unless one as high is published, also by somebody who is faster.
    Another word than a number says nothing here."""
    number = policy_number(version)
    if number <= pool.highest_version():
        return
    try:
        sure(pool, lambda request: pool.publish_version(version, branch=branch, request_id=request))
    except BadInput:
        if number > pool.highest_version():
            raise
