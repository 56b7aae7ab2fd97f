"""A tokenizer that needs no file: one token a byte.

Ids 0 to 255 are the bytes of the text in UTF-8, 256 begins a document and 257 ends it. Texts become about four times
as long as with a trained vocabulary, which is the price of starting without a download.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchtitan.components.tokenizer import BaseTokenizer

NUM_BYTES = 256


class ByteTokenizer(BaseTokenizer):
    """Bytes as tokens, with the interface of TorchTitan's tokenizers.

    Args:
        config: has no fields.
        tokenizer_path: ignored. TorchTitan passes its ``hf_assets_path`` to every tokenizer; nothing is read from it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config | None = None, *, tokenizer_path: str | None = None) -> None:
        super().__init__()
        self.bos_id = NUM_BYTES
        self.eos_id = NUM_BYTES + 1

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """The bytes of a text as ids, between a beginning and an end unless told otherwise."""
        # "surrogatepass" also encodes half of a surrogate pair, which Python strings can hold.
        ids = list(text.encode("utf-8", errors="surrogatepass"))
        return [self.bos_id] * add_bos + ids + [self.eos_id] * add_eos

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; ``decode(encode(text))`` is ``text`` for every string.

        Ids above 255 are no text and are dropped: beginnings, ends and what a model with a larger vocabulary made
        up. If the bytes are not UTF-8, as when a sample starts inside a character, those in question become U+FFFD.
        """
        content = bytes(token for token in ids if token < NUM_BYTES)
        try:
            return content.decode("utf-8", errors="surrogatepass")
        except UnicodeDecodeError:
            return content.decode("utf-8", errors="replace")

    def get_vocab_size(self) -> int:
        """258: the bytes, the beginning and the end."""
        return NUM_BYTES + 2
