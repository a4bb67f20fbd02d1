#!/usr/bin/env bash
# If a run restarts on a machine whose clock is behind, TensorBoard shows no value of the restarted part.
#
# Version: TensorBoard 2.21.0. It reads the event files of a folder in the order of their names, which begin with the
# time of the clock, and at each start of a session it removes the values of earlier files from that step on. So the
# file of the restart is read first, and the first file, which begins at step 0, removes its values (directory_watcher.py
# and event_accumulator.py).
#
# It costs whoever resumes training on another machine, as elastic launchers and preempted jobs do: the curve ends where
# the first machine failed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorboard==2.21.0 "setuptools<81"
cat > "$folder/trial.py" <<'END'
import sys
from unittest import mock

import tensorboard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def write(folder, clock, steps, loss):
    with mock.patch("time.time", lambda: clock):
        writer = EventFileWriter(folder)
        writer.add_event(Event(wall_time=clock, step=steps[0], session_log=SessionLog(status=SessionLog.START)))
        for step in steps:
            value = Summary.Value(tag="loss", simple_value=loss)
            writer.add_event(Event(wall_time=clock + step, step=step, summary=Summary(value=[value])))
        writer.close()


def curve(folder, seconds_behind):
    write(folder, 2_000_000_000, range(8), loss=2.0)
    write(folder, 2_000_000_100 - seconds_behind, range(5, 10), loss=1.0)
    events = EventAccumulator(folder)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


print("TensorBoard", tensorboard.__version__)
right = curve(f"{sys.argv[1]}/right", seconds_behind=0)
behind = curve(f"{sys.argv[1]}/behind", seconds_behind=300)
print("clocks agree:       ", right)
print("300 seconds behind: ", behind)
sys.exit(right[-1] != (9, 1.0) or behind[-1] != (7, 2.0))
END
"$folder/venv/bin/python" "$folder/trial.py" "$folder" 2>/dev/null
