#!/usr/bin/env python3
"""The loss of a checkpoint on a stretch of text, by transformers in f32 on the CPU: what `oomb eval` must reproduce.

    python scripts/reference_loss.py CHECKPOINT TEXT [--from-character 100000] [--tokens 2048]

The text from that character on is tokenized with the checkpoint's tokenizer.json, no special tokens added, and cut to
that many tokens; the loss is the mean over all but the first. Needs torch, transformers and tokenizers.
"""

import argparse
import pathlib

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--from-character", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")[arguments.from_character :]
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: arguments.tokens]
    if len(ids) < arguments.tokens:
        raise SystemExit(f"wanted {arguments.tokens} tokens, the text from there has {len(ids)}")
    ids = torch.tensor([ids])
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    print(f"{loss:.6f}")


if __name__ == "__main__":
    main()
