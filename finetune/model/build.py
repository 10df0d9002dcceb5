"""The model that is trained: transformers' own definition, built empty, then filled by rules or from a checkpoint.

Names of parameters are transformers' names everywhere; tied weights are one parameter and are stored once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as hf_init

from checkpoint import Checkpoint, CheckpointError
from checkpoint.dtypes import dtype_name
from finetune.errors import ConfigError
from finetune.model.finite import check_finite, found_in
from finetune.model.pretrained import initialise_module, new_model

Gather = Callable[[list[nn.Parameter]], AbstractContextManager[bool]]
"""Makes the given parameters whole for a moment; the value says whether this rank writes them. All ranks must enter."""


def new_config(settings: Mapping[str, Any], *, num_ids: int, seq_len: int, end_of_text_id: int) -> PretrainedConfig:
    """The transformers configuration of a new model.

    Raises:
        ConfigError: the type or a key is unknown, a value breaks transformers' rules, or the tokenizer does not fit.
    """
    values = dict(settings)
    config_class = check_new_config(values)
    values.pop("model_type")
    values.setdefault("vocab_size", num_ids)
    longest = config_class.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if longest in _keys(config_class) and "max_position_embeddings" not in values:
        values.setdefault(longest, seq_len)
    for name in ("bos_token_id", "eos_token_id"):
        values.setdefault(name, end_of_text_id)
    try:
        config = config_class(**values)
    except Exception as error:  # each transformers configuration raises its own kinds
        raise ConfigError(f"model.new: transformers refuses it: {' '.join(str(error).split())}") from error
    check_fit(config, num_ids=num_ids, seq_len=seq_len, key="model.new")
    return config


def check_new_config(settings: Mapping[str, Any]) -> type[PretrainedConfig]:
    """The configuration class of ``model.new``; needs no tokenizer, so it runs before any work is done.

    Raises:
        ConfigError: the type is not a causal language model, or a key is not one of its configuration.
    """
    model_type = settings["model_type"]
    config_class = _causal_class(model_type)
    if config_class is None:
        families = "gpt_neox, gpt2, gptj, gpt_neo, opt, llama, mistral, qwen2, phi"
        rule = f"be a causal language model of transformers, such as {families}"
        raise ConfigError(f"model.new.model_type is {model_type!r}; it must {rule}")
    known = _keys(config_class)
    for key in settings:
        if key not in known | {"model_type"}:
            raise ConfigError(f"model.new.{key}: unknown key of a {model_type} model (allowed: {', '.join(sorted(known))})")
    return config_class


def _causal_class(model_type: object) -> type[PretrainedConfig] | None:
    """Configuration class of a causal language model; ``None`` for anything else.

    Encoders have a language modelling head too, but without a causal mask they would see the tokens they are to predict.
    """
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    found = CONFIG_MAPPING[model_type]
    return found if found in MODEL_FOR_CAUSAL_LM_MAPPING and found not in MODEL_FOR_MASKED_LM_MAPPING else None


def _keys(config_class: type[PretrainedConfig]) -> set[str]:
    """Keys the configuration of a model type has: its own parameters, their common names, and everyone's."""
    own = {name for name in inspect.signature(config_class.__init__).parameters if name not in ("self", "args", "kwargs")}
    return own | set(config_class().to_dict()) | set(config_class.attribute_map)


def check_fit(config: PretrainedConfig, *, num_ids: int, seq_len: int, key: str) -> None:
    """The tokenizer's ids have rows and the samples have positions.

    Raises:
        ConfigError: they have not.
    """
    if config.vocab_size < num_ids:
        raise ConfigError(f"{key}: vocab_size is {config.vocab_size}; the tokenizer has {num_ids} ids")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise ConfigError(f"data.seq_len is {seq_len}; it must be at most {longest}, the longest position of the model ({key})")


def config_of(checkpoint: Checkpoint) -> PretrainedConfig:
    """The transformers configuration of an existing checkpoint.

    Raises:
        ConfigError: transformers knows no causal language model of this type, or refuses what the file says of it.
    """
    made = config_from(checkpoint.config, checkpoint.path)  # the folder: another trainer's has its values elsewhere
    try:
        checkpoint.check_model()
    except CheckpointError as error:
        raise ConfigError(f"{checkpoint.path}: {error}") from error
    return made


