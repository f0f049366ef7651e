#!/usr/bin/env python3
"""Does an exported folder load in transformers and compute the same logits as the checkpoint it came from?

    python scripts/compare_export.py SOURCE EXPORTED [--tolerance 0] [--tokens 256]

Prints the largest difference of the weights and of the logits (f32, CPU, random token ids, seeded), and exits with 1 where
the logits differ by more than the tolerance. An export in the source's own weight type must give 0. Needs torch and
transformers.
"""

import argparse
import pathlib

import torch
from transformers import AutoModelForCausalLM


def load(folder):
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {kind: sorted(names) for kind, names in report.items() if names}
    if wrong:
        raise SystemExit(f"{folder} does not load cleanly: {wrong}")
    return model.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("exported", type=pathlib.Path)
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    source, exported = load(arguments.source), load(arguments.exported)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(source.config.vocab_size, (1, arguments.tokens), generator=generator)
    with torch.no_grad():
        wanted = source(ids, use_cache=False).logits
        got = exported(ids, use_cache=False).logits
        weights = dict(exported.named_parameters())
        weight_difference = max((weights[name] - w).abs().max().item() for name, w in source.named_parameters())
    difference = (got - wanted).abs().max().item()
    agree = difference <= arguments.tolerance
    print(f"weights differ by at most {weight_difference:.3g}")
    print(f"logits differ by at most {difference:.3g}, their own size is up to {wanted.abs().max().item():.3g}")
    print(f"verdict: {'same' if agree else 'DIFFERENT'} (tolerance {arguments.tolerance:g})")
    raise SystemExit(0 if agree else 1)


if __name__ == "__main__":
    main()
