"""The Tokenizer service: text to ids and back."""

from __future__ import annotations

from serve.errors import InvalidRequest
from serve.rpc import prompts
from serve.rpc.checks import Checks
from serve.rpc.context import Context
from serve.rpc.model import Models
from serve.v1 import tokenizer_pb2


class TokenizerService:
    """Answers from the tokenizer alone; the engine is not asked."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def Tokenize(self, request: tokenizer_pb2.TokenizeRequest, context: Context) -> tokenizer_pb2.TokenizeResponse:
        """Text to token ids."""
        model = self._models.current()
        model.require_name(request.model)
        checks = Checks()
        prompts.check_special_tokens("special_tokens", request.special_tokens, checks)
        checks.text_bytes("text", request.text, model.config.admission.max_prompt_bytes)
        checks.settle()
        adds = prompts.adds_special_tokens(request.special_tokens, chat=False)
        limit = model.max_text_tokens
        tokenizer = model.require_tokenizer("Tokenize")
        ids = await model.encode(tokenizer, request.text, add_special_tokens=adds, field="text", at_most=limit)
        _require_few("text", len(ids), limit)
        return tokenizer_pb2.TokenizeResponse(token_ids=ids, max_model_len=model.facts.max_model_len)

    async def Detokenize(self, request: tokenizer_pb2.DetokenizeRequest, context: Context) -> tokenizer_pb2.DetokenizeResponse:
        """Token ids to text."""
        model = self._models.current()
        model.require_name(request.model)
        checks = Checks()
        if checks.count("token_ids", request.token_ids, model.max_text_tokens):
            checks.token_ids("token_ids", request.token_ids, model.facts.vocab_size)
        checks.settle()
        skips = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await model.decode(model.require_tokenizer("Detokenize"), request.token_ids, skip_special_tokens=skips)
        return tokenizer_pb2.DetokenizeResponse(text=text)

    async def RenderChat(self, request: tokenizer_pb2.RenderChatRequest, context: Context) -> tokenizer_pb2.RenderChatResponse:
        """A conversation to the prompt the model would see."""
        model = self._models.current()
        model.require_name(request.model)
        checks = Checks()
        prompts.check_special_tokens("special_tokens", request.special_tokens, checks)
        prompts.check_chat("chat", request.chat, checks, model)
        checks.settle()
        text = await prompts.render(request.chat, model, field="chat")
        adds = prompts.adds_special_tokens(request.special_tokens, chat=True)
        limit = model.max_text_tokens
        tokenizer = model.require_tokenizer("RenderChat")
        ids = await model.encode(tokenizer, text, add_special_tokens=adds, field="chat", at_most=limit)
        _require_few("chat", len(ids), limit)
        return tokenizer_pb2.RenderChatResponse(text=text, token_ids=ids)


def _require_few(field: str, num_tokens: int, limit: int) -> None:
    """
    Raises:
        InvalidRequest: there are more tokens than one call may have.
    """
    if num_tokens > limit:
        raise InvalidRequest.of(field, f"has {num_tokens} tokens; one call may have {limit}")
