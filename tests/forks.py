"""Runs programs in forks of a process that has imported torch, which takes seconds.

Reads a JSON document a line: the path of a program, its folder, and the environment of each process
to run it in. Writes one for each: the statuses, and what was said on stdout and on stderr.
"""

import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch._dynamo  # of optimizers
import torch.distributed.fsdp

import rotary  # noqa: F401  # its kernels for torch stay to be imported by the programs

SECONDS = 120  # after which a program has hung


def forked(program, folder, environment, out, err):
    """The process of a fork that runs a program as `python program` does."""
    child = os.fork()
    if child:
        return child
    signal.alarm(SECONDS)
    status = 1
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.chdir(folder)
        os.environ.update(environment)
        sys.argv, sys.path[0] = [program], str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        program, folder, environments = json.loads(line)
        with tempfile.TemporaryFile("a+") as out, tempfile.TemporaryFile("a+") as err:
            children = [forked(program, folder, each, out, err) for each in environments]
            ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            out.seek(0)
            err.seek(0)
            sys.stdout.write(json.dumps([ended, out.read(), err.read()]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
