"""openvino-genai's continuous batching of the model in a GGUF file, without HTTP, for `benchmarks.serving.text`.

    .venv-text/bin/python -m benchmarks.peers.openvino_text FILE FOLDER SLOTS

It reads no weights in float32, so the file is written to FOLDER with those in float16; products and cache are float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import openvino_genai
from gguf.quants import dequantize

from benchmarks.talk import commands, say


def write_half(source: str, target: Path) -> None:
    """The same model with matrices in float16."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for each in reader.fields.values():
        if not each.name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            is_array = each.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(each.name, each.contents(), each.types[0], each.types[-1] if is_array else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    source, folder, slots = sys.argv[1:4]
    path = Path(folder, "float16.gguf")
    write_half(source, path)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 1, int(slots), int(slots) + 240
    hints: dict[str, Any] = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", hints)
    say(ready=True)
    for asked in commands():
        each = [openvino_genai.GenerationConfig(max_new_tokens=num, do_sample=False, ignore_eos=True)
                for num in asked["lengths"]]  # fmt: skip
        found = pipeline.generate(asked["texts"], each)
        say(num_answers=len(found))


if __name__ == "__main__":
    main()
