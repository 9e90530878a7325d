"""Mutation testing: does a test fail when one operator, number or call of a file is changed?

`python -m tools.mutants spec` changes src/rotary/spec.py, one place at a time, runs the tests that
execute that place, quickest first, until one fails, and prints each change that no test notices.
Verdicts are kept in build/mutants: a run that was stopped goes on where it was, and `--survivors`
gives what no test noticed to more tests. `--percent 30` draws the same 30 % of the changes always.
A mutant is a fork of a process in which pytest has collected the tests. There every function of the
module gets the code of the changed source, so that nothing is imported again and no file written.
"""

import argparse
import ast
import copy
import functools
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "mutants"
TESTS = {  # of each file; the examples in its docstrings are tests too
    "spec": ("spec", "schedules", "wrong_calls"),
    "schedules": ("schedules", "spec", "angles"),
    "layouts": ("layouts",),
    "positions": (
        "positions",
        "positions_libraries",
        "positions_tie",
        "wrong_calls",
        "shard",
    ),
    "angles": (
        "angles",
        "rerotate",
        "wrong_calls",
        "jax::test_a_length_that_is_traced_is_refused",
        "jax::test_a_length_that_is_known_gives_the_scaled_tables_under_jit",
    ),
    "checkpoint/layers": ("checkpoint_plan",),
    "checkpoint/plan": ("checkpoint_plan", "checkpoint_names", "checkpoint_formats"),
    "rotate": ("rotate_spec", "wrong_calls", "few_tokens", "geometry"),
    "rerotate": ("rerotate", "moved_blocks", "wrong_calls"),
    "reach": ("reach", "cli_context"),
    "plan": ("plan", "cli_context"),
    "kernels/geometry": ("geometry", "rotate_spec", "wrong_calls"),
    "kernels/memory": ("memory", "prepare"),
    "kernels/stages": ("fused", "fused_torch", "wrong_calls"),
}
LOADED = {  # what tests import, once here and not in every mutant
    "schedules": ("transformers.modeling_rope_utils", "transformers.models.llama.modeling_llama"),
}
SECONDS = 2, 20  # of tests for one mutant, by their time without a change; for --survivors

_SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,  # codespell:ignore
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_NOT_RUN = {"annotation", "returns", "decorator_list", "bases", "exc", "cause"}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may stand in the place of this one."""
    match node:
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in _SWAPPED:
            yield _with(node, op=_SWAPPED[type(node.op)]())
        case ast.Compare():
            for index, op in enumerate(node.ops):
                swapped = _SWAPPED[type(op)]()
                yield _with(node, ops=[*node.ops[:index], swapped, *node.ops[index + 1 :]])
        case ast.UnaryOp():
            yield copy.copy(node.operand)
        case ast.Constant(value=bool(value)):
            yield _with(node, value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield _with(node, value=value + 1)
        case ast.Constant(value=str(value)):
            yield _with(node, value=value + "x")
        case ast.If() | ast.IfExp() if not isinstance(node.test, ast.Compare):
            yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield _with(node, value=ast.Constant(None))
        case ast.Call():
            for index in range(len(node.keywords)):
                yield _with(node, keywords=node.keywords[:index] + node.keywords[index + 1 :])
            if len(node.args) > 1:
                yield _with(node, args=node.args[:-1])
        case ast.Raise() | ast.Expr(value=ast.Call()) | ast.Continue():
            yield ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    vars(other).update(fields)
    return other


def is_left(field: str, node: object) -> bool:
    """Whether nothing is changed in a node: types, docstrings, decorators, words of messages."""
    match node:
        case ast.JoinedStr() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Subscript(value=ast.Name(id="Literal" | "Callable" | "tuple" | "type")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="warnings"), attr="warn")):
            return True
        case ast.BinOp(op=ast.BitOr()):  # a union of types
            return not any(isinstance(each, ast.Call | ast.Compare) for each in ast.walk(node))
        case ast.FunctionDef():
            return "overload" in map(ast.unparse, node.decorator_list)
    return field in _NOT_RUN or not isinstance(node, ast.AST)


def mutants(
    path: str, is_wanted: Callable[[str], bool]
) -> Iterator[tuple[str, range | None, types.CodeType]]:
    """Of each change: line:column and what it is; the lines of its statement; the file compiled."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    for holder, at, lines in places(tree):
        old = holder[at]
        for new in changes(old):
            was, now = (ast.unparse(each).split("\n")[0] for each in (old, new))
            if is_wanted(key := f"{old.lineno}:{old.col_offset}: {was}  ->  {now}"):
                holder[at] = ast.copy_location(new, old)
                code = compile(ast.fix_missing_locations(tree), path, "exec")
                holder[at] = old
                yield key, lines, code


