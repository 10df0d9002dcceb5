"""From what a client calls a prompt to token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from checkpoint.text.chat import ChatRejected, ChatTemplate
from serve.errors import InvalidRequest
from serve.rpc.checks import Checks
from serve.rpc.model import ServedModel
from serve.v1 import inference_pb2, types_pb2

MAX_ROLE_CHARACTERS: Final = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine takes it."""

    field: str
    """Where it came from, for errors: for example ``prompt.text``."""
    ids: tuple[int, ...]
    text: str
    """For echo; empty when there is none."""


def check(request: inference_pb2.GenerateRequest, checks: Checks, model: ServedModel) -> None:
    """Note what is wrong with the prompt as it was sent, before any work is done on it."""
    check_special_tokens("special_tokens", request.special_tokens, checks)
    match request.WhichOneof("prompt"):
        case "text":
            if checks.text_bytes("prompt.text", request.text, model.config.admission.max_prompt_bytes) and not request.text:
                checks.refuse("prompt.text", "is empty; at least one token is needed")
        case "token_ids":
            check_ids("prompt.token_ids.ids", request.token_ids, checks, model)
        case "chat":
            check_chat("prompt.chat", request.chat, checks, model)
        case _:
            checks.refuse("prompt", "one of text, token_ids and chat must be set")


def check_special_tokens(field: str, value: int, checks: Checks) -> None:
    """The enum has a value that this server knows."""
    if value not in types_pb2.SpecialTokens.values():
        known = ", ".join(f"{number} ({name})" for name, number in types_pb2.SpecialTokens.items())
        checks.refuse(field, f"is {value}, which is not one of {known}")


def check_ids(field: str, message: types_pb2.TokenIds, checks: Checks, model: ServedModel) -> None:
    """There is at least one id, there are no more than a sequence may have, and each is in the vocabulary."""
    if not message.ids:
        checks.refuse(field, "is empty; at least one token is needed")
    if len(message.ids) > model.capacity:
        rule = f"has {len(message.ids)} tokens; prompt and output together may have {model.capacity}"
        checks.refuse(field.removesuffix(".ids"), rule)
    else:
        checks.token_ids(field, message.ids, model.facts.vocab_size)


def check_chat(field: str, chat: types_pb2.Chat, checks: Checks, model: ServedModel) -> None:
    """There is at least one turn, there are not too many, every turn has a role, and all together are short enough."""
    if not chat.messages:
        checks.refuse(f"{field}.messages", "is empty; at least one message is needed")
    if not checks.count(f"{field}.messages", chat.messages, model.config.admission.max_chat_messages):
        return
    for place, message in enumerate(chat.messages):
        if not 1 <= len(message.role) <= MAX_ROLE_CHARACTERS:
            checks.refuse(f"{field}.messages[{place}].role", f"must have 1 to {MAX_ROLE_CHARACTERS} characters")
            break
    num_bytes = sum(len(message.content.encode()) for message in chat.messages)
    limit = model.config.admission.max_prompt_bytes
    if num_bytes > limit:
        checks.refuse(f"{field}.messages", f"have {num_bytes} bytes together; the limit is {limit}")


async def prepare(request: inference_pb2.GenerateRequest, model: ServedModel) -> Prompt:
    """Tokenise a prompt that passed ``check``.

    Raises:
        FeatureOff: the model has no tokenizer or chat template for this kind of prompt.
        InvalidRequest: the template refuses the conversation, or no token comes out.
        QueueFull: too many texts of the caller wait.
    """
    match request.WhichOneof("prompt"):
        case "text":
            return await _from_text("prompt.text", request.text, request.special_tokens, model, chat=False)
        case "chat":
            text = await render(request.chat, model, field="prompt.chat")
            return await _from_text("prompt.chat", text, request.special_tokens, model, chat=True)
        case _:
            ids = tuple(request.token_ids.ids)
            wants_text = request.response.echo and model.tokenizer is not None
            text = await model.decode(model.tokenizer, ids) if wants_text and model.tokenizer is not None else ""
            return Prompt("prompt.token_ids", ids, text)


async def render(chat: types_pb2.Chat, model: ServedModel, *, field: str) -> str:
    """The conversation through the model's template.

    Raises:
        FeatureOff: there is none.
        InvalidRequest: it does not accept the conversation.
        QueueFull: too many texts of the caller wait.
    """
    template = model.require_chat()
    try:
        # Off the event loop: a template is a program, and nobody knows how long it runs.
        limit = model.config.admission.max_prompt_bytes
        return await model.in_text_thread(lambda: _render(template, chat, limit), chat.ByteSize())
    except ChatRejected as error:
        raise InvalidRequest.of(field, str(error)) from error


def _render(template: ChatTemplate, chat: types_pb2.Chat, max_bytes: int) -> str:
    turns = [{"role": message.role, "content": message.content} for message in chat.messages]
    opens_turn = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return template.render(turns, add_generation_prompt=opens_turn, max_bytes=max_bytes)


async def _from_text(
    field: str, text: str, special_tokens: types_pb2.SpecialTokens, model: ServedModel, *, chat: bool
) -> Prompt:
    tokenizer, adds = model.require_tokenizer(field), adds_special_tokens(special_tokens, chat=chat)
    ids = await model.encode(tokenizer, text, add_special_tokens=adds, field=field, at_most=model.capacity)
    return Prompt(field, ids, text)


def adds_special_tokens(value: types_pb2.SpecialTokens, *, chat: bool) -> bool:
    """What UNSPECIFIED means: a template writes its special tokens itself."""
    if value == types_pb2.SPECIAL_TOKENS_UNSPECIFIED:
        return not chat
    return value == types_pb2.SPECIAL_TOKENS_ADD
