"""What a caller asks for, as plain Python values, and the message it becomes."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict, TypeVar, cast

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
    """Keyword arguments of every generating method; ``protos/serve/v1/inference.proto`` says what each means and what is
    done when it is left out."""

    request_id: str
    """A name of your own for the request, unique among those alive."""
    model: str
    """Name of the model; the served one by default."""
    special_tokens: bool
    """Whether the tokenizer's special tokens are added to a text or chat prompt."""
    add_generation_prompt: bool
    """For a conversation: whether the assistant's turn is opened."""
    priority: int
    cache_salt: str

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_ids: Sequence[int]
    banned_ids: Sequence[int]
    num_sequences: int

    max_new_tokens: int
    min_new_tokens: int
    stop_strings: Sequence[str]
    stop_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool

    text: bool
    token_ids: bool
    logprobs: int
    prompt_logprobs: int
    echo: bool


M = TypeVar("M", bound=Message)

_SECTION_OF: Final = {
    field.name: section
    for section, message in (
        ("sampling", inference_pb2.Sampling),
        ("stopping", inference_pb2.Stopping),
        ("response", inference_pb2.ResponseOptions),
    )
    for field in message.DESCRIPTOR.fields
}


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
    """Of the same kind as the target."""


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
        if section is None and name not in ("request_id", "model", "priority", "cache_salt"):
            raise TypeError(f"there is no option {name!r}")
        _put(getattr(message, section) if section else message, name, value, path=f"{section}.{name}" if section else name)
    return message


def score_message(
    items: Sequence[ScoreItem | str],
    *,
    request_id: str,
    model: str,
    top_logprobs: int | None,
    special_tokens: bool | None,
) -> inference_pb2.ScoreRequest:
    """The message of one scoring call."""
    message = filled(inference_pb2.ScoreRequest(), request_id=request_id, model=model, top_logprobs=top_logprobs)
    message.special_tokens = special_tokens_value(special_tokens)
    for place, entry in enumerate(items):
        item = ScoreItem(entry) if isinstance(entry, str) else entry
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
    """
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
    """A conversation as a message."""
    chat = types_pb2.Chat()
    for place, message in enumerate(messages):
        added = chat.messages.add()
        for name in ("role", "content"):
            _put(added, name, message[name], path=f"messages[{place}].{name}")
    if add_generation_prompt is not None:
        chat.add_generation_prompt = add_generation_prompt
    return chat


def _set_prompt(message: inference_pb2.GenerateRequest, prompt: Prompt, add_generation_prompt: Any) -> None:
    if isinstance(prompt, str):
        _put(message, "text", prompt, path="prompt.text")
    elif not isinstance(prompt, Sequence):
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
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        if isinstance(error, ValueError):
            raise invalid(path, str(error)) from error
        raise TypeError(f"{path}: {error}") from error


def invalid(field_name: str, rule: str) -> TesseraError:
    """The error of a value that cannot even be sent: what the server would say of it, said here."""
    violation = FieldViolation(field_name, rule)
    return TesseraError("INVALID_ARGUMENT", f"{field_name}: {rule}", violations=(violation,))