def places(node: ast.AST, lines: range | None = None) -> Iterator[tuple[object, object, object]]:
    """(holder, index or field, lines of the statement, None where an import runs it) of each node
    that may change."""
    for field, value in ast.iter_fields(node):
        for at in range(len(value)) if isinstance(value, list) else [field]:
            holder, own = value if isinstance(value, list) else vars(node), lines
            if not is_left(field, child := holder[at]):
                if isinstance(child, ast.stmt) and (lines or isinstance(node, ast.FunctionDef)):
                    body = getattr(child, "body", None)
                    own = range(child.lineno, body[0].lineno if body else child.end_lineno + 1)
                yield holder, at, own
                yield from places(child, own)


def replace(old: dict[str, object], new: dict[str, object], module: str) -> None:
    """Give what is defined in one namespace the code and the values of another one."""
    for name, value in new.items():
        was, now = old.get(name), value
        for inner in ("fget", "__func__", "__wrapped__"):  # a property, a class method, a cache
            was, now = getattr(was, inner, was), getattr(now, inner, now)
        if isinstance(now, types.FunctionType) and isinstance(was, types.FunctionType):
            was.__code__, was.__defaults__ = now.__code__, now.__defaults__
            was.__kwdefaults__ = now.__kwdefaults__
        elif isinstance(now, type) and now.__module__ == module:
            replace(vars(was), vars(now), module)
        elif isinstance(old, dict) and not name.startswith("__"):
            old[name] = value
        getattr(old.get(name), "cache_clear", int)()


class Judge:
    """A plug-in of pytest: in the place of the run of the tests, a run of the mutants."""

    def __init__(self, name: str, percent: int, survivors: bool) -> None:
        self.name, self.percent, self.survivors = name, percent, survivors
        self.path = str(ROOT / "src" / "rotary" / f"{name}.py")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return False  # a file of tests that cannot be imported would notice every change
        module = importlib.import_module(f"rotary.{self.name.replace('/', '.')}")
        for each in LOADED.get(self.name, ()):
            importlib.import_module(each)
        gc.freeze()  # a collection in a mutant then has little to look at
        KEPT.mkdir(parents=True, exist_ok=True)
        kept = KEPT / f"{self.name.replace('/', '.')}.json"
        known = kept.with_suffix(".tests.json")
        if self.survivors or not known.exists():
            known.write_text(fork(functools.partial(self.recorded, session, module), 900))
        tests, failing = json.loads(known.read_text())
        for name in failing:
            print(f"left out, it fails where the statements are counted: {name}", flush=True)
        verdicts = json.loads(kept.read_text()) if kept.exists() else {}
        every = []

        def is_wanted(key: str) -> bool:
            every.append(key)
            if self.survivors:
                return verdicts.get(key, "killed") != "killed"
            return key not in verdicts and zlib.crc32(key.encode()) % 100 < self.percent

        for key, lines, code in mutants(self.path, is_wanted):
            items, seconds = [], 0.0
            able = (item for item in session.items if item.nodeid in tests)
            for item in sorted(able, key=lambda item: tests[item.nodeid][0]):
                own, ran = tests[item.nodeid]
                if seconds < SECONDS[self.survivors] and (
                    lines is None or not set(lines).isdisjoint(ran)
                ):
                    items, seconds = [*items, item], seconds + own
            job = functools.partial(fails_with, session, items, module, code)
            is_killed = fork(job, 10 + 5 * seconds) != "false"
            verdicts[key] = "killed" if is_killed else f"survived {len(items)} tests"
            if not is_killed:
                print(f"{self.name}:{key}  ({verdicts[key]})", flush=True)
            kept.write_text(json.dumps(verdicts, indent=0))
        ran = [verdicts[key] for key in every if key in verdicts]
        killed = ran.count("killed")
        share = f"{killed / len(ran):.1%}"
        print(f"| {self.name} | {len(every)} | {len(ran)} | {killed} | {share} |", flush=True)
        return True

    def recorded(
        self, session: pytest.Session, module: types.ModuleType
    ) -> tuple[dict[str, tuple[float, list[int]]], list[str]]:
        """Test -> its seconds and the statements it executes, by line; and the tests that fail.

        Without the tests that start a process: it would have the file without the change. Those of
        torch.compile fail, because Dynamo records no call of `__lines__.add`.
        """
        tests, failing, lines, started = {}, [], set(), []
        sys.addaudithook(lambda event, _: event == "subprocess.Popen" and started.append(event))
        module.__lines__, code = lines, probed(self.path)
        for item in session.items:
            put(module, code)  # what is kept in a cache would not be executed again
            begin = time.process_time()
            lines.clear()
            started.clear()
            if fails(session, [item]):
                failing.append(item.nodeid)
                session.testsfailed = 0
            elif not started:
                tests[item.nodeid] = time.process_time() - begin, sorted(lines)
        return tests, failing


