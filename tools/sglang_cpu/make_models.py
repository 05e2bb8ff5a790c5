"""Writes two tiny models with random weights for tests: `tiny-qwen2` (dense) and `tiny-qwen3-moe` (8 experts, top 2).

    python make_models.py OUT

The rule: the same seed gives the same weights, and the shapes are the ones the tests name (2 layers, vocabulary 320,
context 512, MoE top-k 2). Runs inside the SGLang venv: it needs torch, transformers and tokenizers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB_SIZE = 320
SEED = 20261
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, 3 special tokens and the merges of a few lines of text: exactly `VOCAB_SIZE` entries."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = ["what is two plus three", "two plus three is five", "count the apples on the table", "3 * 4 = 12"]
    bpe.train_from_iterator(lines * 10, trainer)
    if bpe.get_vocab_size() > VOCAB_SIZE:
        raise SystemExit(f"the tokenizer has {bpe.get_vocab_size()} entries, the models {VOCAB_SIZE}")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main(out: Path) -> None:
    torch.manual_seed(SEED)
    tokenizer = byte_level_tokenizer()
    made = {
        "tiny-qwen2": Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "tiny-qwen3-moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
    }
    for name, model in made.items():
        model.to(torch.bfloat16).save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
        print(f"{out / name}: {sum(p.numel() for p in model.parameters())} parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
