"""Writes crates/oomb/tests/golden/tensorboard.tfevents with TensorBoard's own writer: the same steps as tests/tensorboard.rs.
Needs `pip install tensorboard`."""
import pathlib

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

PATH = pathlib.Path(__file__).parent.parent / "crates/oomb/tests/golden/tensorboard.tfevents"
GIB = 2**30


def summary(step):
    loss = [("loss/train", 5.0 / step)] + ([("loss/validation", 4.75)] if step == 200 else [])
    rest = [("grad_norm", 1.5 * step), ("lr", 3e-4), ("tokens_per_second", 1638.5), ("memory_gib/device", 3 * GIB / 2 / GIB)]
    values = loss + rest + [("memory_gib/host", 0.0), ("epoch", 0.25 * step)]
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values])


with open(PATH, "wb") as file:
    writer = RecordWriter(file)
    writer.write(event_pb2.Event(wall_time=1.7e9, file_version="brain.Event:2").SerializeToString())
    for step in [1, 2, 200]:
        event = event_pb2.Event(wall_time=1.7e9 + step, step=step, summary=summary(step))
        writer.write(event.SerializeToString())
