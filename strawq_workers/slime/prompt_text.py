"""Chat templates and the longest prompt, where a tokenizer is at hand.

The rule: chat messages stay messages unless `--apply-chat-template` says otherwise, and a prompt is only judged by its
length in tokens, never by a guess from its characters. The tokenizer is that of `--hf-checkpoint`; transformers is
imported when it is needed, and its absence is said by name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import msgspec

from strawq.errors import BadInput


class ChatTemplate:
    """What `apply_chat_template`, `apply_chat_template_kwargs`, `rollout_max_prompt_len` and `hf_checkpoint` say."""

    def __init__(self, args: Any) -> None:
        self.applies = bool(getattr(args, "apply_chat_template", False))
        given = getattr(args, "apply_chat_template_kwargs", None) or {}
        self.options: dict[str, Any] = msgspec.json.decode(given) if isinstance(given, str) else dict(given)
        self.max_tokens: int | None = getattr(args, "rollout_max_prompt_len", None)
        self.checkpoint: str | None = getattr(args, "hf_checkpoint", None)
        self._tokenizer: Any = None

    def identity(self) -> dict[str, Any]:
        return {
            "apply_chat_template": self.applies,
            "apply_chat_template_kwargs": self.options,
            "rollout_max_prompt_len": self.max_tokens,
        }

    def apply(self, prompt: Any, tools: Any, place: str) -> Any:
        """The prompt as text where the template is to be applied, else as it is. Raises `BadInput`."""
        if not self.applies:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return self.tokenizer().apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **self.options
            )
        except (TypeError, ValueError, KeyError) as error:
            raise BadInput(f"{place}: the chat template of {self.checkpoint} refuses it: {error}") from error

    def keeps(self, sample: Any) -> bool:
        """Whether the prompt is no longer than `rollout_max_prompt_len` tokens."""
        if self.max_tokens is None:
            return True
        if sample.tokens:
            return len(sample.tokens) <= self.max_tokens
        if isinstance(sample.prompt, str):
            ids = self.tokenizer()(sample.prompt, add_special_tokens=False)["input_ids"]
        else:
            tools = sample.metadata.get("tools")
            ids = self.tokenizer().apply_chat_template(
                sample.prompt, tools=tools, tokenize=True, add_generation_prompt=True, **self.options
            )
        return len(ids) <= self.max_tokens

    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded once. `BadInput` if there is none."""
        if self._tokenizer is None:
            what = "--apply-chat-template" if self.applies else "--rollout-max-prompt-len with prompts of text"
            if not self.checkpoint:
                raise BadInput(f"{what} needs a tokenizer: name the model with --hf-checkpoint")
            try:
                module = import_module("transformers")
            except ImportError as error:
                raise BadInput(f"{what} needs the package transformers: pip install transformers") from error
            self._tokenizer = module.AutoTokenizer.from_pretrained(self.checkpoint)
        return self._tokenizer
