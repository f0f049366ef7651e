#!/usr/bin/env python3
"""Does an adapter load in PEFT, and has the merged export the logits of base + adapter?

    python scripts/compare_adapter.py BASE ADAPTER MERGED [--tolerance 1e-3] [--tokens 256]

Prints the largest difference of the logits of MERGED (`oomb export --merge --dtype f32`) from those that PEFT computes, and how
far the adapter itself moves them (f32, CPU, random token ids, seeded). Exits with 1 where the former is more than the
tolerance, or where the latter is not larger. Needs torch, transformers and peft.
"""

import argparse
import pathlib
import warnings

import torch
from compare_export import load
from peft import PeftModel


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=pathlib.Path)
    parser.add_argument("adapter", type=pathlib.Path)
    parser.add_argument("merged", type=pathlib.Path)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    base, merged = load(arguments.base), load(arguments.merged)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(base.config.vocab_size, (1, arguments.tokens), generator=generator)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT only warns of missing and of unknown tensors
        plain = base(ids, use_cache=False).logits
        got = merged(ids, use_cache=False).logits
        wanted = PeftModel.from_pretrained(base, arguments.adapter).eval()(ids, use_cache=False).logits
    difference, moved = (got - wanted).abs().max().item(), (plain - wanted).abs().max().item()
    agree = difference <= arguments.tolerance < moved
    print(f"merged logits differ from PEFT's by at most {difference:.3g}, their own size is up to {wanted.abs().max().item():.3g}")
    print(f"the adapter moves the base's logits by up to {moved:.3g}")
    print(f"verdict: {'same' if agree else 'DIFFERENT'} (tolerance {arguments.tolerance:g})")
    raise SystemExit(0 if agree else 1)


if __name__ == "__main__":
    main()
