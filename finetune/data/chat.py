"""Where in a conversation's text each turn lies, and what is learned of it.

The text itself is written by ``checkpoint.text.chat`` alone, which a server renders with too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from checkpoint import CheckpointError
from checkpoint.text.chat import ChatRejected, ChatTemplate
from finetune.data.samples import Chat, Malformed
from finetune.errors import ConfigError

_BEGIN, _END = "\ufdd0", "\ufdd1"  # no characters of any text: the ends of what {% generation %} encloses
_PLACE = "\ufdd2"  # nor this: stands for the content of a turn
_MOST_BYTES = 256 << 20
"""One conversation's text may have so many: a template that writes more writes without end."""
_NO_SPANS = (
    "the chat template writes turn {turn} differently once more turns follow, so its tokens cannot be told apart; "
    "enclose the assistant's words in {{% generation %}} … {{% endgeneration %}} in the template (data.chat_template)"
)
_MARKS_CHANGE_TEXT = (
    "the chat template alters what it encloses in {% generation %}, or the conversation holds U+FDD0 or U+FDD1, so its tokens "
    "cannot be told apart; let the template write those parts as they are, and leave such characters out"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the half-open ranges of characters that are targets."""

    text: str
    spans: tuple[tuple[int, int], ...]
    ends_with_turn: bool
    """Whether the last range ends the text, but for white space: then the end of text is to be learned after it."""


class ChatTargets:
    """A chat template, and where in what it writes the targets are."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], specials: Iterable[str], now: datetime, place: str
    ) -> None:
        """
        Args:
            special_tokens: the named ones, which the template sees.
            specials: all special tokens, any of which may end a turn.
            now: what ``strftime_now`` tells, so that data prepared in several goes says one date.
            place: file the template is from, for messages.

        Raises:
            ConfigError: it does not compile.
        """
        try:
            self._template = ChatTemplate(source, special_tokens, now=lambda: now)
            self._marked: ChatTemplate | None = None
            if self._template.encloses_answers:
                self._marked = ChatTemplate(source, special_tokens, now=lambda: now, marks=(_BEGIN, _END))
        except CheckpointError as error:
            raise ConfigError(f"{place}: {error.rule}") from error
        self._specials = tuple({*specials, *special_tokens.values()} - {""})

    def render(self, chat: Chat, wanted: Sequence[bool]) -> Rendered:
        """A whole conversation, and the ranges of the turns for which ``wanted`` is true.

        Raises:
            Malformed: the template refuses the conversation, or its turns cannot be told apart.
        """
        text = self.render_whole(chat)
        wanted = [want and weight for want, weight in zip(wanted, chat.weights, strict=True)]
        if self._marked is None:
            spans = [self._range(chat, turn, text) for turn, want in enumerate(wanted) if want]
        else:
            spans = self._enclosed(self._marked, chat, wanted, text)
        spans = [self._trimmed(text, begin, end) for begin, end in spans if begin < end]
        ends = bool(spans) and not text[spans[-1][1] :].strip()
        return Rendered(text, tuple(spans), ends)

    def render_whole(self, chat: Chat) -> str:
        """A whole conversation.

        Raises:
            Malformed: the template refuses it.
        """
        return self._text(chat, len(chat.messages))

    def ends_by_itself(self, text: str) -> bool:
        """Whether ``text`` ends with a special token."""
        return text.rstrip().endswith(self._specials)

    # -- ranges

    def _enclosed(self, template: ChatTemplate, chat: Chat, wanted: Sequence[bool], text: str) -> list[tuple[int, int]]:
        """What the template itself marks; each mark is a turn of the assistant, in order."""
        unmarked, marks = _without_marks(_rendered(template, chat, len(chat.messages), prompt=False))
        if unmarked != text:
            raise Malformed(_MARKS_CHANGE_TEXT)
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if len(marks) != len(turns):
            if all(wanted[index] for index in turns):
                return [self._with_end(text, *mark) for mark in marks]
            raise Malformed(
                f"the chat template marks {len(marks)} parts by {{% generation %}} for {len(turns)} turns of the assistant, so "
                "single turns cannot be chosen; set data.train_on to completion and give no 'weight'"
            )
        return [self._with_end(text, *mark) for turn, mark in zip(turns, marks, strict=True) if wanted[turn]]

    def _with_end(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """With the special token that follows at once, when the mark ends before it: the end of a turn is to be learned."""
        if not self.ends_by_itself(text[begin:end]):
            following = text[end:].lstrip()
            for special in sorted(self._specials, key=len, reverse=True):
                if following.startswith(special):
                    return begin, len(text) - len(following) + len(special)
        return begin, end

    def _range(self, chat: Chat, turn: int, text: str) -> tuple[int, int]:
        """From the end of the prompt before the turn to the end of what the template writes with it."""
        message = chat.messages[turn]
        before = self._text_before(chat, turn, prompt=message["role"] == "assistant")
        until = text if turn == len(chat.messages) - 1 else self._text(chat, turn + 1)
        if message["role"] == "assistant" and text.startswith(before) and text.startswith(until):
            return len(before), len(until)
        # The template writes this turn in another way when it is the last, or in a prompt. A mark in its place shows where.
        head, tail = self._around(chat, turn, len(chat.messages))
        _, ending = self._around(chat, turn, turn + 1)
        end = len(text) - len(tail)
        if not (text.startswith(head) and text.endswith(tail) and end >= len(head)):
            raise Malformed(_NO_SPANS.format(turn=turn + 1))
        prompted = message["role"] == "assistant" and text.startswith(before) and len(before) <= len(head)
        begin = len(before) if prompted else len(head)
        return begin, end + self._shared_ending(ending, tail)

    def _shared_ending(self, ending: str, tail: str) -> int:
        """How many characters end the turn both last and in the middle; whole lines and special tokens, not parts of them."""
        shared = _common_prefix(ending, tail)
        if shared == len(ending):
            return shared
        kept = ending[:shared]
        specials = (kept.rfind(special) + len(special) for special in self._specials if special in kept)
        return max(kept.rfind("\n") + 1, *specials, 0)

    def _around(self, chat: Chat, turn: int, turns: int) -> tuple[str, str]:
        """What the template writes before and after the content of a turn, in the first ``turns`` turns."""
        messages = list(chat.messages)
        messages[turn] = {**messages[turn], "content": _PLACE}
        text = self._text(Chat(tuple(messages), chat.weights, chat.tools), turns)
        if text.count(_PLACE) != 1:
            raise Malformed(_NO_SPANS.format(turn=turn + 1))
        head, tail = text.split(_PLACE)
        return head, tail

    def _trimmed(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """Without the white space after the special token that ends the turn: nobody ever waits for it."""
        kept = text[begin:end].rstrip()
        return (begin, begin + len(kept)) if self.ends_by_itself(kept) else (begin, end)

    # -- rendering

    def _text_before(self, chat: Chat, turn: int, *, prompt: bool) -> str:
        """What a prompt for this turn looks like; empty where the template has nothing to say without a turn."""
        if turn == 0 and not prompt:
            return ""
        try:
            return self._text(chat, turn, prompt=prompt)
        except Malformed:
            if turn == 0:
                return ""
            raise

    def _text(self, chat: Chat, turns: int, *, prompt: bool = False) -> str:
        return _rendered(self._template, chat, turns, prompt=prompt)


def _rendered(template: ChatTemplate, chat: Chat, turns: int, *, prompt: bool) -> str:
    """The first ``turns`` turns as the template writes them.

    Raises:
        Malformed: it refuses them, or fails on them.
    """
    try:
        return template.render(chat.messages[:turns], add_generation_prompt=prompt, max_bytes=_MOST_BYTES, tools=chat.tools)
    except ChatRejected as error:
        verb = "fails on" if error.said is None else "refuses"
        raise Malformed(
            f"the chat template {verb} the conversation: {error.reason}; mend the record or the template"
        ) from error


def _common_prefix(first: str, second: str) -> int:
    if second.startswith(first):
        return len(first)
    return next((index for index, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(second))


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks, and the ranges they enclosed."""
    if _BEGIN not in text and _END not in text:
        return text, []
    kept: list[str] = []
    ranges: list[tuple[int, int]] = []
    length, begin = 0, None
    for index, part in enumerate(text.replace(_END, _BEGIN).split(_BEGIN)):
        if index % 2:
            begin = length
        elif begin is not None:
            ranges.append((begin, length))
        kept.append(part)
        length += len(part)
    return "".join(kept), ranges
