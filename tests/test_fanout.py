"""Executors: searches, conversions and sweeps give the same on all, though workers are killed."""

import contextlib
import functools
import itertools
import json
import multiprocessing.forkserver
import os
import pickle
import shutil
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import dask
import numpy as np
import pytest
import torch
from checkpoints import LAYERS, contents, converted, is_finished, leftovers, llama, name_of
from command import run
from distributed import Client, LocalCluster, versions
from experiments.e7_digits import run as digits
from experiments.lab import job as jobs
from experiments.lab import results, train
from experiments.lab.sweep import Run
from hypothesis import given
from hypothesis import strategies as st
from killed import always_die, train_and_die, write_and_die
from matplotlib.figure import Figure

from rotary import fanout
from rotary.analysis import comb, min_base, safe_base
from rotary.checkpoint import writing
from rotary.checkpoint.files import read_shard, state_of
from rotary.checkpoint.shards import Job, write_shard
from rotary.cli import cluster as door
from rotary.cli.cluster import cluster

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def environment():
    """As it was afterwards: a cluster with processes leaves one thread for OpenMP and MKL in it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.fixture(scope="module")
def two_workers(environment):
    """Forked from a process that has imported what they need, as are those after killed ones."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with mock.patch.dict(os.environ, threads):
        needed = [
            "distributed",
            "rotary.analysis.loops",
            "torch._dynamo",
        ]  # the last: of optimizers
        needed += ["experiments.e7_digits.run"]
        multiprocessing.set_forkserver_preload(needed)
        multiprocessing.forkserver.ensure_running()
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as made,
    ):
        yield made


