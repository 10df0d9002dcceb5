"""The Models service: what is served, and what a request may ask for."""

from __future__ import annotations

from serve.rpc.context import Context
from serve.rpc.model import Models, ServedModel
from serve.v1 import models_pb2


class ModelService:
    """Facts and limits of the one model."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def GetModel(self, request: models_pb2.GetModelRequest, context: Context) -> models_pb2.Model:
        """Facts and limits of the model of this name, or of the one there is if none is given.

        Raises:
            NotFound: another one is served.
        """
        model = self._models.current()
        model.require_name(request.name)
        return _message(model)

    async def ListModels(self, request: models_pb2.ListModelsRequest, context: Context) -> models_pb2.ListModelsResponse:
        """Facts and limits of every model that is served: of the one."""
        return models_pb2.ListModelsResponse(models=[_message(self._models.current())])


def _message(model: ServedModel) -> models_pb2.Model:
    facts, admission = model.facts, model.config.admission
    return models_pb2.Model(
        name=model.config.model.served_name,
        family=facts.family,
        num_parameters=facts.num_parameters,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        dtype=facts.dtype,
        device=facts.device,
        tensor_parallel_size=model.config.model.tensor_parallel_size,
        pipeline_parallel_size=model.config.model.pipeline_parallel_size,
        eos_ids=facts.eos_ids,
        checkpoint_step=facts.checkpoint_step,
        has_tokenizer=model.tokenizer is not None,
        has_chat_template=model.tokenizer is not None and model.tokenizer.chat is not None,
        limits=models_pb2.RequestLimits(
            num_sequences=admission.max_num_sequences,
            logprobs=admission.max_logprobs,
            stop_strings=admission.max_stop_strings,
            stop_string_bytes=admission.max_stop_string_bytes,
            stop_ids=admission.max_stop_ids,
            logit_bias=admission.max_logit_bias,
            prompt_bytes=admission.max_prompt_bytes,
            score_items=admission.max_score_items,
        ),
    )
