"""Fine-tune a model of Hugging Face on texts: all of it, or adapters of LoRA.

    shoal run finetune model=./SmolLM2 data=texts.jsonl
    shoal run finetune model=./SmolLM2 data=texts.jsonl lora.rank=8 packing=true max_length=1024
    shoal run finetune model=smollm2@champion data=chats.jsonl lora.rank=8 merge=true
    shoal run finetune kind=sequence_classification model=./bert data=reviews.jsonl labels='[bad,good]'
    shoal run finetune model=./SmolLM2 data=texts.jsonl parallel=fsdp workers=2 parallel.precision=bf16
    python -m shoal.train task=finetune model=./SmolLM2 data=texts.jsonl  # in this process, without Ray

The model is a folder with config.json, a GGUF file, or a version of the registry; a line of the data is
{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}. All other overrides are fields of the spec.
"""

from shoal.libs.hf.finetune import choose_spec, make_spec, translate

__all__ = ["choose_spec"]

if __name__ == "__main__":
    from shoal.flows.training import train_main

    train_main(make_spec, translate)