@pytest.fixture
def address(two_workers):
    """The address of two workers that are at work, whatever a test before has killed."""
    with Client(two_workers, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
    return two_workers.scheduler_address


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A checkpoint, and what a plain conversion makes of it."""
    root = tmp_path_factory.mktemp("expected")
    source = llama(root / "a")
    converted(source, root / "b")
    return source, contents(root / "b")


class Around(Executor):
    """An executor that has another one call `instead(flag, batch)` where `chosen(batch)`."""

    def __init__(self, executor, instead, flag, chosen):
        self.executor, self.instead, self.flag, self.chosen = executor, instead, flag, chosen

    def submit(self, function, /, batch):
        if self.chosen(batch):
            return self.executor.submit(self.instead, self.flag, batch)
        return self.executor.submit(function, batch)


def is_second(batch):
    return batch.function is write_shard and batch.jobs[0].target.name == name_of(1)


# --- the rule itself ---


@given(st.lists(st.integers(0, 2**26), max_size=300))
def test_small_jobs_go_together_in_order_and_never_all_in_one(sizes):
    found = list(fanout.in_batches(sizes, lambda size: size))
    assert [size for batch in found for size in batch] == sizes
    most = min(fanout.BATCH_BYTES, sum(sizes) // fanout.MIN_BATCHES)
    assert all(len(batch) == 1 or sum(batch) <= most for batch in found)
    full = [sum(first) + second[0] for first, second in itertools.pairwise(found)]
    assert all(size > most for size in full), "what fits is put together"


def test_a_thousand_small_jobs_make_no_thousand_messages_and_still_serve_many_workers():
    assert 64 <= len(list(fanout.in_batches([10**6] * 1000, lambda size: size))) <= 70
    assert len(list(fanout.in_batches([10**6] * 20, lambda size: size))) == 20


class Pickling(Executor):
    """Everything is done when it is asked for, from what another process would be sent."""

    def submit(self, function, /, *arguments):
        function, *arguments = pickle.loads(pickle.dumps((function, *arguments)))
        future = Future()
        try:
            future.set_result(function(*arguments))
        except KeyError as error:
            future.set_exception(error)
        return future


def half(number):
    time.sleep(0.01)
    if number == 3:
        raise KeyError("three")
    return number / 2


def test_what_is_done_together_with_a_failure_is_told_before_it_is_raised():
    told = []
    with pytest.raises(KeyError, match="three"):
        fanout.fan_out(half, [1, 2, 3, 4], Pickling(), told.extend)
    assert told == [(1, 0.5), (2, 1.0), (4, 2.0)]


def test_a_failure_cancels_what_has_not_begun_and_keeps_what_runs():
    told = []
    with ThreadPoolExecutor(2) as pool, pytest.raises(KeyError, match="three"):
        fanout.fan_out(half, range(1, 200), pool, told.extend)
    assert {1, 2} <= {job for job, _ in told}
    assert all(result == job / 2 for job, result in told)
    assert len(told) < 20


# --- searches ---


def found_by(executor):
    bases = np.exp(np.random.default_rng(0).uniform(0, 12, 100))
    least = min_base(200, 64, executor=executor)
    return (
        least,
        safe_base(200, 64, start=least.base, executor=executor),
        comb(200, bases, 64, executor=executor).tolist(),
    )


def test_a_search_gives_the_same_bits_on_every_executor(address):
    wanted = found_by(None)
    assert {True, False} == set(wanted[2])
    with ThreadPoolExecutor(3) as threads:
        assert found_by(threads) == wanted
    assert found_by(Pickling()) == wanted
    with cluster(address) as workers:
        assert found_by(workers) == wanted


class Lazy(Executor):
    """Does a job when its result is asked for, and counts those that wait."""

    def __init__(self):
        self.made, self.most = [], 0

    def submit(self, function, /, *arguments):
        future = Future()
        whole = future.result

        def result():
            if not future.done():
                future.set_result(function(*arguments))
            return whole()

        future.result = result
        self.made.append(future)
        self.most = max(self.most, sum(not each.done() for each in self.made))
        return future


def test_a_search_asks_for_a_bounded_number_of_jobs_and_cancels_those_it_does_not_need():
    executor = Lazy()
    assert min_base(300, 64, executor=executor) == min_base(300, 64)
    assert 2 < executor.most <= 65
    assert all(future.done() for future in executor.made)
    assert any(future.cancelled() for future in executor.made)


# --- conversions ---


def test_a_ticket_is_void_when_its_conversion_is_over(tmp_path, expected):
    source, _ = expected
    (tmp_path / "b").mkdir()
    with writing.locked(tmp_path / "b") as ticket:
        job = Job(first_shard(source), tmp_path / "b" / name_of(0), {}, {}, ticket)
        assert write_shard(job).is_new
    for when, other in (("over", None), ("begun anew", "0" * 32)):
        (tmp_path / "b" / name_of(0)).unlink(missing_ok=True)
        if other:
            (tmp_path / "b" / writing.LOCK).write_text(other)
        with pytest.raises(OSError, match="is not the folder of this conversion on"):
            write_shard(job, lambda count: pytest.fail("it has read from the shard"))
        assert name_of(0) not in contents(tmp_path / "b"), when


def test_a_shard_does_not_appear_when_its_conversion_ends_while_it_is_written(tmp_path, expected):
    source, _ = expected
    (tmp_path / "b").mkdir()
    with writing.locked(tmp_path / "b") as ticket:
        job = Job(first_shard(source), tmp_path / "b" / name_of(0), {}, {}, ticket)
        with pytest.raises(OSError, match="or the conversion has ended"):
            write_shard(job, lambda count: (tmp_path / "b" / writing.LOCK).unlink(missing_ok=True))
        assert contents(tmp_path / "b") == {}


def first_shard(source):
    return read_shard(source / name_of(0))


@pytest.mark.parametrize("executor", [5, ThreadPoolExecutor])
def test_what_takes_no_jobs_is_refused_before_anything_is_written(tmp_path, expected, executor):
    source, _ = expected
    with pytest.raises(TypeError, match=r"^executor=.*pass one like ThreadPoolExecutor\(4\)$"):
        converted(source, tmp_path / "b", executor=executor)
    assert not (tmp_path / "b").exists()
    with pytest.raises(TypeError, match=r"^executor="):
        min_base(300, 64, executor=executor)


def test_dask_converts_to_the_same_bytes_each_time_it_is_asked(tmp_path, expected, address):
    source, whole = expected
    with Client(address, set_as_default=False) as client:
        for executor in (
            client.get_executor(),
            client.get_executor(),
            client.get_executor(pure=False),
        ):
            done = converted(source, tmp_path / "b", executor=executor)
            assert done.written == tuple(name_of(layer) for layer in range(LAYERS))
            assert contents(tmp_path / "b") == whole
            shutil.rmtree(tmp_path / "b")


def test_a_conversion_ends_when_a_worker_is_killed_in_the_middle_of_a_shard(
    tmp_path, expected, address, monkeypatch
):
    source, whole = expected
    lines, add = [], writing.add

    def counted(folder, written):
        lines.extend(written)
        add(folder, written)

    monkeypatch.setattr(writing, "add", counted)
    flag = tmp_path / "flag"
    with cluster(address) as workers:
        executor = Around(workers, write_and_die, flag, is_second)
        done = converted(source, tmp_path / "b", executor=executor)
    assert writing.LOCK in json.loads(flag.read_text())
    assert len(json.loads(flag.read_text())) >= 2, "the killed try has left a file"
    assert contents(tmp_path / "b") == whole
    assert sorted(lines) == list(done.written) == [name_of(layer) for layer in range(LAYERS)]
    assert leftovers(tmp_path / "b") == []


def test_a_shard_that_kills_every_worker_is_one_line_and_the_next_call_goes_on(
    tmp_path, expected, address, two_workers, monkeypatch
):
    source, whole = expected
    monkeypatch.setattr(two_workers.scheduler, "allowed_failures", 0)
    with (
        pytest.raises(OSError, match="one job has killed 1 workers; do they have enough") as caught,
        cluster(address) as workers,
    ):
        converted(source, tmp_path / "b", executor=Around(workers, always_die, None, is_second))
    assert "\n" not in str(caught.value)
    assert not is_finished(tmp_path / "b")
    assert leftovers(tmp_path / "b") == []
    assert name_of(1) not in contents(tmp_path / "b")
    assert name_of(1) in converted(source, tmp_path / "b").written
    assert contents(tmp_path / "b") == whole


def test_the_command_converts_on_a_cluster(tmp_path, expected, address, two_workers):
    before = two_workers.scheduler.transition_counter
    source, whole = expected
    layouts = ("--from", "half", "--to", "interleaved")
    done = run("convert", str(source), "b", *layouts, "--dask", address, "--json", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert two_workers.scheduler.transition_counter > before
    assert json.loads(done.out)["written"] == [name_of(layer) for layer in range(LAYERS)]
    assert contents(tmp_path / "b") == whole


def test_the_command_searches_a_base_on_a_cluster(address, two_workers, main):
    plan = functools.partial(main, "plan", "--context", "200", "--json")
    before = two_workers.scheduler.transition_counter
    here, there = plan(), plan("--dask", address)
    assert two_workers.scheduler.transition_counter > before
    assert (there.code, there.err) == (0, "")
    assert json.loads(there.out) == json.loads(here.out)


# --- sweeps ---


TINY = digits.SWEEP._replace(
    methods=("axial",), table=lambda rows: "", figure=lambda rows: Figure()
)


def swept(folder, monkeypatch, executor=None, seeds=2):
    """The rows of one method of the digits: runs of a few steps, at three rates or more."""
    monkeypatch.setattr(
        sys, "argv", ["run", "--quick", "--seeds", str(seeds), "--out", str(folder)]
    )
    jobs.carry_out(TINY, executor)
    rows = results.rows(folder / "results.jsonl")
    return sorted((without_time(row) for row in rows), key=lambda row: json.dumps(row["run"]))


def without_time(row):
    return {name: value for name, value in row.items() if name != "seconds"}


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as monkeypatch:
        rows = swept(tmp_path_factory.mktemp("one_by_one"), monkeypatch)
    torch.set_num_threads(before)
    return rows


@pytest.mark.slow
def test_a_sweep_ends_with_the_same_bits_when_a_worker_is_killed(
    tmp_path, address, one_by_one, monkeypatch, one_thread
):
    flag = tmp_path / "flag"
    with cluster(address) as workers:
        second = Run("axial", 0.03, 0)
        executor = Around(workers, train_and_die, flag, lambda batch: batch.jobs[0].run == second)
        rows = swept(tmp_path / "out", monkeypatch, executor)
    left = json.loads(flag.read_text())
    assert "axial 0.03 seed 0.pt" in left
    assert any(name.startswith("axial 0.03 seed 0.") and "unfinished" in name for name in left)
    assert rows == one_by_one
    assert len({json.dumps(row["run"]) for row in rows}) == len(rows) >= 6
    # Dask repeats a run whose worker dies before its result is dropped: others may leave one
    checkpoints = os.listdir(tmp_path / "out" / "checkpoints")
    assert not any(name.startswith("axial 0.03 seed 0.") for name in checkpoints)


def test_what_is_done_is_not_sent(tmp_path, one_by_one, monkeypatch, one_thread):
    with ThreadPoolExecutor(2) as threads:
        assert swept(tmp_path, monkeypatch, threads) == one_by_one
    assert os.listdir(tmp_path / "checkpoints") == []
    before = (tmp_path / "results.jsonl").read_bytes()
    swept(tmp_path, monkeypatch, executor=ThreadPoolExecutor)  # a class takes no job
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_runs_that_are_done_are_kept_when_another_one_fails(tmp_path, monkeypatch, one_thread):
    real = jobs.trained_elsewhere

    def failing(task):
        if task.run == Run("axial", 0.03, 0):
            raise RuntimeError("no memory")
        return real(task)

    monkeypatch.setattr(jobs, "trained_elsewhere", failing)
    with ThreadPoolExecutor(1) as one, pytest.raises(RuntimeError, match="no memory"):
        swept(tmp_path, monkeypatch, one)
    recipes = [row["run"]["recipe"] for row in results.rows(tmp_path / "results.jsonl")]
    done = [(recipe["learning_rate"], recipe["seed"]) for recipe in recipes]
    assert done[0] == (0.01, 0)
    assert (0.03, 0) not in done


def test_a_run_that_follows_from_something_else_on_a_worker_is_refused(one_thread):
    settings = digits.settings_of(digits.QUICK, digits.digits(), Run("none", 0.001, 0))
    task = jobs.Task("e7_digits", True, "python", Run("none", 0.001, 0),
                     {**settings, "sha256": "0"}, "nowhere", "cpu", 1)  # fmt: skip
    with pytest.raises(ValueError, match="follows from other settings on"):
        jobs.trained_elsewhere(task)


def test_torchrun_and_a_cluster_do_not_go_together(tmp_path, monkeypatch):
    these = train.Processes(0, 2, torch.device("cpu"))
    monkeypatch.setattr(jobs, "processes", lambda device: contextlib.nullcontext(these))
    with ThreadPoolExecutor(1) as one, pytest.raises(ValueError, match="take one of them"):
        swept(tmp_path, monkeypatch, one)


# --- clusters that will not do ---


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(door, "CONNECT", 1)


def test_without_dask_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ValueError, match=r"--dask needs distributed: pip install 'dask\[distr"):
        cluster("tcp://127.0.0.1:1").__enter__()


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("tcp://127.0.0.1:1", OSError, "no Dask scheduler answers within 1 s; is it running"),
        ("carrier-pigeon://x", ValueError, "not a Dask address such as tcp://host:8786"),
    ],
)
def test_an_address_where_nobody_is_is_one_line(address, kind, message, soon):
    with pytest.raises(kind, match=message) as caught:
        cluster(address).__enter__()
    assert str(caught.value).startswith(address)
    assert "\n" not in str(caught.value)


def test_the_command_ends_with_one_line_where_the_address_is_none():
    done = run("plan", "--context", "200", "--dask", "http://127.0.0.1:1")
    said = "error: http://127.0.0.1:1: not a Dask address such as tcp://host:8786\n"
    assert (done.code, done.out, done.err) == (1, "", said)


def test_a_cluster_without_workers_is_refused(soon):
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as empty,
        pytest.raises(OSError, match="no worker; start one: dask worker inproc"),
    ):
        cluster(empty.scheduler_address).__enter__()


@pytest.mark.parametrize(("theirs", "told"), [("0.0.1", "0.0.1"), (None, "not installed")])
def test_a_worker_with_another_version_is_refused(theirs, told):
    ours = dict.fromkeys(door.PACKAGES, "1.0")
    found = {
        "client": {"packages": ours},
        "workers": {"tcp://a": {"packages": ours},
                    "tcp://b": {"packages": {**ours, "rotary": theirs}}},
    }  # fmt: skip
    client = SimpleNamespace(get_versions=lambda packages: found)
    with pytest.raises(ValueError, match=f"worker tcp://b has rotary {told}, this machine has 1.0"):
        door._check_versions(client, door.PACKAGES)


def test_a_cluster_of_another_version_of_ours_is_refused(address, monkeypatch):
    with cluster(address, packages=("torch",)):
        pass
    real = versions._version_cached
    monkeypatch.setattr(versions, "_version_cached", lambda name: f"{real(name)}+ours")
    with pytest.raises(
        ValueError, match=r"worker tcp://\S+ has \w+ \S+, this machine has \S+\+ours; "
    ):
        cluster(address).__enter__()


def test_workers_that_do_not_see_our_files_are_refused_before_anything_is_written(
    tmp_path, expected, address
):
    source, _ = expected
    path = source / name_of(1)
    seen = {path: state_of(path)}
    with cluster(address, files=seen, folder=tmp_path / "new" / "b", modules=("rotary.configs",)):
        pass
    for asked, message in (
        (
            {"files": {path: state_of(path)._replace(inode=0)}},
            f"{path}: not the file of the calling",
        ),
        (
            {"files": {tmp_path / "gone": state_of(path)}},
            "gone: not the file of the calling machine",
        ),
        ({"modules": ("no_package.run",)}, "has no module 'no_package.run'; start it with"),
    ):
        with pytest.raises(ValueError, match=rf"worker tcp://\S+: .*{message}"):
            cluster(address, **asked).__enter__()
    assert os.listdir(tmp_path) == []


def test_a_folder_of_the_same_name_elsewhere_is_not_the_same_folder(tmp_path):
    here = (str(tmp_path), tmp_path.stat().st_ino)
    assert door.problem_of((), {}, here) == ""
    for wrong in ((here[0], 0), (str(tmp_path / "gone"), here[1])):
        assert "not the folder of the calling machine" in door.problem_of((), {}, wrong)


@pytest.mark.slow
def test_a_cluster_that_is_lost_is_one_line(tmp_path):
    """The scheduler is killed while a worker is at work."""
    program = """if True:
        import time
        from distributed import LocalCluster
        made = LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0",
                            protocol="tcp")
        print(made.scheduler_address, flush=True)
        time.sleep(100)
    """

    def killed(address):
        with cluster(address) as workers:
            process.kill()
            fanout.fan_out(time.sleep, [30], workers, print)

    with (
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process,
        pytest.raises(OSError, match="the connection is lost") as caught,
    ):
        killed(process.stdout.readline().decode().strip())
    assert "\n" not in str(caught.value)
