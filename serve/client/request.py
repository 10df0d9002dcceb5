"""What a caller asks for, as plain Python values, and the message it becomes."""

from __future__ import annotations

import difflib
import reprlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from serve.client.errors import FieldViolation, TesseraError
from serve.v1 import inference_pb2, types_pb2


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or a conversation."""


class Options(TypedDict, total=False):
    """Keyword arguments of every generating method. What is left out the server decides, and a value that breaks a rule of it
    raises ``TesseraError`` with INVALID_ARGUMENT and the field's name."""

    request_id: str
    """A name of your own for the request, unique among those alive: 1 to 128 of ``A-Z a-z 0-9 . _ : -``."""
    model: str
    """Name of the model; the served one by default."""
    special_tokens: bool
    """Whether the tokenizer's special tokens are added to a text or chat prompt; by default to a text."""
    add_generation_prompt: bool
    """For a conversation: whether the assistant's turn is opened; by default it is."""
    priority: int
    """Larger goes first among waiting requests, from -1,000,000 to 1,000,000; 0 by default."""
    cache_salt: str
    """Only requests of the same salt share cached prompt prefixes; at most 256 bytes."""
    pin_weights: bool
    """Whether one checkpoint must make all tokens; by default a request goes on with newer weights that the server takes."""
    speculative_tokens: int
    """Tokens guessed at most for one step, which changes speed alone; 0 for none. By default, and at most, the server's."""

    temperature: float
    """Divides the logits: 0, which is greedy, or 0.00001 to 100. By default 1 where ``top_k``, ``top_p``, ``min_p``,
    ``typical_p`` or ``seed`` is set or several sequences are asked for, else 0."""
    top_k: int
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float
    """Keep the smallest set of likeliest tokens whose probability reaches this; above 0, at most 1."""
    min_p: float
    """Keep tokens at least this fraction as likely as the likeliest; 0 to 1."""
    typical_p: float
    """Locally typical sampling: the probability mass kept, tokens nearest to the entropy first; above 0, at most 1."""
    seed: int
    """Equal seeds give equal tokens, whatever else is served; by default a random one, which ``Finish.seed`` tells."""
    repetition_penalty: float
    """Divides positive and multiplies negative logits of tokens in prompt or output; 0.01 to 100, 1 changes nothing."""
    presence_penalty: float
    """Subtracted once from the logit of each token in the output; -100 to 100."""
    frequency_penalty: float
    """Subtracted from a token's logit once for each time it is in the output; -100 to 100."""
    logit_bias: Mapping[int, float]
    """Token id to what is added to its logit; -10,000 to 10,000."""
    allowed_ids: Sequence[int]
    """Only these token ids may be generated; by default all."""
    banned_ids: Sequence[int]
    """These token ids are never generated."""
    num_sequences: int
    """Independent continuations of the prompt; 1 by default."""

    max_new_tokens: int
    """Tokens to generate at most, the prompt not counted; by default what the model's length leaves."""
    min_new_tokens: int
    """Before this many tokens nothing but ``max_new_tokens`` ends a sequence."""
    stop_strings: Sequence[str]
    """Texts that end a sequence as soon as they appear, wherever token borders lie."""
    stop_ids: Sequence[int]
    """Token ids that end a sequence."""
    include_stop: bool
    """Whether text and ids keep the stop string or stop id that ended them; by default not."""
    ignore_eos: bool
    """Whether the model's end-of-text tokens are generated like any other; by default they end a sequence."""

    text: bool
    """Whether generated text is sent back; by default it is, of a model with a tokenizer."""
    token_ids: bool
    """Whether generated token ids are sent back; by default they are."""
    logprobs: int
    """For each generated token its log probability and the k likeliest at its place; 0 asks for no others. By default none."""
    prompt_logprobs: int
    """For each prompt token its log probability and the k likeliest at its place; 0 asks for no others. By default none."""
    echo: bool
    """Whether the prompt's own text and token ids come back, in ``PromptInfo``; by default not."""


M = TypeVar("M", bound=Message)

