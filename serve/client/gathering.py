"""Puts the events of a request, as they come one by one, together to the answer that they make."""

from __future__ import annotations

from serve.client.errors import TesseraError
from serve.client.results import Completion, Delta, Finish, Generated, PromptInfo
from serve.v1 import inference_pb2


class Gatherer:
    """Puts the events of one request together."""

    def __init__(self, request_id: str, num_sequences: int) -> None:
        self._request_id = request_id
        self._num_sequences = num_sequences
        self._prompt: PromptInfo | None = None
        self._deltas: dict[int, list[Delta]] = {}
        self._finishes: dict[int, Finish] = {}
        self.error: TesseraError | None = None

    def add(self, item: PromptInfo | Delta | Finish | TesseraError) -> None:
        match item:
            case PromptInfo():
                self._prompt = item
            case Delta():
                self._deltas.setdefault(item.index, []).append(item)
            case Finish():
                self._finishes[item.index] = item
            case TesseraError():
                self.error = item

    def result(self, otherwise: TesseraError | None = None) -> Generated | TesseraError:
        """The whole answer, or how the request failed.

        Args:
            otherwise: what to say of a request that had no end because its call had none.
        """
        if self.error is not None:
            return self.error
        if self._prompt is None or len(self._finishes) < self._num_sequences:
            return otherwise or TesseraError("INTERNAL", "the server ended the call without ending this request")
        return Generated(self._request_id, self._prompt, tuple(map(self._completion, sorted(self._finishes))))

    def _completion(self, index: int) -> Completion:
        deltas = self._deltas.get(index, [])
        return Completion(
            index=index,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            finish=self._finishes[index],
        )


def gatherer_for(message: inference_pb2.GenerateRequest) -> Gatherer:
    """What will gather the events of this request."""
    sampling = message.sampling
    return Gatherer(message.request_id, sampling.num_sequences if sampling.HasField("num_sequences") else 1)
