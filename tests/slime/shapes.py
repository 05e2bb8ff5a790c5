"""Two generations of slime's `Sample`, as their users know them: `Newer` has the fields of the straw era, `Older` has
not, and its status is an enumeration of the module."""

import dataclasses
from enum import Enum
from typing import Any


class OlderStatus(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclasses.dataclass
class Older:
    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: OlderStatus = OlderStatus.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None


@dataclasses.dataclass
class Newer:
    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclasses.dataclass
    class SpecInfo:
        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

    @dataclasses.dataclass
    class PrefixCacheInfo:
        cached_tokens: int = 0
        total_prompt_tokens: int = 0

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
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
    teacher_log_probs: Any = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = dataclasses.field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = dataclasses.field(default_factory=PrefixCacheInfo)


def answered(kind: Any, at: int, count: int = 4, **changes: Any) -> Any:
    """A sample of three prompt tokens with an answer."""
    status = kind().status.__class__
    usual: dict[str, Any] = {
        "group_index": 7,
        "index": at,
        "prompt": "one two three",
        "label": "four",
        "metadata": {"source": "s"},
        "tokens": [*range(10, 13), *range(100, 100 + count)],
        "response": "w" * count,
        "response_length": count,
        "reward": 0.5,
        "loss_mask": [1] * count,
        "weight_versions": ["3"] if count else [],
        "rollout_log_probs": [-0.5] * count,
        "status": status("completed"),
    }
    made = kind(**{**usual, **{name: value for name, value in changes.items() if name in kind.__dataclass_fields__}})
    for name, value in changes.items():
        setattr(made, name, value)
    return made
