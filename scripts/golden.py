#!/usr/bin/env python3
"""Makes the golden files that the tests compare with: tiny random models, run by transformers.

    python scripts/golden.py [crates/oomb/tests/golden]

Needs torch, transformers and safetensors; the committed files were made with torch 2.15.0, transformers 5.24.0 and
safetensors 0.8.0 under Python 3.11. Running it again rewrites the same files: every number comes from one seeded
generator on the CPU.

For each model a folder with
    config.json         in the style of transformers 4 or 5, so that both are read
    model.safetensors   weights, f32; norms and biases are random too, so that every gradient says something
    grads.safetensors   d loss / d parameter for every parameter, under the same names, f32
    golden.json         token ids, document lengths, loss (mean over the labels) and the loss of each label
and, in rope.json, the inverse frequencies of each RoPE type for shapes of real models.

Everything is computed in f64. transformers computes norms, softmax and RoPE in f32 whatever the model's dtype, which
would leave errors of 1e-7 in the reference itself; `exact()` therefore lets its `torch.float32` mean f64 meanwhile.
That changes no formula; the plain f32 model is run as well and must agree to f32 rounding.
"""

import contextlib
import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SEQUENCE_TOKENS = 37  # a multiple of no page or chunk length
VOCAB_SIZE = 61

LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=28,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_act="silu", rms_norm_eps=1e-5,
    max_position_embeddings=64, tie_word_embeddings=False, attention_bias=False, mlp_bias=False, initializer_range=0.02,
    torch_dtype="float32",
)  # fmt: skip
QWEN2 = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=20,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_act="silu", rms_norm_eps=1e-6,
    max_position_embeddings=64, tie_word_embeddings=True, use_sliding_window=False, sliding_window=64,
    max_window_layers=2, initializer_range=0.02, rope_theta=1000000.0, torch_dtype="float32",
)  # fmt: skip
QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=28,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_act="silu",
    rms_norm_eps=1e-6, max_position_embeddings=64, tie_word_embeddings=False, attention_bias=False,
    use_sliding_window=False, sliding_window=None, max_window_layers=3, initializer_range=0.02,
    rope_parameters=dict(rope_type="default", rope_theta=1000000.0), dtype="float32",
)  # fmt: skip
V4 = dict(rope_theta=10000.0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)

# name -> (config.json, document lengths). In llama_dynamic the sequence is longer than the original length.
MODELS = {
    "llama": ({**LLAMA, **V4, "rope_scaling": None}, [SEQUENCE_TOKENS]),
    "llama_tied": ({**LLAMA, **V4, "rope_scaling": None, "tie_word_embeddings": True}, [SEQUENCE_TOKENS]),
    "llama_linear": ({**LLAMA, **V4, "rope_scaling": dict(type="linear", factor=2.5)}, [SEQUENCE_TOKENS]),
    "llama_dynamic": (
        {**LLAMA, **V4, "max_position_embeddings": 16, "rope_scaling": dict(rope_type="dynamic", factor=3.0)},
        [SEQUENCE_TOKENS],
    ),
    "llama_llama3": (
        {**LLAMA, "rope_parameters": dict(**LLAMA3, original_max_position_embeddings=32, rope_theta=500.0)},
        [SEQUENCE_TOKENS],
    ),
    "llama_yarn": (
        {**LLAMA, **V4, "rope_scaling": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)},
        [SEQUENCE_TOKENS],
    ),
    "qwen2": (QWEN2, [SEQUENCE_TOKENS]),
    "qwen3": (QWEN3, [SEQUENCE_TOKENS]),
    "qwen3_packed": (QWEN3, [14, SEQUENCE_TOKENS - 14]),
}

# The same at a head dim that GPU kernels take, over several of their pages: made by a generator of their own, so that the others
# stay what they are.
WIDE = dict(hidden_size=32, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=256)
WIDE_MODELS = {
    "llama_wide": ({**LLAMA, **V4, **WIDE, "rope_scaling": None}, [150]),
    "qwen3_wide": ({**QWEN3, **WIDE, "num_hidden_layers": 2, "max_window_layers": 2}, [70, 93]),
}

BIG = {**LLAMA, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)

