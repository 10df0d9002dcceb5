"""Requests of the wire to requests of the engine, with every field checked first and all violations told at once."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass

from serve.config import MAX_SPECULATIVE_TOKENS, AdmissionConfig
from serve.errors import InvalidRequest
from serve.rpc import prompts
from serve.rpc.checks import MAX_PRIORITY, Checks
from serve.rpc.model import ServedModel
from serve.rpc.threads import off_loop
from serve.types import Generation, RequestId, ResponseOptions, SamplingParams, StoppingParams
from serve.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Call:
    """When a call came and how long it may take, on the monotonic clock."""

    arrival_seconds: float
    deadline_seconds: float | None
    tenant: str = ""
    """The caller's."""
    shares_cache: bool = False
    """Whether the tenant shares cached prefixes with others."""


async def check(request: inference_pb2.GenerateRequest, model: ServedModel) -> None:
    """Refuse what can be seen to be wrong with a client's request before its text is tokenised.

    Raises:
        InvalidRequest: fields break their rules.
        NotFound: another model is asked for.
        FeatureOff: the model has no tokenizer, and the request needs one.
    """
    model.require_name(request.model)
    await off_loop(request, lambda: _check(request, model))
    if request.stopping.stop_strings:
        model.require_tokenizer("stopping.stop_strings")
    if request.response.text:
        model.require_tokenizer("response.text")


async def to_generation(request: inference_pb2.GenerateRequest, model: ServedModel, call: Call) -> Generation:
    """The engine's request for a client's that passed ``check``.

    Raises:
        InvalidRequest: the template refuses the conversation, or what the text gives is too long.
        QueueFull: too many texts of the caller wait to be tokenised.
        FeatureOff: the model has no tokenizer or chat template, and the request needs one.
    """
    prompt = await prompts.prepare(request, model)
    return await off_loop(request, lambda: _generation(request, prompt, model, call))


def _generation(request: inference_pb2.GenerateRequest, prompt: prompts.Prompt, model: ServedModel, call: Call) -> Generation:
    """The values of a request that was checked, with its prompt tokenised."""
    _check_prompt_logprobs(request, prompt, model)
    return Generation(
        request_id=new_request_id(request.request_id),
        prompt_ids=prompt.ids,
        prompt_text=prompt.text,
        sampling=_sampling(request.sampling),
        stopping=_stopping(request.stopping, _fitting_max_new_tokens(request, prompt, model)),
        response=_response(request.response, has_tokenizer=model.tokenizer is not None),
        num_sequences=request.sampling.num_sequences if request.sampling.HasField("num_sequences") else 1,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=call.tenant,
        shares_cache=call.shares_cache,
        pin_weights=request.pin_weights,
        speculative_tokens=request.speculative_tokens if request.HasField("speculative_tokens") else None,
        arrival_seconds=call.arrival_seconds,
        deadline_seconds=call.deadline_seconds,
    )


def new_request_id(given: str) -> RequestId:
    """The client's name for a request, or one that nobody else has."""
    return RequestId(given or uuid.uuid4().hex)


