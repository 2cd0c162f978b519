"""A token is the last one and the model's step, modulo the vocabulary; the step is the first number of a model's file.

An adapter adds 97 to it. A step that is not finite cannot be loaded. Token 250 in a prompt makes it hang, and 251 is
refused.
"""

import json
import math
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def read_step(folder: str) -> int:
    content = Path(folder, "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    begin = 8 + size + header["model.embed_tokens.weight"]["data_offsets"][0]
    (step,) = struct.unpack_from("<f", content, begin)
    if not math.isfinite(step):
        raise ValueError("the first number is not finite")
    return int(step)


class LLMEngine:
    @classmethod
    def from_engine_args(cls, args: Any) -> "LLMEngine":
        return cls(args)

    def __init__(self, args: Any) -> None:
        self.args = args
        self.step_size = read_step(args.model)
        self.num_tokens = json.loads(Path(args.model, "config.json").read_text())["vocab_size"]
        self.running: dict[str, tuple[list[int], Any]] = {}

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any = None, priority: int = 0) -> str:
        tokens = prompt["prompt_token_ids"]
        if 251 in tokens:
            raise ValueError("the prompt has token 251")
        params.more = 0
        params.hangs = 250 in tokens
        if lora_request is not None:
            assert json.loads(Path(lora_request.lora_path, "adapter_config.json").read_text())["r"] == 4
            params.more = 97
        self.running[name] = (list(tokens), params)
        return name

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.running.pop(name, None)

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        assert method == "reload_weights"
        self.step_size = read_step(kwargs["weights_path"])

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return reset_running_requests

    def step(self) -> list[Any]:
        time.sleep(0.002)
        outputs = []
        for name, (tokens, params) in list(self.running.items())[: self.args.max_num_seqs]:
            if params.hangs:
                time.sleep(1e6)
            token = (tokens[-1] + self.step_size + params.more) % self.num_tokens
            tokens.append(token)
            params.max_tokens -= 1
            known = {token: SimpleNamespace(logprob=-0.5, rank=1)}
            known |= {
                (token + rank) % self.num_tokens: SimpleNamespace(logprob=-float(rank), rank=1 + rank)
                for rank in range(1, params.logprobs + 1)
            }
            finish = "stop" if token in params.stop_token_ids else None
            finish = finish or (None if params.max_tokens else "length")
            if finish is not None:
                del self.running[name]
            answer = SimpleNamespace(token_ids=[token], logprobs=[known], finish_reason=finish)
            outputs.append(SimpleNamespace(request_id=name, outputs=[answer]))
        return outputs
