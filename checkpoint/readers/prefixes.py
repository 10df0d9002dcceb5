"""What a training script, or what it wraps a model in, put before the names of the model's tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from checkpoint.errors import CheckpointError
from checkpoint.layout import Stored

_EMBEDDINGS = (
    "model.decoder.embed_tokens.weight",
    "model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
    "transformer.wte.weight",
    "transformer.word_embeddings.weight",
    "decoder.embed_tokens.weight",
    "embed_tokens.weight",
    "embed_in.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
"""Whole names of a model's embedding, those that end with another one first: what stands before it is the prefix."""

_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""Parts of names that torch's wrappers around modules add."""

_OTHER_THINGS = frozenset(
    (
        *("optim", "optimizer", "optimizers", "lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "train_state", "ema"),
        *("state", "param_groups"),  # of an optimizer whose own tree was flattened
    )
)
"""First parts of names, in files whose weights have no prefix, of what is no weight."""

_MEGATRONS = re.compile(r"(?:.*\.)?decoder\.layers\..*(?:linear_fc1|linear_qkv)\.weight")


_ADAPTED = "base_model.model."
"""What peft puts before a model's own names."""


def chosen(names: Collection[str], prefix: str | None, table: str) -> dict[str, str]:
    """The tensors among ``names`` that are the model's: by the name without what the script put before it.

    Args:
        names: of all tensors in the files.
        prefix: what the user says the model's begin with; ``None`` to find it by the name of the embedding.
        table: the file that lists the names, for messages.

    Raises:
        CheckpointError: nothing begins with the prefix, none or several can be found, or two names become one.
    """
    if prefix is None:
        prefix = _found_prefix(names, table)
    bare: dict[str, str] = {}
    for name in names:
        if not name.startswith(prefix) or (not prefix and name.partition(".")[0] in _OTHER_THINGS):
            continue
        short = _unwrapped(name[len(prefix) :])
        if short in bare:
            raise CheckpointError(table, f"holds {bare[short]!r} and {name!r}, which are both the model's {short!r}")
        bare[short] = name
    if not bare:
        raise CheckpointError(table, f"holds no tensor whose name begins with {prefix!r}; it has {_some(names)}")
    return bare


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _before_embeddings(names: Collection[str]) -> set[str]:
    """What stands before the names of embeddings."""
    found: set[str] = set()
    for name in names:
        for embedding in _EMBEDDINGS:
            if name == embedding or name.endswith(f".{embedding}"):
                found.add(name.removesuffix(embedding))
                break
    return found


def _found_prefix(names: Collection[str], table: str) -> str:
    found = _before_embeddings(names)
    if any(".lora_A." in name for name in names) and not found:
        raise CheckpointError(
            table, "holds an adapter and not its base model; open what peft saved (adapter_model.safetensors)"
        )
    _refuse_by_names(names, table)
    plain = {prefix for prefix in found if prefix.partition(".")[0] not in _OTHER_THINGS}
    if len(plain) == 1:
        return plain.pop()
    if not plain:
        rule = f"has no embedding by a name that is known, so its weights cannot be told; it has {_some(names)}"
        raise CheckpointError(table, f"{rule}: say what theirs begin with (--weights-prefix)")
    listed = " or ".join(repr(prefix) for prefix in sorted(plain))
    raise CheckpointError(table, f"holds several models; say whether the weights begin with {listed} (--weights-prefix)")


def _refuse_by_names(names: Collection[str], table: str) -> None:
    """Refuse what no prefix would help, by names that tell whose it is."""
    if any(name.endswith("_flat_param") for name in names):
        rule = "holds flat parameters, each rank's part of FSDP's (LOCAL_STATE_DICT), which do not say what is in them"
        raise CheckpointError(table, f"{rule}; save the model with SHARDED_STATE_DICT or FULL_STATE_DICT")
    if any(_MEGATRONS.fullmatch(name) for name in names):
        rule = "holds the layers of Megatron-LM by its names, as its formats torch_dcp and fsdp_dtensor do, which are not read"
        raise CheckpointError(table, f"{rule}; save it with --ckpt-format torch_dist or torch")


def _some(names: Collection[str]) -> str:
    shown = sorted(names)[:4]
    return ", ".join(repr(name) for name in shown) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def without_prefix(places: Mapping[str, Stored], prefix: str | None, table: str) -> dict[str, Stored]:
    """Tensors of a save that is the trained module's own, by the names of the model inside.

    Args:
        prefix: what the user says the model's begin with; ``None`` to take away what stands before the embedding, where it
            stands before all names.

    Raises:
        CheckpointError: no name begins with the prefix.
    """
    if prefix is not None:
        return {name: places[key] for name, key in chosen(places, prefix, table).items()}
    # A save of an adapter alone has no embedding.
    found = _before_embeddings(places) or {name.partition(_ADAPTED)[0] for name in places if _ADAPTED in name}
    wrapper = found.pop().removesuffix(_ADAPTED) if len(found) == 1 else ""
    if not wrapper or not all(name.startswith(wrapper) for name in places):
        return dict(places)
    return {name.removeprefix(wrapper): stored for name, stored in places.items()}