def probed(path: str) -> types.CodeType:
    """The file, where every statement of a function first adds its line to `__lines__`."""
    tree, bodies = ast.parse(Path(path).read_text(encoding="utf-8")), {}
    for function in ast.walk(tree):
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            for value in vars(node).values():
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    bodies[id(value)] = value
    for body in bodies.values():
        body[:] = [each for statement in body for each in (
            *ast.parse(f"__lines__.add({statement.lineno})").body, statement)]  # fmt: skip
    return compile(ast.fix_missing_locations(tree), path, "exec")


def put(module: types.ModuleType, code: types.CodeType) -> None:
    """Give the module, where others hold it already, the functions and values of this code."""
    fresh = {name: value for name, value in vars(module).items() if name.startswith("__")}
    exec(code, fresh)
    replace(vars(module), fresh, module.__name__)


def fails(session: pytest.Session, items: list[pytest.Item]) -> bool:
    """Whether one of these tests fails."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return True
    return False


def fails_with(
    session: pytest.Session, items: list[pytest.Item], module: types.ModuleType, code: object
) -> bool:
    """Whether one of these tests fails, or the import, where the module has this code."""
    put(module, code)
    return fails(session, items)


def fork(job: Callable[[], object], seconds: float) -> str:
    """What `job` returns as JSON, in a fork; "" if it dies or takes longer, in processor time."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        limit = int(used + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        signal.alarm(900)  # for one that waits for ever
        with open(os.devnull, "w") as nothing, open(writing, "w") as pipe:
            os.dup2(nothing.fileno(), 1), os.dup2(nothing.fileno(), 2)
            try:
                json.dump(job(), pipe)
                pipe.flush()
            finally:
                os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def in_tests(name: str) -> str:
    """What pytest is given for the name of a test file, or of one test in it: "jax::test_x"."""
    file, *test = name.split("::")
    return "::".join([f"tests/test_{file}.py", *test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=TESTS)
    parser.add_argument("--percent", type=int, default=100, help="of the changes, always the same")
    parser.add_argument("--survivors", action="store_true", help="those of the last run")
    given = parser.parse_args()
    os.chdir(ROOT)
    # hypothesis neither shrinks nor keeps what it finds, and is given time
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutants", phases=phases, database=None, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    hypothesis.settings.load_profile("mutants")
    files = [f"src/rotary/{given.name}.py", *map(in_tests, TESTS[given.name])]
    options = "-q -s --tb=no --assert=plain --hypothesis-seed=0 -p no:cacheprovider -p no:xdist"
    plugin = Judge(given.name, given.percent, given.survivors)
    pytest.main([*options.split(), "-m", "not slow", *files], [plugin])


if __name__ == "__main__":
    main()
