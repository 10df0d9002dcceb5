"""One rank's side of an exchange of weights: the new ones made ready while steps go on, taken between two of them."""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass, field
from typing import Final

import torch
from transformers import PretrainedConfig

from checkpoint import Checkpoint
from serve.config import ServerConfig
from serve.engine.plan import StepPlan, StepResult
from serve.errors import ConfigError, StartError
from serve.model.filling import Filling
from serve.model.weight_memory import gather_pages
from serve.worker import gpus, wire
from serve.worker.canary import forward_fault
from serve.worker.device_faults import is_out_of_memory
from serve.worker.kv_cache import LIBRARIES_BYTES
from serve.worker.loader import RankModel, Survey, opened, survey
from serve.worker.packing import Packing
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner

_NO_MATTER: Final = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Keys of config.json that say nothing about what is computed."""
_MOST_CHARACTERS: Final = 300

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Candidate:
    """A checkpoint that is like the one that is served."""

    config: ServerConfig
    checkpoint: Checkpoint
    survey: Survey
    number: int = 0
    values: list[Filling] | None = None
    """All of the rank's weights, where they were read beside those that serve."""
    before: list[Filling] = field(default_factory=list)
    """What they took the place of: kept until it is certain that they stay, and given back beside the steps."""


class Exchange:
    """Owns what the rank may compute with next.

    ``answer`` belongs to the thread that follows orders, ``take`` to the one that computes. The server sends a plan with
    ``swap`` only after every rank has answered that it is ready, and no order until it was carried out: so neither waits for
    the other.
    """

    def __init__(self, config: ServerConfig, model: RankModel, ranks: Ranks, runner: Runner, packing: Packing) -> None:
        self._config = config
        self._model = model
        self._ranks = ranks
        self._runner = runner
        self._packing = packing
        self._candidate: _Candidate | None = None

    def answer(self, order: wire.Look | wire.Prepare | wire.Forget) -> wire.Report:
        """Do what an order says."""
        try:
            match order:
                case wire.Look(config=config):
                    return self._look(config)
                case wire.Prepare(number=number, beside=beside):
                    return self._prepare(number, beside)
                case wire.Forget():
                    self._forget()
        except StartError as error:
            self._forget()
            return wire.Failed(str(error), configured=isinstance(error, ConfigError))
        except Exception as error:
            traceback.print_exc()
            self._forget()
            return wire.Failed(f"{type(error).__name__}: {error}", configured=False)
        return wire.Fine()

    def _look(self, config: ServerConfig) -> wire.Report:
        self._forget()
        self._packing.finish()  # what is free is counted, and mapped files of the old weights are given back
        checkpoint = opened(config, everything=False)
        try:
            found = survey(checkpoint, config, self._model.device)
            difference = _difference(self._model.survey, found)
        except BaseException:
            checkpoint.close()
            raise
        if difference:
            checkpoint.close()
            return wire.Differs(difference)
        self._candidate = _Candidate(config, checkpoint, found)
        device, kept = self._model.device, self._model.steps_bytes + LIBRARIES_BYTES
        gpus.give_back(device)  # where the last weights lay: nothing but steps would be put there again
        left = gpus.bytes_left(device, self._config.cache, kept)
        return wire.Alike(self._model.filler.num_bytes, left, checkpoint.step)

    def _prepare(self, number: int, beside: bool) -> wire.Report:
        candidate = self._candidate
        assert candidate is not None, "a checkpoint is looked at before it is prepared"
        candidate.number, candidate.values = number, None
        refused = self._read_beside(candidate) if beside else ""
        if candidate.values is None:
            gpus.give_back(self._model.device)
        return wire.NoRoom(refused) if refused else wire.Fine()

    def _read_beside(self, candidate: _Candidate) -> str:
        """Read all of the rank's weights beside those that serve; why there is no memory for them, or nothing."""
        try:
            candidate.values = list(self._model.filler.read(candidate.checkpoint, candidate.survey.blueprint))
            gather_pages()  # here, where nobody waits for it: the first steps on new weights have enough to do
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            candidate.values = None
            return _said(error)
        return ""

    def _forget(self) -> None:
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            candidate.checkpoint.close()

    def take(self, plan: StepPlan) -> StepResult | None:
        """Compute with the weights of the plan from now on, on all ranks or on none.

        ``None`` on every rank but the one that answers.

        Weights that were read already are taken by turning pointers. The others are read now, a layer in the place of the
        other, and the old ones read back where they cannot be.

        Raises:
            ConfigError: neither could be read.
        """
        candidate = self._candidate
        assert candidate is not None, "weights are prepared before they are taken"
        assert candidate.number == plan.swap, "other weights were prepared"
        self._runner.execute(StepPlan(step=plan.step, dropped=plan.dropped))
        graphs = self._runner.graphs
        if graphs is not None:
            graphs.forget()  # they hold the addresses of the weights
        if self._runner.narrow is not None:
            self._runner.narrow.forget()  # it holds a whole head
        refused = self._put(candidate)
        self._model.settle()
        refused = refused or forward_fault(self._model, self._ranks, self._runner)
        if refused:
            self._put_back(candidate)
            self._model.settle()
        else:
            self._config = candidate.config
        self._packing.go_on()
        if graphs is not None:
            graphs.capture()
        return StepResult(step=plan.step, refused=refused) if self._ranks.answers else None

    def _put(self, candidate: _Candidate) -> str:
        """Let the new weights take the old ones' places. Returns why they cannot, on some rank."""
        if candidate.values is not None:
            candidate.before = [value.put() for value in candidate.values]
            return ""
        why = ""
        try:
            self._read_into_place(candidate.checkpoint, candidate.survey)
        except StartError as error:
            why = str(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = _said(error)
        if why:
            _log.error("weights could not be read into their places: %s", why)
        elsewhere = "another rank could not read its weights, and its line in the log says why"
        return "" if self._ranks.smallest(int(not why)) else why or elsewhere

    def _put_back(self, candidate: _Candidate) -> None:
        for value in candidate.before:
            value.put()
        candidate.before = []
        if candidate.values is None:
            gpus.give_back(self._model.device)
            with opened(self._config, everything=False) as checkpoint:
                self._read_into_place(checkpoint, survey(checkpoint, self._config, self._model.device))

    def _read_into_place(self, checkpoint: Checkpoint, found: Survey) -> None:
        for value in self._model.filler.read(checkpoint, found.blueprint):
            value.put()


def _said(error: Exception) -> str:
    """The first line of an error, or that memory was wanting where it says nothing."""
    return str(error).strip().partition("\n")[0][:_MOST_CHARACTERS] or "out of memory"


def _difference(served: Survey, found: Survey) -> str:
    """In what a checkpoint is another model than the one that is served; empty where it only has other weights."""
    for what in ("max_model_len", "vocab_size", "eos_ids"):
        if getattr(served, what) != getattr(found, what):
            return f"{what} is {getattr(found, what)}, and {getattr(served, what)} is served"
    if served.family.name != found.family.name:
        return f"it is a {found.family.name}, and a {served.family.name} is served"
    if served.blueprint.dtype != found.blueprint.dtype:
        return f"its weights are {found.blueprint.dtype}, and {served.blueprint.dtype} is served"
    ours, theirs = _what_counts(served.model_config), _what_counts(found.model_config)
    keys = sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))
    if keys:
        return f"config.json has another {keys[0]}"
    if served.blueprint.aliases != found.blueprint.aliases or served.blueprint.transposed != found.blueprint.transposed:
        return "its tensors are tied or stored otherwise"
    return ""


def _what_counts(config: PretrainedConfig) -> dict[str, object]:
    return {key: value for key, value in config.to_dict().items() if key not in _NO_MATTER}