def check_common(request_id: str, priority: int, cache_salt: str, checks: Checks) -> None:
    """Fields that generation and scoring share."""
    checks.request_id(request_id)
    checks.within("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    checks.cache_salt(cache_salt)


def _check(request: inference_pb2.GenerateRequest, model: ServedModel) -> None:
    """
    Raises:
        InvalidRequest: fields break their rules.
    """
    checks = Checks()
    _check_fields(request, checks, model)
    prompts.check(request, checks, model)
    checks.settle()


def _check_fields(request: inference_pb2.GenerateRequest, checks: Checks, model: ServedModel) -> None:
    check_common(request.request_id, request.priority, request.cache_salt, checks)
    checks.within("speculative_tokens", request.speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
    _check_sampling(request.sampling, checks, model)
    _check_stopping(request, checks, model)
    for name in ("logprobs", "prompt_logprobs"):
        checks.within(f"response.{name}", getattr(request.response, name), 0, _most_logprobs(model))
    _check_something_can_be_sampled(request, checks, model)


def _most_logprobs(model: ServedModel) -> int:
    return min(model.config.admission.max_logprobs, model.facts.vocab_size)


def _check_sampling(sampling: inference_pb2.Sampling, checks: Checks, model: ServedModel) -> None:
    limits, vocab_size = model.config.admission, model.facts.vocab_size
    if sampling.temperature != 0.0:
        # Below this the logits divided by the temperature could overflow.
        checks.within("sampling.temperature", sampling.temperature, 1e-5, 100.0)
    checks.within("sampling.top_k", sampling.top_k, 0, vocab_size)
    if sampling.HasField("top_p"):
        checks.share("sampling.top_p", sampling.top_p)
    checks.within("sampling.min_p", sampling.min_p, 0.0, 1.0)
    if sampling.HasField("typical_p"):
        checks.share("sampling.typical_p", sampling.typical_p)
    if sampling.HasField("repetition_penalty"):
        checks.within("sampling.repetition_penalty", sampling.repetition_penalty, 0.01, 100.0)
    checks.within("sampling.presence_penalty", sampling.presence_penalty, -100.0, 100.0)
    checks.within("sampling.frequency_penalty", sampling.frequency_penalty, -100.0, 100.0)
    if sampling.HasField("num_sequences"):
        checks.within("sampling.num_sequences", sampling.num_sequences, 1, limits.max_num_sequences)
    _check_logit_bias(sampling, checks, limits, vocab_size)
    for name in ("allowed_ids", "banned_ids"):
        ids = getattr(sampling, name)
        if checks.count(f"sampling.{name}", ids, limits.max_id_list):
            checks.token_ids(f"sampling.{name}", ids, vocab_size)


def _check_logit_bias(sampling: inference_pb2.Sampling, checks: Checks, limits: AdmissionConfig, vocab_size: int) -> None:
    bias = sampling.logit_bias
    if len(bias) > limits.max_logit_bias:
        checks.refuse("sampling.logit_bias", f"has {len(bias)} entries; the limit is {limits.max_logit_bias}")
        return
    for token_id, value in sorted(bias.items()):
        if token_id >= vocab_size:
            checks.refuse(f"sampling.logit_bias[{token_id}]", f"is no token; the vocabulary has {vocab_size}")
            return
        if not checks.within(f"sampling.logit_bias[{token_id}]", value, -10_000.0, 10_000.0):
            return


def _check_stopping(request: inference_pb2.GenerateRequest, checks: Checks, model: ServedModel) -> None:
    stopping, limits = request.stopping, model.config.admission
    if checks.count("stopping.stop_strings", stopping.stop_strings, limits.max_stop_strings):
        for place, stop in enumerate(stopping.stop_strings):
            if not stop:
                checks.refuse(f"stopping.stop_strings[{place}]", "is empty")
            checks.text_bytes(f"stopping.stop_strings[{place}]", stop, limits.max_stop_string_bytes)
    if checks.count("stopping.stop_ids", stopping.stop_ids, limits.max_stop_ids):
        checks.token_ids("stopping.stop_ids", stopping.stop_ids, model.facts.vocab_size)
    checks.within("stopping.min_new_tokens", stopping.min_new_tokens, 0, model.capacity)
    if not stopping.HasField("max_new_tokens"):
        return
    fits = checks.within("stopping.max_new_tokens", stopping.max_new_tokens, 0, model.capacity)
    if fits and stopping.max_new_tokens == 0 and not (request.response.echo or request.response.HasField("prompt_logprobs")):
        checks.refuse("stopping.max_new_tokens", "is 0, which needs response.echo or response.prompt_logprobs")
    if stopping.min_new_tokens > stopping.max_new_tokens:
        rule = f"is {stopping.min_new_tokens}, which is more than max_new_tokens, {stopping.max_new_tokens}"
        checks.refuse("stopping.min_new_tokens", rule)


def _check_something_can_be_sampled(request: inference_pb2.GenerateRequest, checks: Checks, model: ServedModel) -> None:
    """Allowed, banned and not-yet-allowed end ids together leave at least one token."""
    sampling, stopping = request.sampling, request.stopping
    never = set(sampling.banned_ids)
    if stopping.min_new_tokens > 0:
        never.update(stopping.stop_ids)
        never.update(() if stopping.ignore_eos else model.facts.eos_ids)
    if sampling.allowed_ids:
        if never.issuperset(sampling.allowed_ids):
            checks.refuse("sampling.allowed_ids", "has no id that is not banned, or an end of text before min_new_tokens")
    elif len(never) >= model.facts.vocab_size:
        checks.refuse("sampling.banned_ids", "leaves no token that may be sampled")


def _fitting_max_new_tokens(request: inference_pb2.GenerateRequest, prompt: prompts.Prompt, model: ServedModel) -> int:
    """The request's limit, or all the room after the prompt.

    Raises:
        InvalidRequest: the prompt, or the prompt with its output, is longer than a sequence may be.
    """
    stopping, num_prompt, capacity = request.stopping, len(prompt.ids), model.capacity
    if num_prompt == 0:
        raise InvalidRequest.of(prompt.field, "has no tokens; at least one is needed")
    least = stopping.max_new_tokens if stopping.HasField("max_new_tokens") else max(1, stopping.min_new_tokens)
    if num_prompt + min(least, 1) > capacity:
        rule = f"has {num_prompt} tokens; prompt and output together may have {capacity}"
        raise InvalidRequest.of(prompt.field, rule)
    if num_prompt + least > capacity:
        field = "stopping.max_new_tokens" if stopping.HasField("max_new_tokens") else "stopping.min_new_tokens"
        rule = f"is {least}; the prompt has {num_prompt} tokens and both together may have {capacity}"
        raise InvalidRequest.of(field, rule)
    return stopping.max_new_tokens if stopping.HasField("max_new_tokens") else capacity - num_prompt


def _check_prompt_logprobs(request: inference_pb2.GenerateRequest, prompt: prompts.Prompt, model: ServedModel) -> None:
    if request.response.HasField("prompt_logprobs"):
        checks = Checks()
        checks.logprobs("response.prompt_logprobs", len(prompt.ids), request.response.prompt_logprobs, model.config.admission)
        checks.settle()


def _sampling(sampling: inference_pb2.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else _default_temperature(sampling),
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p if sampling.HasField("typical_p") else 1.0,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_ids=tuple(sorted(set(sampling.allowed_ids))),
        banned_ids=tuple(sorted(set(sampling.banned_ids))),
    )


def _default_temperature(sampling: inference_pb2.Sampling) -> float:
    """Who asks for a way of sampling, or for several texts, does not want the one greedy text."""
    samples = any(sampling.HasField(name) for name in ("top_k", "top_p", "min_p", "typical_p", "seed"))
    return 1.0 if samples or sampling.num_sequences > 1 else 0.0


def _stopping(stopping: inference_pb2.Stopping, max_new_tokens: int) -> StoppingParams:
    return StoppingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=stopping.min_new_tokens,
        stop_strings=tuple(dict.fromkeys(stopping.stop_strings)),
        stop_ids=tuple(dict.fromkeys(stopping.stop_ids)),
        include_stop=stopping.include_stop,
        ignore_eos=stopping.ignore_eos,
    )


def _response(response: inference_pb2.ResponseOptions, *, has_tokenizer: bool) -> ResponseOptions:
    return ResponseOptions(
        text=response.text if response.HasField("text") else has_tokenizer,
        token_ids=response.token_ids if response.HasField("token_ids") else True,
        logprobs=response.logprobs if response.HasField("logprobs") else None,
        prompt_logprobs=response.prompt_logprobs if response.HasField("prompt_logprobs") else None,
        echo=response.echo,
    )
