"""Forward and backward of a Qwen2 shape with random weights through transformers: what a user would run instead of OOMB.

Prints one JSON line per length and per choice of gradient checkpointing: tokens per second (median, min, max of the repeats),
peak GiB, or that it ran out of memory. See README.md beside this file for what is compared and how.

    python scripts/peers/train_step.py --shape qwen2.5-7b --tokens 8K 16K 32K 64K 128K
    python scripts/peers/train_step.py --shape qwen2.5-7b --tokens 16K --optimizer adamw
    python scripts/peers/train_step.py --device cpu --tiny
"""

import argparse
import contextlib
import gc
import json
import time

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

from shapes import SHAPES, spread, tokens


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--tokens", type=tokens, nargs="+", default=[8192, 16384], help="lengths: 8192, 64K, 1M")
    parser.add_argument("--sequences", type=int, default=1, help="sequences of one batch")
    parser.add_argument("--checkpoint", choices=["on", "off", "both"], default="on", help="gradient checkpointing by layer")
    parser.add_argument("--optimizer", choices=["none", "adamw"], default="none", help="adamw: fused, moments in bf16")
    parser.add_argument("--liger", choices=["auto", "off", "require"], default="auto")
    parser.add_argument("--attention", choices=["cudnn", "flash", "any"], default="cudnn", help="SDPA's backend")
    parser.add_argument("--repeat", type=int, default=3, help="timed steps, after one that is not")
    parser.add_argument("--warm-up-tokens", type=tokens, help="length of the step that is not timed; the same where nothing is said")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a shape and lengths for a quick check that this runs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.tokens, args.checkpoint = "tiny", [64, 100], "both"
    if args.device == "cpu":
        args.attention = "any"
    return args


def apply_liger(choice):
    """Replaces transformers' kernels by Liger's; whether it did."""
    if choice == "off":
        return False
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2
    except ImportError:
        if choice == "require":
            raise
        return False
    apply_liger_kernel_to_qwen2(fused_linear_cross_entropy=True, cross_entropy=False, rope=True, rms_norm=True, swiglu=True)
    return True


class TiledCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of a linear head, in tiles of rows, gradients made in the forward: what Liger's fused loss does, in
    plain torch, so that a peer without Liger neither holds the logits nor computes them twice."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, tile_rows):
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, hidden.shape[0], tile_rows):
            rows = slice(start, start + tile_rows)
            logits = hidden[rows] @ weight.t()
            probabilities = torch.softmax(logits.float(), dim=-1)
            picked = labels[rows, None]
            loss -= probabilities.gather(1, picked).clamp_min(1e-38).log().sum()
            probabilities.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=torch.float32))
            d_logits = (probabilities / hidden.shape[0]).to(hidden.dtype)
            d_hidden[rows] = d_logits @ weight
            d_weight.addmm_(d_logits.t(), hidden[rows])
        ctx.save_for_backward(d_hidden, d_weight)
        return loss / hidden.shape[0]

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_loss, d_weight * d_loss, None, None


def make_model(args, checkpoint):
    vocabulary, width, ffn, layers, heads, kv_heads, tied = SHAPES[args.shape]
    config = transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=max(args.tokens),
        use_cache=False,
    )
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def loss_of(model, ids, liger):
    if liger:
        return model(input_ids=ids, labels=ids).loss
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    # As many rows as keep a tile of f32 probabilities at half a GiB.
    tile_rows = max(1, min(4096, (1 << 27) // model.config.vocab_size))
    return TiledCrossEntropy.apply(hidden, model.lm_head.weight, ids[:, 1:].flatten(), tile_rows)


def attention_backend(choice):
    if choice == "any":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION if choice == "cudnn" else SDPBackend.FLASH_ATTENTION])


def measure(model, optimizer, args, length, liger):
    on_gpu = args.device.startswith("cuda")
    lengths = [args.warm_up_tokens or length] + args.repeat * [length]
    seconds = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for step, tokens_now in enumerate(lengths):
        ids = torch.randint(model.config.vocab_size, (args.sequences, tokens_now), device=args.device)
        start = time.perf_counter()
        # The context holds for the backward too: checkpoints recompute there.
        with attention_backend(args.attention):
            loss = loss_of(model, ids, liger)
            loss.backward()
        if optimizer:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        if step > 0:
            seconds.append(time.perf_counter() - start)
    median, fastest, slowest = spread(seconds)
    count = args.sequences * length
    gib = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    rates = {"median": count / median, "min": count / slowest, "max": count / fastest}
    return {"tokens_per_second": rates, "seconds": median, "peak_gib": gib, "loss": loss.item()}


def main():
    args = arguments()
    liger = apply_liger(args.liger)
    out_of_memory = getattr(torch, "OutOfMemoryError", RuntimeError)
    for checkpoint in {"on": [True], "off": [False], "both": [True, False]}[args.checkpoint]:
        model = make_model(args, checkpoint)
        fused = args.device.startswith("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused) if args.optimizer == "adamw" else None
        for length in args.tokens:
            line = {
                "peer": "transformers",
                "hardware": torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "liger": liger,
                "attention": args.attention,
                "shape": args.shape,
                "tokens": length,
                "sequences": args.sequences,
                "checkpoint": checkpoint,
                "optimizer": args.optimizer,
            }
            try:
                line |= measure(model, optimizer, args, length, liger)
            except out_of_memory as error:
                line |= {"out_of_memory": str(error).splitlines()[0]}
            print(json.dumps(line), flush=True)
            model.zero_grad(set_to_none=True)
            gc.collect()
            if args.device.startswith("cuda"):
                torch.cuda.empty_cache()
        del model, optimizer


if __name__ == "__main__":
    main()
