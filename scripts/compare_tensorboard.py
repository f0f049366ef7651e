#!/usr/bin/env python3
"""Does TensorBoard's own reader see in a run's event files what metrics.jsonl says?

    python scripts/compare_tensorboard.py RUN

Prints how many values were compared, and exits with 1 where one is missing or differs by more than f32 does. Needs tensorboard.
"""

import argparse
import json
import pathlib

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FIELDS = {
    "loss/train": "loss",
    "loss/validation": "validation_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_per_second": "tokens_per_second",
    "epoch": "epoch",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    run = parser.parse_args().run
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    compared, wrong = 0, []
    for tag, field in FIELDS.items():
        wanted = {row["step"]: row[field] for row in rows if row.get(field) is not None}
        got = {event.step: event.value for event in events.Scalars(tag)} if tag in events.Tags()["scalars"] else {}
        for step in wanted.keys() | got.keys():
            compared += 1
            if step not in wanted or step not in got or abs(got[step] - wanted[step]) > 1e-6 * abs(wanted[step]):
                wrong.append(f"{tag}, step {step}: {got.get(step)} for {wanted.get(step)}")
    print(f"{compared} values of {len(FIELDS)} curves compared, {len(wrong)} wrong")
    raise SystemExit("\n".join(wrong) if wrong or not compared else 0)


if __name__ == "__main__":
    main()
