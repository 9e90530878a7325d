"""What workers that are killed do; it is light, for they import it once more afterwards."""

import json
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

from checkpoints import leftovers

from rotary.checkpoint.shards import write_shard
from rotary.fanout import run_batch


def die(*ignored):
    os.kill(os.getpid(), signal.SIGKILL)


def write_and_die(flag, batch):
    """Killed in the middle of a file; the next try says what the first one left."""
    (job,) = batch.jobs
    if flag.exists():
        flag.write_text(json.dumps(leftovers(job.target.parent)))
        return run_batch(batch)
    flag.touch()
    return write_shard(job, die)


def always_die(flag, batch):
    write_shard(batch.jobs[0], die)


def train_and_die(flag, batch):
    """Killed when the last checkpoint is whole, its unfinished file still there; then only read."""
    (task,) = batch.jobs
    if flag.exists():
        flag.write_text(json.dumps(sorted(os.listdir(Path(task.out) / "checkpoints"))))
        with mock.patch("experiments.lab.train._step", None):
            return run_batch(batch)
    with mock.patch.object(Path, "replace", lambda *paths: die(shutil.copy(*paths), flag.touch())):
        return run_batch(batch)
