from typing import NamedTuple


class LoRARequest(NamedTuple):
    lora_name: str
    lora_int_id: int
    lora_path: str
