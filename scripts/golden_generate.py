#!/usr/bin/env python3
"""Makes crates/oomb/tests/golden/generated.json: what transformers generates greedily from the golden models.

    python scripts/golden_generate.py [crates/oomb/tests/golden]

Needs torch and transformers, as scripts/golden.py does, and the folders that it made. For each model a prompt and the tokens that
`model.generate` adds to it (f32, cache on, no end token), and the same with a sliding window: there without a cache, each token
from the whole sequence under an explicit mask. A prompt is taken only if at every step the best token leads the next by at least
MARGIN in logits, so that rounding cannot change the choice.
"""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM

PROMPT_TOKENS, NEW_TOKENS, WINDOW, MARGIN = 21, 60, 19, 2e-3


def dense(model, prompt):
    """Tokens, and the smallest lead of a chosen token."""
    out = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False, max_new_tokens=NEW_TOKENS,
        eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack([logits[0].topk(2).values for logits in out.logits])
    return out.sequences[0, PROMPT_TOKENS:].tolist(), (best[:, 0] - best[:, 1]).min().item()


def window(model, prompt):
    """The same, seeing the last WINDOW tokens only, the token's own included."""
    ids, lead = prompt.clone(), float("inf")
    for _ in range(NEW_TOKENS):
        at = torch.arange(len(ids))
        visible = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - WINDOW)
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        logits = model(input_ids=ids[None], attention_mask=mask[None, None], use_cache=False).logits[0, -1]
        best = logits.topk(2)
        lead = min(lead, (best.values[0] - best.values[1]).item())
        ids = torch.cat([ids, best.indices[:1]])
    return ids[PROMPT_TOKENS:].tolist(), lead


def fresh(folder):
    """A used model remembers the longest sequence that it saw, which matters to dynamic RoPE."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "crates/oomb/tests/golden")
    generator = torch.Generator().manual_seed(20260203)
    torch.set_num_threads(1)
    cases = []
    for folder in sorted(path for path in out.iterdir() if path.is_dir() and path.name != "qwen3_packed"):
        vocabulary = fresh(folder).config.vocab_size
        # A frequency that changes with every token cannot be compared with a pass over the whole sequence.
        kinds = [("all", dense)] + ([("window", window)] if "dynamic" not in folder.name else [])
        for kind, generate in kinds:
            for attempt in range(200):
                prompt = torch.randint(vocabulary, (PROMPT_TOKENS,), generator=generator)
                tokens, lead = generate(fresh(folder), prompt)
                if lead >= MARGIN and len(set(tokens[-16:])) > 2:
                    break
            else:
                raise SystemExit(f"{folder.name}: no prompt whose choices are clear")
            print(f"{folder.name} {kind}: prompt {attempt}, smallest lead {lead:.1e}, {len(set(tokens))} different tokens")
            selection = None if kind == "all" else WINDOW
            cases.append(dict(model=folder.name, window=selection, prompt=prompt.tolist(), generated=tokens))
    (out / "generated.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
