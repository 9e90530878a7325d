"""The one trainer: plain PyTorch on a CPU, a GPU, or several processes under torchrun.

Everything random in step k follows from (seed, k, process), so there is no random state to keep: a
run that was killed goes on from its last checkpoint and ends with the very same bits.
"""

import contextlib
import dataclasses
import glob
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import nn
from torch.nn import functional

from .data import IGNORED, Batch, seed_of

Looks = list[dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained: AdamW, a linear warm-up, then half a cosine down.

    rows           of the global batch, whatever the number of processes
    weight_decay   of matrices; biases and norms have none
    clip           largest norm of the whole gradient
    final          share of the learning rate that is left at the end; 1 keeps it constant
    save_every     steps between checkpoints
    look_every     steps between looks at the held-out text
    """

    steps: int
    rows: int
    learning_rate: float
    seed: int
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    final: float = 0.0
    save_every: int = 100
    look_every: int = 100

    def rate(self, step: int) -> float:
        """The learning rate of a step.

        >>> recipe = Recipe(steps=300, rows=1, learning_rate=0.5, seed=0)
        >>> [round(recipe.rate(step), 3) for step in (0, 99, 100, 200, 299)]
        [0.005, 0.5, 0.5, 0.25, 0.0]
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        share = (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final + (1 - self.final) * share)


class Trained(NamedTuple):
    """The loss of every step in nats, what was seen at each look, and the time over all resumes."""

    losses: list[float]
    looks: Looks
    seconds: float


class Processes(NamedTuple):
    """Which process this is, of how many, and the device it computes on."""

    rank: int
    size: int
    device: torch.device


@contextlib.contextmanager
def processes(device: str = "cpu") -> Iterator[Processes]:
    """The processes that torchrun started, joined by gloo on CPUs and NCCL on GPUs; else just one.

    >>> with processes() as these:
    ...     these.rank, these.size, str(these.device)
    (0, 1, 'cpu')
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or sums differ by run
        torch.use_deterministic_algorithms(True)
    count, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else "cpu"
    if count == 1:
        yield Processes(0, 1, torch.device(local))
        return
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Processes(rank, count, torch.device(local))
        dist.barrier()  # gloo aborts a process whose peer has left
    finally:
        dist.destroy_process_group()


def train(
    model: nn.Module,
    batches: Callable[[int], Batch],
    recipe: Recipe,
    checkpoint: Path,
    look: Callable[[Any], dict[str, float]],
    these: Processes,
    title: str = "training",
) -> Trained:
    """Train `model` in place, from its checkpoint if there is one; the loss is cross-entropy.

    batches  the global batch of a step: a function of the step alone
    look     numbers of the model at every `look_every` steps and at the end, in evaluation mode
    title    of the bar on stderr; there is none without
    Every process takes an equal share of the rows. Raises ValueError if it cannot, and for the
    checkpoint of another run.
    """
    if recipe.rows % these.size:
        raise ValueError(f"{recipe.rows} rows cannot be shared by {these.size} processes")
    model.to(these.device).train()
    optimizer = _optimizer(model, recipe)
    first, losses, looks, seconds = _resumed(checkpoint, model, optimizer, recipe)
    losses = losses.to(these.device)
    shared = nn.parallel.DistributedDataParallel(model) if these.size > 1 else model
    started = time.monotonic() - seconds
    with progress(title, recipe.steps, first, title != "" and these.rank == 0) as advance:
        for step in range(first, recipe.steps):
            torch.manual_seed(seed_of(recipe.seed, step, these.rank))
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            losses[step] = _step(shared, batches(step), optimizer, recipe, these)
            done, last = step + 1, step + 1 == recipe.steps
            if done % recipe.look_every == 0 or last:
                looks.append({"step": done, **_looked(model, look)})
            if done % recipe.save_every == 0 or last:
                seconds = time.monotonic() - started
                if these.rank == 0:
                    _save(checkpoint, model, optimizer, recipe, done, losses, looks, seconds)
            advance()
    if these.rank == 0:
        for left in checkpoint.parent.glob(f"{glob.escape(checkpoint.stem)}.*.unfinished"):
            left.unlink(missing_ok=True)  # of a process that was killed
    return Trained(losses.tolist(), looks, seconds)


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def _step(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    these: Processes,
) -> torch.Tensor:
    """One update; the mean loss over all targets of the global batch, before it."""
    asked = (batch.targets != IGNORED).sum().item()
    share = slice(these.rank * recipe.rows // these.size,
                  (these.rank + 1) * recipe.rows // these.size)  # fmt: skip
    tokens, targets = (part[share].to(these.device) for part in batch)
    logits = model(tokens).flatten(0, 1)
    total = functional.cross_entropy(
        logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    loss = total / asked
    (loss * these.size).backward()  # DistributedDataParallel takes the mean of the processes
    nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    if these.size > 1:
        dist.all_reduce(loss)
    return loss


def _looked(model: nn.Module, look: Callable[[nn.Module], dict[str, float]]) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        found = look(model)
    model.train()
    return found


def _resumed(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe
) -> tuple[int, torch.Tensor, Looks, float]:
    """Steps done, losses, looks and seconds; model and optimizer are set to where they were."""
    if not checkpoint.exists():
        return 0, torch.full((recipe.steps,), math.nan), [], 0.0
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    if saved["run"] != _run(model, recipe):
        raise ValueError(
            f"{checkpoint.name} is the checkpoint of another run, {saved['run']}; delete it"
        )
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["done"], saved["losses"], saved["looks"], saved["seconds"]


def _run(model: nn.Module, recipe: Recipe) -> str:
    return f"{getattr(model, 'config', type(model).__name__)}, {recipe}"


def _save(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    done: int,
    losses: torch.Tensor,
    looks: Looks,
    seconds: float,
) -> None:
    """A whole checkpoint or the old one, whenever the process is killed or the power fails."""
    content: dict[str, Any] = {
        "run": _run(model, recipe),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "done": done,
        "losses": losses.cpu(),
        "looks": looks,
        "seconds": seconds,
    }
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    unfinished = checkpoint.with_suffix(f".{secrets.token_hex(8)}.unfinished")
    with open(unfinished, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(checkpoint)
    folder = os.open(checkpoint.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def progress(title: str, steps: int, first: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr, of which `first` steps are done; what is given advances it by one."""
    columns = (*Progress.get_default_columns()[:3], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(title, total=steps, completed=first)
        yield lambda: bar.advance(task)
