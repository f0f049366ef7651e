#!/usr/bin/env python3
"""Makes the golden adapters that the tests compare with: random LoRA adapters of golden models, run by PEFT.

    python scripts/golden_lora.py [crates/oomb/tests]

Needs what golden.py needs and peft; the committed files were made with torch 2.15.0, transformers 5.24.0, peft 0.21.2 and
safetensors 0.8.0 under Python 3.11. Running it again rewrites the same files.

For each adapter a folder golden_lora/NAME, for the model golden/NAME, with
    adapter_config.json         as PEFT saves it
    adapter_model.safetensors   as PEFT saves it, f32; both factors are random, so that every gradient says something
    grads.safetensors           d loss / d parameter for every parameter of the adapter, under the same names, f32
    golden.json                 loss (mean over the labels) and the loss of each label, for the ids in golden/NAME

Everything is computed in f64, and checked against f32, as in golden.py.
"""

import json
import pathlib
import shutil
import sys

import torch
from golden import exact
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# base -> LoraConfig
ADAPTERS = {
    "llama": dict(r=3, lora_alpha=6, target_modules=ALL_LINEAR),
    "qwen2": dict(r=5, lora_alpha=6, use_rslora=True, target_modules=["v_proj", "q_proj", "down_proj"]),
    "qwen3_packed": dict(r=1, lora_alpha=1.5, target_modules=["k_proj", "o_proj", "up_proj"]),
    "llama_wide": dict(r=8, lora_alpha=8, target_modules=ALL_LINEAR),
}


def adapted(base, settings, weights, dtype):
    """The base (folder, tensors) with the adapter's weights, or with PEFT's own where there are none yet."""
    folder, tensors = base
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in tensors.items():
            model.get_parameter(name).copy_(parameter)
    config = LoraConfig(task_type="CAUSAL_LM", **settings)
    model = get_peft_model(model, config, autocast_adapter_dtype=False).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in trained(model).items():
            if weights:
                parameter.copy_(weights[name])
    return model


def trained(model):
    """Parameters of the adapter, by the names under which PEFT saves them."""
    return {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}


def run(base, settings, weights, golden, dtype):
    """Loss, loss per label, and the adapter's gradients."""
    model = adapted(base, settings, weights, dtype)
    ids, documents = torch.tensor(golden["ids"]), golden["documents"]
    document = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    positions = torch.cat([torch.arange(length) for length in documents])
    visible = (document[:, None] == document[None, :]).tril()
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    logits = model(input_ids=ids[None], position_ids=positions[None], attention_mask=mask[None, None], use_cache=False).logits[0]
    labelled = (document[1:] == document[:-1]).nonzero()[:, 0]
    token_losses = torch.nn.functional.cross_entropy(logits[labelled], ids[labelled + 1], reduction="none")
    loss = token_losses.mean()
    loss.backward()
    assert logits.dtype == dtype
    return loss.item(), token_losses.detach(), {name: p.grad.clone() for name, p in trained(model).items()}


def golden_adapter(root, name, settings, generator):
    base, folder = root / "golden" / name, root / "golden_lora" / name
    golden = json.loads((base / "golden.json").read_text())
    base = base, load_file(base / "model.safetensors")  # before anything is made exact, which load_file does not understand
    weights = {}
    for key, parameter in trained(adapted(base, settings, None, torch.float32)).items():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        weights[key] = (noise * 0.7 * parameter.shape[1] ** -0.5).to(torch.float32)
    plain_loss, _, plain_grads = run(base, settings, weights, golden, torch.float32)
    with exact():
        loss, token_losses, grads = run(base, settings, weights, golden, torch.float64)
    assert abs(loss - plain_loss) < 1e-5 and abs(loss - golden["loss"]) > 1e-2, (name, loss, plain_loss, golden["loss"])
    for key, grad in grads.items():
        assert grad.abs().max() > 1e-4, f"{name}: the gradient of {key} says nothing"
        assert (grad - plain_grads[key]).abs().max() / grad.abs().max() < 1e-4, (name, key)
    model = adapted(base, settings, weights, torch.float32)
    model.peft_config["default"].base_model_name_or_path = f"golden/{name}"
    assert sorted(get_peft_model_state_dict(model)) == sorted(weights)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    saved = json.loads((folder / "adapter_config.json").read_text())
    saved["target_modules"].sort()  # PEFT has them in a set, whose order changes from run to run
    (folder / "adapter_config.json").write_text(json.dumps(saved, indent=2) + "\n")
    (folder / "adapter_model.safetensors").chmod(0o644)
    save_file({key: grad.to(torch.float32) for key, grad in grads.items()}, folder / "grads.safetensors")
    (folder / "grads.safetensors").chmod(0o644)
    (folder / "golden.json").write_text(json.dumps(dict(loss=loss, token_losses=token_losses.tolist())) + "\n")
    print(f"{name}: loss {loss:.6f}, {sum(w.numel() for w in weights.values())} parameters")


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "crates/oomb/tests")
    generator = torch.Generator().manual_seed(20260203)
    torch.set_num_threads(1)
    for name, settings in ADAPTERS.items():
        shutil.rmtree(root / "golden_lora" / name, ignore_errors=True)
        golden_adapter(root, name, settings, generator)


if __name__ == "__main__":
    main()
