"""`rotary doctor --distributed`: compares all ranks; rank 0 prints the result."""

import os
from typing import TYPE_CHECKING

import typer

from .app import read_spec
from .terminal import of_user, print_json, print_table

if TYPE_CHECKING:
    from ..ranks import Report
    from ..spec import Rotary

_LAUNCH = "torchrun --nproc-per-node=4 -m rotary doctor --distributed"


def examine_ranks(
    target: str | None, config: str | None, seq_len: int | None, layer_type: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Compare all ranks; rank 0 prints, and every rank exits with 1 if something is wrong."""
    if config is None:
        raise ValueError("--distributed needs --config: the config.json of the model")
    if target is not None and seq_len is None:
        raise ValueError("--seq-len is needed, to compare the positions with the whole sequence")
    if "RANK" not in os.environ:
        raise ValueError(f"--distributed must run on every rank: {_LAUNCH} ...")
    import torch
    import torch.distributed as dist

    spec = read_spec(config, layer_type)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    report = _report(spec, target, seq_len)
    if dist.get_rank() == 0:
        if as_json:
            print_json(report.to_dict())
        elif report.ok:
            typer.echo(str(report))
        else:
            rows = [(each.what, each.text) for each in report.findings]
            print_table(f"rotary doctor --distributed, {report.world} ranks", rows, ("", "found"))
    dist.barrier()  # torchrun ends all ranks as soon as one exits with 1
    dist.destroy_process_group()
    if not report.ok:
        raise typer.Exit(1)


def _report(spec: "Rotary", target: str | None, seq_len: int | None) -> "Report":
    from ..ranks import Finding, Report, compare, gathered

    arguments, failure = [], ""
    if target is not None:
        from ..blackbox.probe import one_line
        from ..identify import load

        try:
            with of_user():
                returned = load(target)()
            arguments = list(returned) if isinstance(returned, tuple) else [returned]
            if len(arguments) not in (1, 3) or any(each is None for each in arguments):
                raise ValueError("it must return positions, or (positions, cos, sin)")
        except (Exception, SystemExit) as error:  # whatever a stranger's file raises
            failure = one_line(error)
    failures = gathered(failure)
    findings = [
        Finding("function", (rank,), f"{target} failed on rank {rank}: {text}")
        for rank, text in failures.items()
        if text
    ]
    if findings:
        return Report(len(failures), tuple(findings))
    return compare(spec, *arguments, seq_len=seq_len)
