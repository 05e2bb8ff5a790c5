"""The ways in which the engine says no, divided by the shape of the answer.

The rule: SGLang has five error shapes, and a client must be able to meet each of them here. 404, 405 and 401 are made
where the request is routed (`server`); the other three are these exceptions.
"""

from __future__ import annotations

from typing import Any


class EngineRefusal(Exception):
    """Base. `body` is the JSON of the answer, always with status 400."""

    def body(self) -> dict[str, Any]:
        raise NotImplementedError


class Refused(EngineRefusal):
    """Most validation: `{"error": {"message": ...}}`; on a stream, one SSE frame under status 200."""

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self)}}


class UnknownSamplingField(EngineRefusal):
    """An unknown or mistyped sampling parameter: `{"error": "..."}`."""

    def body(self) -> dict[str, Any]:
        return {"error": str(self)}


class BadBody(EngineRefusal):
    """Not JSON, or a field of the wrong type: `{"object": "error", ...}`."""

    def body(self) -> dict[str, Any]:
        message = f"1 validation error:\n  {self}"
        return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
