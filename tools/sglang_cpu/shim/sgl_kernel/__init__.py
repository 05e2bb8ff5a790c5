"""Import-time stand-in for SGLang's compiled kernels on a machine without CUDA.

The rule: a name may be imported, and it must never be called. The published kernel wheel carries CUDA code only, while
SGLang's CPU mode imports a handful of CPU operators at start (speculative decoding would use them). Each of them raises
here, so that no number in a test can come from this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

IMPORTED_AT_START = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def _refuse(operator: str) -> Callable[..., NoReturn]:
    def call(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{operator} is a declaration only: this SGLang runs without compiled kernels")

    return call


globals().update({operator: _refuse(operator) for operator in IMPORTED_AT_START})
