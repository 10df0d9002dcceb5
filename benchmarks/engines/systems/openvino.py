"""OpenVINO GenAI's continuous batching, with token ids in and out."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.engines.systems.answering import answer


class OpenVino:
    """A pipeline whose cache has the precision that OpenVINO chooses, and for a moment one in fp32 where it must be exact."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
        self._usual = self._pipeline({})

    def _pipeline(self, properties: dict[str, str]) -> Any:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        given = {
            "INFERENCE_PRECISION_HINT": self._settings["hint"],
            "INFERENCE_NUM_THREADS": str(self._settings["threads"]),
            **properties,
        }
        return openvino_genai.ContinuousBatchingPipeline(self._settings["model"], scheduler, "CPU", given)

    def generate(self, prompts: list[list[int]], tokens: int, exact: bool, every: float) -> list[list[int]]:
        """See ``Engine``."""
        pipeline = self._pipeline({"KV_CACHE_PRECISION": "f32"}) if exact else self._usual
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        if every:
            return self._one_by_one(pipeline, inputs, config, every)
        answers = pipeline.generate(inputs, [config] * len(prompts))
        return [list(map(int, answer.m_generation_ids[0])) for answer in answers]

    @staticmethod
    def _one_by_one(pipeline: Any, inputs: list[Any], config: Any, every: float) -> list[list[int]]:
        """Each prompt is added between two steps, once its time has come."""
        began, handles = time.perf_counter(), list[Any]()
        while len(handles) < len(inputs) or pipeline.has_non_finished_requests():
            while len(handles) < len(inputs) and time.perf_counter() - began >= len(handles) * every:
                handles.append(pipeline.add_request(len(handles), inputs[len(handles)], config))
            if pipeline.has_non_finished_requests():
                pipeline.step()
        return [list(map(int, handle.read_all()[0].generated_ids)) for handle in handles]

    def close(self) -> None:
        """Nothing to end."""


if __name__ == "__main__":
    answer(OpenVino)
