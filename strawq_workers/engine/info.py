"""What the engine says about itself: `/model_info`, `/server_info`, `/v1/loads`, `/v1/models`.

The rule: SGLang's keys with true values. Keys of SGLang that describe hardware or features that are not here are left
out, and the keys that SGLang lacks (`stand_in`, sizes of the model) are added beside them.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from strawq_workers.engine.generate import RESERVED_TOKENS
from strawq_workers.engine.options import EngineOptions
from strawq_workers.engine.scheduler import Loads
from strawq_workers.engine.vocabulary import EOS_ID, VOCAB_SIZE

# The SGLang release whose protocol this is, marked as not being it.
VERSION = "0.5.23+strawq.standin"


def model_info(options: EngineOptions, version: str) -> dict[str, Any]:
    return {
        "model_path": options.model_path,
        "served_model_name": options.model_path,
        "tokenizer_path": options.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "strawq_standin_moe",
        "architectures": ["StrawqStandInMoeForCausalLM"],
        "stand_in": True,
    }


def server_info(options: EngineOptions, version: str, loads: Loads) -> dict[str, Any]:
    return {
        "model_path": options.model_path,
        "tokenizer_path": options.model_path,
        "skip_tokenizer_init": options.skip_tokenizer_init,
        "context_length": options.context_length,
        "max_running_requests": options.max_running_requests,
        "host": options.host,
        "port": options.port,
        "random_seed": options.seed,
        "weight_version": version,
        "enable_return_routed_experts": options.enable_return_routed_experts,
        "incremental_streaming_output": options.incremental_streaming_output,
        "tp_size": 1,
        "dp_size": 1,
        "status": "ready",
        "max_req_input_len": options.context_length - RESERVED_TOKENS,
        "internal_states": [{"effective_max_running_requests_per_dp": options.max_running_requests}],
        "version": VERSION,
        "stand_in": True,
        "num_hidden_layers": options.num_layers,
        "num_experts": options.num_experts,
        "num_experts_per_tok": options.experts_per_token,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS_ID,
        "tokens_per_second": options.tokens_per_second,
        "generated_tokens": loads.generated_tokens,
    }


def loads_answer(options: EngineOptions, loads: Loads) -> dict[str, Any]:
    """`/v1/loads`. Held requests (paused engine, pending weight update) are not counted as waiting, as in SGLang."""
    return {
        "timestamp": datetime.now(timezone.utc).isoformat(),
        "version": VERSION,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [
            {
                "timestamp": time.time(),
                "dp_rank": 0,
                "num_running_reqs": loads.running,
                "num_waiting_reqs": loads.waiting,
                "num_used_tokens": loads.used_tokens,
                "num_total_tokens": loads.used_tokens,
                "num_active_tokens": loads.used_tokens,
                "max_total_num_tokens": options.max_running_requests * options.context_length,
                "max_running_requests": options.max_running_requests,
                "token_usage": loads.used_tokens / (options.max_running_requests * options.context_length),
                "disaggregation": {
                    "mode": "null",
                    "prefill_bootstrap_queue_reqs": 0,
                    "prefill_inflight_queue_reqs": 0,
                    "decode_prealloc_queue_reqs": 0,
                    "decode_transfer_queue_reqs": 0,
                    "decode_retracted_queue_reqs": 0,
                },
                # SGLang's `paused` stays 0 while the engine is paused; the last two are ours.
                "queues": {
                    "waiting": loads.waiting,
                    "grammar": 0,
                    "paused": 0,
                    "retracted": 0,
                    "prealloc_ready": 0,
                    "held": loads.held,
                    "weight_updates": loads.weight_updates,
                },
            }
        ],
    }


def models_answer(options: EngineOptions) -> dict[str, Any]:
    entry = {
        "id": options.model_path,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "strawq",
        "root": options.model_path,
        "parent": None,
        "max_model_len": options.context_length,
    }
    return {"object": "list", "data": [entry]}
