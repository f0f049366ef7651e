"""Shapes that both peers measure, as in the models' published config.json (and in crates/oomb/src/model/presets.rs)."""

# (vocabulary, width, FFN width, layers, heads, key and value heads, tied embeddings)
SHAPES = {
    "tiny": (256, 64, 192, 2, 2, 1, True),
    "qwen2.5-0.5b": (151_936, 896, 4864, 24, 14, 2, True),
    "qwen2.5-1.5b": (151_936, 1536, 8960, 28, 12, 2, True),
    "qwen2.5-3b": (151_936, 2048, 11_008, 36, 16, 2, True),
    "qwen2.5-7b": (152_064, 3584, 18_944, 28, 28, 4, False),
    "qwen2.5-14b": (152_064, 5120, 13_824, 48, 40, 8, False),
    "qwen2.5-32b": (152_064, 5120, 27_648, 64, 40, 8, False),
}


def tokens(text):
    """8192, 64K, 1M."""
    units = {"K": 1024, "M": 1024 * 1024}
    number, unit = (text[:-1], text[-1].upper()) if text[-1].upper() in units else (text, "")
    return int(number) * units.get(unit, 1)


def spread(seconds):
    """Median, fastest and slowest of samples."""
    ordered = sorted(seconds)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])
    return median, ordered[0], ordered[-1]
