"""What `vllm_process` uses of vLLM, with a model that needs no arithmetic: see `v1/engine/llm_engine`."""

from types import SimpleNamespace


class EngineArgs(SimpleNamespace):
    pass


class SamplingParams(SimpleNamespace):
    pass
