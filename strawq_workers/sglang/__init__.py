"""The engine client for SGLang's HTTP API.

`Fleet` is the face for workers: one engine, several, or a router. `EngineClient` is one engine. `GenerateRequest` and
`Sampling` go in, a `Segment` comes out, aligned or refused. `wire`, `stream`, `versions`, `segment` and `refusal` are
pure; `transport`, `client` and `fleet` talk to the network.
"""

from strawq_workers.sglang.client import EngineClient, PauseMode
from strawq_workers.sglang.fleet import Fleet
from strawq_workers.sglang.flight import StopSignal
from strawq_workers.sglang.options import EngineOptions
from strawq_workers.sglang.segment import FinishReason, Segment
from strawq_workers.sglang.wire import GenerateRequest, ModelShape, Sampling

__all__ = [
    "EngineClient",
    "EngineOptions",
    "FinishReason",
    "Fleet",
    "GenerateRequest",
    "ModelShape",
    "PauseMode",
    "Sampling",
    "Segment",
    "StopSignal",
]