_KINDS: Final = {
    FieldDescriptor.CPPTYPE_BOOL: "bool",
    FieldDescriptor.CPPTYPE_DOUBLE: "float",
    FieldDescriptor.CPPTYPE_FLOAT: "float",
    FieldDescriptor.CPPTYPE_INT32: "int",
    FieldDescriptor.CPPTYPE_STRING: "str",
    FieldDescriptor.CPPTYPE_UINT32: "int",
    FieldDescriptor.CPPTYPE_UINT64: "int",
}
"""What fields of requests take, as Python calls it."""

_SECTION_OF: Final = {
    field.name: section
    for section, message in (
        ("sampling", inference_pb2.Sampling),
        ("stopping", inference_pb2.Stopping),
        ("response", inference_pb2.ResponseOptions),
    )
    for field in message.DESCRIPTOR.fields
}


_OF_ITSELF: Final = frozenset(Options.__annotations__).intersection(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
"""Options that are fields of the request itself, as it is sent."""

_PROMPT_RULE: Final = "a prompt is a text, a sequence of token ids, or a sequence of {'role': …, 'content': …}"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its options, for ``batch``."""

    prompt: Prompt
    options: Options = field(default_factory=lambda: Options())


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """Text or ids to score, with or without what they follow."""

    target: str | Sequence[int]
    context: str | Sequence[int] | None = None
    """What goes before the target and is not scored; text or ids, as the target is."""


def generate_message(prompt: Prompt, options: Options) -> inference_pb2.GenerateRequest:
    """The message of one request.

    Raises:
        TypeError: an option or the prompt is not of a kind that can be sent.
        TesseraError: INVALID_ARGUMENT; a value does not fit its field at all, such as a negative count.
    """
    message = inference_pb2.GenerateRequest()
    left = dict(options)
    _set_prompt(message, prompt, left.pop("add_generation_prompt", None))
    message.special_tokens = special_tokens_value(cast("bool | None", left.pop("special_tokens", None)))
    for name, value in left.items():
        section = _SECTION_OF.get(name)
        if section is None and name not in _OF_ITSELF:
            near = difflib.get_close_matches(name, Options.__annotations__, 1)
            raise TypeError(f"there is no option {name!r}" + (f"; the nearest is {near[0]!r}" if near else ""))
        _put(getattr(message, section) if section else message, name, value, path=f"{section}.{name}" if section else name)
    return message


def score_message(
    items: Sequence[ScoreItem | str],
    *,
    request_id: str,
    model: str,
    top_logprobs: int | None,
    special_tokens: bool | None,
    priority: int | None,
    cache_salt: str | None,
) -> inference_pb2.ScoreRequest:
    """The message of one scoring call.

    Raises:
        TypeError: ``items`` is one text, or holds what cannot be sent.
        TesseraError: INVALID_ARGUMENT; a value does not fit its field at all.
    """
    message = inference_pb2.ScoreRequest()
    filled(message, request_id=request_id, model=model, top_logprobs=top_logprobs, priority=priority, cache_salt=cache_salt)
    message.special_tokens = special_tokens_value(special_tokens)
    if isinstance(items, str | bytes):
        raise TypeError("items is one text; give a list of them")
    for place, entry in enumerate(items):
        item = ScoreItem(entry) if isinstance(entry, str) else entry
        if not isinstance(item, ScoreItem):
            raise TypeError(f"items[{place}] is {reprlib.repr(item)}; it must be a str or a ScoreItem")
        added, path = message.items.add(), f"items[{place}]"
        if isinstance(item.target, str):
            _put(added, "text", item.target, path=f"{path}.text")
        else:
            _put(added.token_ids, "ids", item.target, path=f"{path}.token_ids.ids")
            added.token_ids.SetInParent()
        if isinstance(item.context, str):
            _put(added, "context_text", item.context, path=f"{path}.context_text")
        elif item.context is not None:
            _put(added.context_ids, "ids", item.context, path=f"{path}.context_ids.ids")
    return message


def special_tokens_value(adds: bool | None) -> types_pb2.SpecialTokens:
    """``None`` leaves it to the server."""
    if adds is None:
        return types_pb2.SPECIAL_TOKENS_UNSPECIFIED
    return types_pb2.SPECIAL_TOKENS_ADD if adds else types_pb2.SPECIAL_TOKENS_OMIT


def named_messages(requests: Iterable[Request | Prompt]) -> list[inference_pb2.GenerateRequest]:
    """Messages that can be told apart: those without a request_id are given one.

    Raises:
        TesseraError: INVALID_ARGUMENT; two requests have the same request_id, so their answers could not be told apart, or one
            cannot be sent.
        TypeError: ``requests`` is one prompt or one request, or holds something else.
    """
    if isinstance(requests, str | bytes | Request):
        raise TypeError("requests is one of them; give a list")
    messages: list[inference_pb2.GenerateRequest] = []
    taken: set[str] = set()
    for entry in requests:
        request = entry if isinstance(entry, Request) else Request(entry)
        message = generate_message(request.prompt, request.options)
        if not message.request_id:
            message.request_id = uuid.uuid4().hex
        if message.request_id in taken:
            raise invalid("request_id", f"two requests of one batch have the request_id {message.request_id!r}")
        taken.add(message.request_id)
        messages.append(message)
    return messages


def chat_message(messages: Sequence[ChatMessage], add_generation_prompt: bool | None) -> types_pb2.Chat:
    """A conversation as a message.

    Raises:
        TypeError: one of the messages is no mapping with ``role`` and ``content``.
    """
    chat = types_pb2.Chat()
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise TypeError(f"messages[{place}] is {reprlib.repr(message)}; it must be {{'role': …, 'content': …}}")
        added = chat.messages.add()
        for name in ("role", "content"):
            _put(added, name, message[name], path=f"messages[{place}].{name}")
    if add_generation_prompt is not None:
        chat.add_generation_prompt = add_generation_prompt
    return chat


def _set_prompt(message: inference_pb2.GenerateRequest, prompt: Prompt, add_generation_prompt: Any) -> None:
    if isinstance(prompt, str):
        _put(message, "text", prompt, path="prompt.text")
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise TypeError(_PROMPT_RULE)
    elif prompt and all(isinstance(entry, Mapping) for entry in prompt):
        message.chat.CopyFrom(chat_message(cast(Sequence[ChatMessage], prompt), add_generation_prompt))
    elif all(isinstance(entry, int) for entry in prompt):
        _put(message.token_ids, "ids", prompt, path="prompt.token_ids.ids")
        message.token_ids.SetInParent()
    else:
        raise TypeError(_PROMPT_RULE)


def filled(message: M, **values: Any) -> M:
    """The message with these fields set; ``None`` leaves one out.

    Raises:
        TypeError: a value is not of a kind that can be sent.
        TesseraError: INVALID_ARGUMENT; a value does not fit its field.
    """
    for name, value in values.items():
        _put(message, name, value, path=name)
    return message


def _put(message: Any, name: str, value: Any, *, path: str) -> None:
    """Set a field, with an error that names it by its path in the request."""
    if value is None:
        return
    field = message.DESCRIPTOR.fields_by_name[name]
    is_map = field.message_type is not None
    try:
        if not field.is_repeated:
            setattr(message, name, value)
        elif isinstance(value, str | bytes) or isinstance(value, Mapping) != is_map:
            raise TypeError("of another kind")  # of a text each letter would count, of bytes each number
        elif is_map:
            getattr(message, name).update(value)
        else:
            getattr(message, name).extend(value)
    except TypeError as error:
        one = _KINDS[field.cpp_type] if not is_map else "int to float"
        kind = f"a mapping of {one}" if is_map else f"a sequence of {one}" if field.is_repeated else f"of type {one}"
        raise TypeError(f"{path} is {reprlib.repr(value)}; it must be {kind}") from error
    except ValueError as error:
        raise invalid(path, str(error)) from error


def invalid(field_name: str, rule: str) -> TesseraError:
    """The error of a value that cannot even be sent: what the server would say of it, said here."""
    violation = FieldViolation(field_name, rule)
    return TesseraError("INVALID_ARGUMENT", f"{field_name}: {rule}", violations=(violation,))
