"""Token ids to text, one token at a time: whole characters only, and nothing that may still become a stop string.

Runs in the engine thread once per token, so a token costs microseconds.
"""

from __future__ import annotations

import codecs
from typing import Final, Protocol

from checkpoint.text.tokenizer import Tokenizer
from serve.engine.text import TextDelta, TextFactory, TextStream
from serve.text.pieces import Kind, Pieces, decoder_kind
from serve.text.stops import StopFinder
from serve.types import Generation

_NOTHING: Final = TextDelta("", None)
_LONGEST_CHARACTER_TOKENS: Final = 4
"""A character has at most four bytes, so an unfinished one that spans more tokens will never be finished."""
_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


class _Decoder(Protocol):
    """Ids to text, with incomplete characters held back."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class ByteLevelDecoder:
    """Tokens are byte strings: their concatenation is read as UTF-8. Equal to decoding all ids at once."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._pieces[token_id][0])

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class ByteFallbackDecoder:
    """Tokens are text, except lone bytes, which are gathered until they are a character.

    Equal to decoding all ids at once as long as bytes form characters. Where they do not, decoding at once turns every byte
    of the run into U+FFFD, even those that were whole characters and have been sent; here only the bytes at fault are.
    """

    def __init__(self, pieces: Pieces, *, drop_first_space: bool) -> None:
        self._pieces = pieces
        self._bytes = b""
        self._drop_first_space = drop_first_space

    def push(self, token_id: int) -> str:
        piece, is_byte = self._pieces[token_id]
        if is_byte:
            text = self._push_byte(piece)
        elif piece:
            text = self._broken() + piece.decode()
        else:
            return ""  # a special token does not end a run of bytes
        if self._drop_first_space and text:
            self._drop_first_space = False
            return text.removeprefix(" ")
        return text

    def _push_byte(self, byte: bytes) -> str:
        self._bytes += byte
        # Final decoding would complain of a character's end that is still to come; incremental decoding does not.
        try:
            text = _Utf8Decoder("strict").decode(self._bytes)
        except UnicodeDecodeError:
            text = self._broken()
        if text:
            self._bytes = b""
        return text

    def _broken(self) -> str:
        text, self._bytes = "\ufffd" * len(self._bytes), b""
        return text

    def finish(self) -> str:
        return self._broken()


class WindowDecoder:
    """Any decoder: decodes the last few tokens with and without the new one, and takes the difference.

    The window begins where the text was last known to be whole, so a token costs the same however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_sent = 0

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or (text.endswith("\ufffd") and len(self._ids) - self._num_sent < _LONGEST_CHARACTER_TOKENS):
            return ""
        # What was sent becomes the new context, in which the next token is read.
        self._ids = self._ids[self._num_sent :]
        self._num_sent = len(self._ids)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._num_sent])
        return self._tokenizer.decode(self._ids)[len(before) :]

    def finish(self) -> str:
        return self._new_text()


class StreamWithoutText:
    """For requests that want no text and have no stop strings, and for models without a tokenizer."""

    def push(self, token_id: int) -> TextDelta:
        return _NOTHING

    def finish(self) -> str:
        return ""


class PlainStream:
    """Text of a sequence without stop strings."""

    def __init__(self, decoder: _Decoder) -> None:
        self._decoder = decoder

    def push(self, token_id: int) -> TextDelta:
        return TextDelta(self._decoder.push(token_id))

    def finish(self) -> str:
        return self._decoder.finish()


class StoppingStream:
    """Text of a sequence with stop strings."""

    def __init__(self, decoder: _Decoder, finder: StopFinder, min_new_tokens: int) -> None:
        self._decoder = decoder
        self._finder = finder
        self._tokens_to_ignore = max(0, min_new_tokens - 1)
        """The token that makes the count reach ``min_new_tokens`` is the first that may complete a stop string."""

    def push(self, token_id: int) -> TextDelta:
        text = self._decoder.push(token_id)
        if self._tokens_to_ignore > 0:
            self._tokens_to_ignore -= 1
            return TextDelta(text)
        return TextDelta(*self._finder.feed(text))

    def finish(self) -> str:
        text, matched = self._finder.feed(self._decoder.finish())
        return text if matched is not None else text + self._finder.rest()


def open_text(tokenizer: Tokenizer | None) -> TextFactory:
    """A factory of text streams for the requests of one model; ``None`` makes streams without text."""
    if tokenizer is None:
        return lambda generation, index: StreamWithoutText()
    kind, drops_first_space = decoder_kind(tokenizer.backend)
    pieces = Pieces(tokenizer.backend, kind, tokenizer.special_ids)

    def decoder_for(generation: Generation) -> _Decoder:
        if kind is Kind.BYTE_LEVEL:
            return ByteLevelDecoder(pieces)
        if kind is Kind.BYTE_FALLBACK:
            # The space belongs to the start of the whole text. Output that continues visible text keeps it.
            starts_text = all(token_id in tokenizer.special_ids for token_id in generation.prompt_ids)
            return ByteFallbackDecoder(pieces, drop_first_space=drops_first_space and starts_text)
        return WindowDecoder(tokenizer)

    def open_stream(generation: Generation, index: int) -> TextStream:
        stopping = generation.stopping
        if stopping.stop_strings:
            finder = StopFinder(stopping.stop_strings, include_stop=stopping.include_stop)
            return StoppingStream(decoder_for(generation), finder, stopping.min_new_tokens)
        return PlainStream(decoder_for(generation)) if generation.response.text else StreamWithoutText()

    return open_stream
