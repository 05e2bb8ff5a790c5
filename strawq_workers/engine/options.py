"""What an embedded engine can be started with.

The rule: two engines with equal `seed`, sizes and weight version compute equal numbers, whatever else differs here.
"""

from __future__ import annotations

import msgspec

from strawq.errors import BadInput


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one engine process. Names follow SGLang's command line where SGLang has the option.

    tokens_per_second caps each request (not the engine), so that a demo can be killed in the middle of an answer.
    output_topk makes every answer to a request with `top_logprobs_num` carry the score-centering fields (see
    `answers`). health_timeout_s is how long `/health` waits on a paused engine before it answers 503.
    """

    host: str = "127.0.0.1"
    port: int = 0
    model_path: str = "strawq-engine"
    seed: int = 0
    weight_version: str = "default"
    max_running_requests: int = 64
    context_length: int = 4096
    tokens_per_second: float | None = None
    enable_return_routed_experts: bool = False
    incremental_streaming_output: bool = False
    skip_tokenizer_init: bool = False
    output_topk: bool = False
    num_experts: int = 8
    num_layers: int = 2
    experts_per_token: int = 2
    hidden_size: int = 32
    api_key: str | None = None
    health_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        positive = ("max_running_requests", "num_experts", "num_layers", "experts_per_token")
        for name in positive:
            if getattr(self, name) < 1:
                raise BadInput(f"engine option {name} is {getattr(self, name)}: give at least 1")
        if self.context_length < 16:
            raise BadInput(f"engine option context_length is {self.context_length}: give at least 16 tokens")
        if self.experts_per_token > self.num_experts:
            raise BadInput(
                f"engine option experts_per_token is {self.experts_per_token}, above num_experts = {self.num_experts}"
            )
        if self.tokens_per_second is not None and not self.tokens_per_second > 0:
            raise BadInput(
                f"engine option tokens_per_second is {self.tokens_per_second}: give more than 0, or leave it out"
            )
        if self.hidden_size < 8 or self.hidden_size % 8:
            raise BadInput(f"engine option hidden_size is {self.hidden_size}: give a multiple of 8")
        if not 0 <= self.port <= 65535:
            raise BadInput(f"engine option port is {self.port}: give 0 (any free port) to 65535")