# name -> (config.json, sequence lengths)
ROPES = {
    "default": ({**BIG, "max_position_embeddings": 131072, "rope_theta": 1e6}, [100]),
    "linear": ({**BIG, "max_position_embeddings": 16384, "rope_theta": 1e4, "rope_scaling": dict(type="linear", factor=4)}, [100]),
    "dynamic": (
        {**BIG, "max_position_embeddings": 8192, "rope_theta": 1e4, "rope_scaling": dict(rope_type="dynamic", factor=2.0)},
        [100, 8192, 8193, 1048576],
    ),
    "llama3": (
        {**BIG, "max_position_embeddings": 131072, "rope_parameters": dict(**LLAMA3, original_max_position_embeddings=8192, rope_theta=5e5)},
        [100],
    ),
    "yarn": ({**BIG, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_scaling": YARN}, [100]),
    "yarn_attention_factor": (
        {**BIG, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_scaling": {**YARN, "attention_factor": 1.25}},
        [100],
    ),
    "yarn_mscale": (
        {**BIG, "max_position_embeddings": 163840, "rope_theta": 1e4, "rope_scaling": dict(
            type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=16, beta_slow=2, mscale=1.2, mscale_all_dim=0.8)},
        [100],
    ),
    "yarn_untruncated": (
        {**BIG, "max_position_embeddings": 131072, "rope_theta": 1.5e5, "rope_parameters": dict(
            **{**YARN, "factor": 32.0, "original_max_position_embeddings": 4096}, truncate=False, rope_theta=1.5e5)},
        [100],
    ),
    "yarn_original_defaults": (
        {**BIG, "max_position_embeddings": 32768, "rope_theta": 1e6, "rope_scaling": dict(rope_type="yarn", factor=8.0)},
        [100],
    ),
}  # fmt: skip


@contextlib.contextmanager
def exact():
    """Within, what transformers writes as float32 is float64."""
    single, method = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32 = torch.float = single
        torch.Tensor.float = method


def random_weights(model, generator):
    """Weights of a size at which attention and MLP both matter: norms around 1, biases of some 0.3."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() == 2:
            noise *= 0.6 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5
        else:
            noise = noise * 0.3 + (1.0 if "norm" in name else 0.0)
        yield name, noise.to(torch.float32)


def run(folder, weights, ids, documents, dtype):
    """Loss, loss per label, and gradients of a fresh model (a used one remembers the longest sequence it saw)."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    assert model.dtype == dtype and model.model.rotary_emb.inv_freq.dtype == dtype
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    positions = torch.cat([torch.arange(length) for length in documents])
    visible = (document[:, None] == document[None, :]).tril()
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    logits = model(input_ids=ids[None], position_ids=positions[None], attention_mask=mask[None, None], use_cache=False).logits[0]
    labelled = (document[1:] == document[:-1]).nonzero()[:, 0]  # the last token of a document predicts nothing
    token_losses = torch.nn.functional.cross_entropy(logits[labelled], ids[labelled + 1], reduction="none")
    loss = token_losses.mean()
    loss.backward()
    return loss.item(), token_losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def golden_model(folder, config, documents, generator):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shape = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    weights = dict(random_weights(shape, generator))
    ids = torch.randint(VOCAB_SIZE, (sum(documents),), generator=generator)
    plain_loss, _, plain_grads = run(folder, weights, ids, documents, torch.float32)
    with exact():
        loss, token_losses, grads = run(folder, weights, ids, documents, torch.float64)
    assert abs(loss - plain_loss) < 1e-5, (folder.name, loss, plain_loss)
    for name, grad in grads.items():
        assert grad.abs().max() > 1e-4, f"{folder.name}: the gradient of {name} says nothing"
        error = (grad - plain_grads[name]).abs().max() / grad.abs().max()
        assert error < 1e-4, (folder.name, name, error)
    if len(documents) > 1:
        check_documents(folder, weights, ids, documents, token_losses)
    single = torch.float32
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({name: grad.to(single) for name, grad in grads.items()}, folder / "grads.safetensors")
    golden = dict(ids=ids.tolist(), documents=documents, loss=loss, token_losses=token_losses.tolist())
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")
    print(f"{folder.name}: loss {loss:.6f}, {sum(w.numel() for w in weights.values())} parameters")


def check_documents(folder, weights, ids, documents, packed):
    """Packing must not change what each document's loss is alone."""
    start, alone = 0, []
    with exact():
        for length in documents:
            alone.append(run(folder, weights, ids[start : start + length], [length], torch.float64)[1])
            start += length
    error = (torch.cat(alone) - packed).abs().max()
    assert error < 1e-12, (folder.name, error)


def golden_rope(out):
    cases = []
    for name, (config, lengths) in ROPES.items():
        for length in lengths:
            parsed = AutoConfig.for_model(**json.loads(json.dumps(config)))
            kind = parsed.rope_parameters["rope_type"]
            function = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
            plain, _ = function(parsed, seq_len=length)
            with exact():
                inv_freq, scale = function(parsed, seq_len=length)
            assert inv_freq.dtype == torch.float64 and ((plain - inv_freq) / inv_freq).abs().max() < 2e-6, name
            cases.append(dict(name=name, config=config, sequence_tokens=length, inv_freq=inv_freq.tolist(), scale=scale))
    out.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "crates/oomb/tests/golden")
    torch.set_num_threads(1)
    for seed, models in [(20260202, MODELS), (20261201, WIDE_MODELS)]:
        generator = torch.Generator().manual_seed(seed)
        for name, (config, documents) in models.items():
            shutil.rmtree(out / name, ignore_errors=True)
            golden_model(out / name, config, documents, generator)
    golden_rope(out / "rope.json")


if __name__ == "__main__":
    main()
