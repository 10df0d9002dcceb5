from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "family", "num_parameters", "vocab_size", "max_model_len", "dtype", "device", "tensor_parallel_size", "eos_ids", "checkpoint_step", "has_tokenizer", "has_chat_template", "limits", "pipeline_parallel_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    family: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    tensor_parallel_size: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    checkpoint_step: int
    has_tokenizer: bool
    has_chat_template: bool
    limits: RequestLimits
    pipeline_parallel_size: int
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., num_parameters: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ..., checkpoint_step: _Optional[int] = ..., has_tokenizer: _Optional[bool] = ..., has_chat_template: _Optional[bool] = ..., limits: _Optional[_Union[RequestLimits, _Mapping]] = ..., pipeline_parallel_size: _Optional[int] = ...) -> None: ...

class RequestLimits(_message.Message):
    __slots__ = ("num_sequences", "logprobs", "stop_strings", "stop_string_bytes", "stop_ids", "logit_bias", "prompt_bytes", "score_items")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_BYTES_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCORE_ITEMS_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    logprobs: int
    stop_strings: int
    stop_string_bytes: int
    stop_ids: int
    logit_bias: int
    prompt_bytes: int
    score_items: int
    def __init__(self, num_sequences: _Optional[int] = ..., logprobs: _Optional[int] = ..., stop_strings: _Optional[int] = ..., stop_string_bytes: _Optional[int] = ..., stop_ids: _Optional[int] = ..., logit_bias: _Optional[int] = ..., prompt_bytes: _Optional[int] = ..., score_items: _Optional[int] = ...) -> None: ...
