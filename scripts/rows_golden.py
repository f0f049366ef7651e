#!/usr/bin/env python3
"""Makes the files of rows that the tests read: written by pyarrow and zstandard, so that the readers are compared with others.

    python scripts/rows_golden.py [crates/oomb/tests/golden_rows]

Needs pyarrow and zstandard; the committed files were made with pyarrow 26.0.1 and zstandard 0.25.0 under Python 3.11.

    texts.parquet   id (int64) and text (string, one of them null) in two row groups, Snappy
    talks.parquet   messages (list of role, content, name and tool_calls, null where there are none), gzip
    texts.jsonl.zst the texts as JSON lines, in two frames with a skippable one between them
"""

import json
import pathlib
import struct
import sys

import pyarrow
import pyarrow.parquet
import zstandard

TEXTS = ["The first text.", "", "Größe: 5 km², 中文 🦀", None, "The last."]
CALL = dict(function=dict(name="sky", arguments=dict(place="Köln", day=None)))
TALKS = [
    [dict(role="user", content="Hello"), dict(role="assistant", content="Hi")],
    [dict(role="system", content="Be brief."), dict(role="user", content="Sky?"), dict(role="assistant", content=None, tool_calls=[CALL])],
    [dict(role="user", content="Nobody answers")],
]


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "crates/oomb/tests/golden_rows")
    out.mkdir(parents=True, exist_ok=True)
    texts = pyarrow.table(dict(id=list(range(len(TEXTS))), text=TEXTS))
    pyarrow.parquet.write_table(texts, out / "texts.parquet", compression="snappy", row_group_size=3)
    function = pyarrow.struct([("name", "string"), ("arguments", pyarrow.struct([("place", "string"), ("day", "int64")]))])
    message = [("role", "string"), ("content", "string"), ("name", "string"), ("tool_calls", pyarrow.list_(pyarrow.struct([("function", function)])))]
    talks = pyarrow.array(TALKS, pyarrow.list_(pyarrow.struct(message)))
    pyarrow.parquet.write_table(pyarrow.table(dict(messages=talks)), out / "talks.parquet", compression="gzip")
    lines = [json.dumps(dict(text=text), ensure_ascii=False).encode() + b"\n" for text in TEXTS]
    frames = [zstandard.compress(b"".join(part)) for part in (lines[:2], lines[2:])]
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"notes"
    (out / "texts.jsonl.zst").write_bytes(frames[0] + skippable + frames[1])


if __name__ == "__main__":
    main()
