"""The vocabulary: three specials, 256 bytes, and a reserve that nothing decodes to.

The rule: text becomes ids and ids become text without a table that could differ between two engines. Id 0 pads, 1
begins, 2 ends a sequence (EOS), and byte b is id b + 3. Ids 259..319 exist (the model gives them a log-prob, so that
the vocabulary is larger than what text needs, as in real models) and decode to nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
BYTE_OFFSET = 3
VOCAB_SIZE = 320

_SPECIAL_TEXT = {PAD_ID: b"<pad>", BOS_ID: b"<s>", EOS_ID: b"</s>"}


def encode_text(text: str) -> list[int]:
    """UTF-8 bytes of `text` as token ids. No BOS is added, so that text and prompt + prefix concatenate."""
    return [byte + BYTE_OFFSET for byte in text.encode("utf-8", errors="surrogatepass")]


def token_bytes(token: int, *, skip_special: bool) -> bytes:
    """The bytes that one token stands for; empty for specials when they are skipped, and for the reserve."""
    if BYTE_OFFSET <= token < BYTE_OFFSET + 256:
        return bytes((token - BYTE_OFFSET,))
    if skip_special:
        return b""
    return _SPECIAL_TEXT.get(token, b"")


def decode_tokens(tokens: Iterable[int], *, skip_special: bool, final: bool) -> str:
    """Text of `tokens`. Bytes that are not UTF-8 become U+FFFD; an incomplete tail is held back unless `final`."""
    data = b"".join(token_bytes(token, skip_special=skip_special) for token in tokens)
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data, final)
