"""Turn a GGUF file into a plain model folder. Runs inside the engine image, on its transformers and torch.

python3 convert_gguf.py FOLDER FILE.gguf OUTPUT
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def convert(folder: str, gguf: str, output: str) -> None:
    """Read FOLDER/gguf and write configuration, weights, tokenizer and chat template to output."""
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    # What was read remembers that it came from a quantized file and refuses to be saved. So its weights
    # go into a fresh model of the same shape, which fails loudly should they not fit.
    config = AutoConfig.from_pretrained(folder, gguf_file=gguf)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config
    # Not bfloat16: with its few bits, and kernels compiled by inductor, this small model no longer knows
    # the capital of France. Not float32: vLLM turns that into bfloat16 unless told otherwise.
    plain.to(torch.float16).save_pretrained(output)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf).save_pretrained(output)


if __name__ == "__main__":
    convert(*sys.argv[1:4])
