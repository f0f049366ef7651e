"""Attention through torch's scaled_dot_product_attention, forward and backward: the kernels a user would run instead of OOMB's.

Prints one JSON line per backend, case and direction: TFLOP/s of visible pairs (4 Dh H per pair forward, 10 backward, as
`oomb bench attention` counts) and milliseconds (median, min, max). See README.md beside this file.

    python scripts/peers/attention.py --shape qwen2.5-7b
    python scripts/peers/attention.py --heads 32 --kv-heads 8 --head-dim 128 --case 8K:128K
    python scripts/peers/attention.py --device cpu --tiny
"""

import argparse
import json
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from shapes import SHAPES, spread, tokens

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}


def case(text):
    """16K is a causal square; 8K:64K are 8K queries that all see 64K keys."""
    queries, _, keys = text.partition(":")
    return tokens(queries), tokens(keys) if keys else None


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b", help="for its heads")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--case", type=case, nargs="+", default=[(16384, None), (8192, 65536)], help=case.__doc__)
    parser.add_argument("--backend", choices=BACKENDS, nargs="+", default=["cudnn", "flash"])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--sample-seconds", type=float, default=0.1, help="least duration of one sample")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="cases for a quick check that this runs")
    args = parser.parse_args()
    _, width, _, _, heads, kv_heads, _ = SHAPES[args.shape]
    if args.heads is None:
        args.heads, args.kv_heads, args.head_dim = heads, kv_heads, width // heads
    elif args.kv_heads is None or args.head_dim is None:
        parser.error("--heads needs --kv-heads and --head-dim")
    if args.tiny:
        args.heads, args.kv_heads, args.head_dim, args.case = 4, 2, 32, [(128, None), (64, 256)]
        args.sample_seconds = 0.005
    if args.device == "cpu":
        args.backend = ["math"]
    return args


def time_calls(call, args):
    """Seconds of one call: as many calls between two waits as fill a sample."""

    def run(calls):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(1)
    calls = 1
    while (elapsed := run(calls)) < args.sample_seconds:
        calls = min(16 * calls, max(calls + 1, int(1.1 * calls * args.sample_seconds / max(elapsed, 1e-9))))
    return spread([run(calls) / calls for _ in range(args.samples)])


def measure(args, queries, keys, grouped):
    """Seconds forward and backward, and visible pairs; unless `grouped`, keys and values are repeated for every query head."""
    dtype = torch.bfloat16
    kv_heads = args.kv_heads if grouped else args.heads
    make = lambda heads, rows: torch.randn(1, heads, rows, args.head_dim, device=args.device, dtype=dtype).requires_grad_()
    causal = keys is None
    q, k, v = make(args.heads, queries), make(kv_heads, keys or queries), make(kv_heads, keys or queries)
    attend = lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=args.heads != kv_heads)
    with torch.no_grad():
        forward = time_calls(attend, args)
    out = attend()
    d_out = torch.randn_like(out)
    backward = time_calls(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True), args)
    pairs = queries * (queries + 1) // 2 if causal else queries * keys
    return forward, backward, pairs


def main():
    args = arguments()
    for backend in args.backend:
        for queries, keys in args.case:
            line = {
                "peer": f"torch sdpa {backend}",
                "hardware": torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device,
                "torch": torch.__version__,
                "heads": args.heads,
                "kv_heads": args.kv_heads,
                "head_dim": args.head_dim,
                "case": f"{queries} causal" if keys is None else f"{queries} x {keys}, all visible",
            }
            try:
                with sdpa_kernel([BACKENDS[backend]]):
                    try:
                        forward, backward, pairs = measure(args, queries, keys, grouped=True)
                    except RuntimeError:
                        # A backend without grouped heads gets them repeated, as transformers does.
                        line["repeated_kv_heads"] = True
                        forward, backward, pairs = measure(args, queries, keys, grouped=False)
            except RuntimeError as error:
                print(json.dumps(line | {"error": str(error).splitlines()[0]}), flush=True)
                continue
            for direction, seconds, flop in [("forward", forward, 4), ("backward", backward, 10)]:
                median, fastest, slowest = seconds
                milliseconds = {"median": 1e3 * median, "min": 1e3 * fastest, "max": 1e3 * slowest}
                tflops = flop * args.head_dim * args.heads * pairs / median / 1e12
                print(json.dumps(line | {"direction": direction, "milliseconds": milliseconds, "tflop_per_second": tflops}), flush=True)


if __name__ == "__main__":
    main()
