"""Shares a job among threads, as compiled code: in parts, of which each is done once."""

from .compiled import inlined
from .llvm import call_number, take


@inlined
def own_number(job, taken):
    """Return the index of this thread.

    OpenMP gives a thread the same index in every call, so it gets the same parts again and finds
    them in its own caches.
    """
    if job.threads == 1:
        return 0
    number = call_number(job.number) if job.number else take(taken + 8 * job.threads)
    return number % job.threads


@inlined
def next_part(job, taken, own):
    """Return a part that is not taken yet, one of thread `own` if possible; -1 if there is none."""
    for turn in range(job.threads):
        thread = (own + turn) % job.threads
        part = take(taken + 8 * thread)
        if part < job.parts:
            return thread * job.parts + part
    return -1


@inlined
def share_of(parts, total, part):
    """Return the first of `total` items in one of `parts` parts, and the one after its last."""
    return total * part // parts, total * (part + 1) // parts