def config_from(config: Mapping[str, Any], place: Path) -> PretrainedConfig:
    """The transformers configuration of a checkpoint's configuration alone.

    Args:
        config: as ``config.json`` has it.
        place: the file or folder that it is from, for messages.

    Raises:
        ConfigError: as ``config_of``.
    """
    values = dict(config)
    model_type = values.pop("model_type")
    if _causal_class(model_type) is None:
        raise ConfigError(f"{place}: model_type {model_type!r} is not a causal language model of transformers")
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # each transformers configuration raises its own kinds
        rule = f"transformers refuses it: {' '.join(str(error).split())}"
        raise ConfigError(f"{place}: {rule}") from error


def _made(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """``new_model`` of a configuration that may name what transformers does not have, such as an activation.

    Raises:
        ConfigError: it does.
    """
    try:
        return new_model(config, dtype)
    except (LookupError, TypeError, ValueError, AttributeError, ImportError, NotImplementedError) as error:
        rule = f"the configuration describes no {config.model_type} that transformers builds"
        raise ConfigError(f"{rule}: {type(error).__name__}: {' '.join(str(error).split())}"[:400]) from error


@contextmanager
def _arange_keeps_its_type(plain: Callable[..., Tensor]) -> Iterator[None]:
    """Let ``torch.arange`` be ``plain`` on the device where tensors are made.

    DeepSpeed's ``zero.Init`` has it give numbers of the model's type, which rounds the positions that rotary tables are of.
    Later versions of transformers have a remedy of their own, which earlier ones lack.
    """
    changed = torch.arange

    def arange(*args: Any, device: torch.device | str | None = None, **options: Any) -> Tensor:
        return plain(*args, device=torch.empty(0).device if device is None else device, **options)

    torch.arange = arange  # type: ignore[assignment]  # one signature for all
    try:
        yield
    finally:
        torch.arange = changed


def build_empty(config: PretrainedConfig, dtype: torch.dtype, context: AbstractContextManager[object]) -> PreTrainedModel:
    """Build the model with unset weights, every parameter made inside ``context`` (DeepSpeed's, under ZeRO-3).

    Buffers such as rotary tables are right already, in fp32 whatever ``dtype`` is.
    """
    with ExitStack() as stack:
        stack.enter_context(hf_init.no_init_weights())
        plain = torch.arange
        stack.enter_context(context)
        stack.enter_context(_arange_keeps_its_type(plain))
        model = _made(config, dtype)
    model.tie_weights()
    model.config.use_cache = False  # for training only; what is saved is the configuration from before
    return model


@torch.no_grad()
def initialise(model: PreTrainedModel, gather: Gather, seed: int) -> None:
    """Give every parameter its starting value by the model's own rules; equal for equal seeds, whatever the ranks.

    Only the parameters of one module and of its direct children are whole at a time: transformers' rules reach no deeper.
    """
    torch.manual_seed(seed)

    def visit(module: nn.Module, owner: PreTrainedModel) -> None:
        for child in module.children():
            visit(child, child if isinstance(child, PreTrainedModel) else owner)
        near = [*module.parameters(recurse=False)]
        for child in module.children():
            near += child.parameters(recurse=False)
        with gather(list(dict.fromkeys(near))) as writes:
            if writes or not near:
                with _on_host(near):
                    initialise_module(owner, module)

    with hf_init.guard_torch_init_functions():
        visit(model, model)


@contextmanager
def _on_host(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Have parameters of a device lie in the host's memory within: its generator draws other numbers for a seed than the CPU's.

    So a run begins with the same weights wherever they are kept, and whichever way of offloading has them.
    """
    away = [(parameter, parameter.data) for parameter in parameters if _is_on_device(parameter)]
    for parameter, there in away:
        parameter.data = there.to("cpu", copy=True)
    try:
        yield
    finally:  # what gathered them wants them back where they were, whatever happened
        for parameter, there in away:
            there.copy_(parameter.data)
            parameter.data = there


def _is_on_device(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cuda"


@torch.no_grad()
def fill(model: nn.Module, read: Callable[[str], torch.Tensor], gather: Gather, *, trained: bool = False) -> None:
    """Copy ``read(name)`` into every parameter, one whole at a time; only ranks that write read it.

    Args:
        trained: leave frozen parameters as they are.

    Raises:
        WeightNotFinite: a parameter would hold NaN or infinity.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta or (trained and not parameter.requires_grad):
            continue  # another pipeline stage holds it, or it stays as it is
        with gather([parameter]) as writes:
            if writes:
                source = read(name)
                parameter.copy_(source)
                check_finite(name, parameter, source)


def load_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model of a checkpoint, filled tensor by tensor.

    Raises:
        CheckpointError: the tensors are not those of config.json.
        WeightNotFinite: one is not finite in ``dtype``.
    """
    model = build_empty(config_of(checkpoint), dtype, nullcontext())
    tied = tied_names(model)
    checkpoint.check_tensors(shapes_of(model), tied=tied)
    with found_in(checkpoint.parts):
        fill(model, lambda name: read_for(checkpoint, checkpoint.resolve(name, tied), dtype), _always)
    nn.Module.eval(model)
    return model


def read_for(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a type that holds all of both its stored one and ``dtype``, so that casting it rounds once.

    What an adapter adds to a weight, or ranks to a sum, is otherwise rounded to the stored type first.
    """
    stored = checkpoint.tensors[name].dtype
    return (
        checkpoint.read(name, dtype=torch.promote_types(stored, dtype)) if stored.is_floating_point else checkpoint.read(name)
    )


@contextmanager
def _always(parameters: list[nn.Parameter]) -> Iterator[bool]:
    yield True


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What the weights of a checkpoint are computed in: as ``config.json`` says, else that of the first of them."""
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    found = getattr(torch, str(named), None)
    if isinstance(found, torch.dtype):
        return found
    return next((info.dtype for info in checkpoint.tensors.values() if info.dtype.is_floating_point), torch.float32)


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model a configuration makes, without memory for its parameters."""
    with torch.device("meta"):
        return _made(config)


def meta_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters a configuration makes, tied ones once, without making them."""
    return shapes_of(meta_model(config))


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and full shapes of all parameters, tied ones once, however they are partitioned."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Alias -> the name under which the one parameter is stored."""
    first: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    everyone: Iterable[tuple[str, nn.Parameter]] = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in everyone if first[id(p)] != name}


def decay_groups(model: nn.Module, weight_decay: float, *, only: Container[str] | None = None) -> list[dict[str, Any]]:
    """Parameters for the optimizer: matrices and embeddings decay, vectors (biases, norms) do not.

    Args:
        only: names of the parameters taken; unset: all.
    """
    shapes = shapes_of(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and (only is None or name in only)]
    decayed = [p for name, p in trained if len(shapes[name]) >= 2]
    others = [p for name, p in trained if len(shapes[name]) < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def saved_config(config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of a checkpoint of this model."""
    values: dict[str, Any] = config.to_dict()
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    values["architectures"] = [model_class.__name__]
    values["dtype"] = dtype_name(dtype)
    values["use_cache"] = True
    return values


def generation_defaults(config: PretrainedConfig, end_of_text_id: int) -> dict[str, Any]:
    """``generation_config.json`` of a new model: where generation begins and ends."""
    start = getattr(config, "bos_token_id", None)
    return {"bos_token_id": end_of_text_id if start is None else start, "eos_token_id": end_of_text_id}


def with_stops(generation: Mapping[str, Any], stop_ids: Iterable[int]) -> dict[str, Any]:
    """``generation_config.json`` that also ends generation at the tokens the training data's turns end with."""
    known = generation.get("eos_token_id")
    ids = list(known) if isinstance(known, list) else [] if known is None else [known]
    ids += [stop for stop in stop_ids if stop not in ids]
    return {**generation, **({"eos_token_id": ids if len(ids) > 1 else ids[0]} if ids else {})}
