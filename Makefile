# Two commands do everything: `make demo` and `make test`. Each makes .venv and installs its needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test locked docs linkcheck debian quick lint types bench peers matrix coverage release audit clean

demo: .venv/core.stamp
	$(BIN)/rotary demo

# Threads that wait must not spin: two processes share the cores
test quick: export OMP_WAIT_POLICY = PASSIVE

test: .venv/dev.stamp debian
	$(BIN)/python -m pytest -n 3 --dist worksteal

quick: .venv/dev.stamp
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

lint: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

types: .venv/dev.stamp
	$(BIN)/mypy

docs: .venv/dev.stamp
	$(BIN)/python -m sphinx -W -n -q --keep-going -b html -d build/doctrees docs build/docs

# Every link to another site; needs a network, so it is not in CI. Links between pages are tested
linkcheck: .venv/dev.stamp
	$(BIN)/python -m sphinx -q --keep-going -b linkcheck -d build/doctrees docs build/linkcheck

# Which lines and branches the tests run, children too; two to three times as long as `make test`
coverage: .venv/dev.stamp debian
	$(PIP) "coverage>=7.10"
	# the tracer slows tests that have a time limit: what fails is shown, and the lines are too
	-$(BIN)/coverage run -m pytest -n 3 --dist worksteal
	$(BIN)/coverage combine --quiet
	mkdir -p build
	$(BIN)/coverage report --show-missing --include="$(CURDIR)/src/*" > build/coverage.txt
	tail -n 5 build/coverage.txt

bench: .venv/dev.stamp
	$(BIN)/python -m benchmarks.run

# Other programs on every config, each in an environment of its own below .venv-peers; not in CI
peers: .venv/dev.stamp
	$(BIN)/python tests/peers/run.py
	$(BIN)/python tests/peers/hosts.py

# Every version that is promised, each in an environment of its own (noxfile.py); not in CI's run
matrix: build/matrix.stamp
	build/matrix-tools/bin/nox
	build/matrix-tools/bin/python -m tools.versions

build/matrix.stamp:
	$(PYTHON) -m venv build/matrix-tools
	build/matrix-tools/bin/pip --disable-pip-version-check install --quiet nox
	touch $@

# Wheel and sdist in dist/, checked and tried in empty environments; uploads nothing (RELEASE.md)
release: build/release.stamp
	build/release/bin/python -m tools.release $(RELEASE)

build/release.stamp:
	$(PYTHON) -m venv build/release
	build/release/bin/pip --disable-pip-version-check install --quiet build twine cyclonedx-bom pip-audit
	touch $@

# .venv from files that have the hashes of requirements.lock, as CI has it: for Python 3.11 on Linux
# x86_64. pip stops at a file with another hash, or where the registry does not have it
locked:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip --disable-pip-version-check install --quiet --require-hashes --no-deps -r requirements.lock
	$(PIP) torch==2.13.0
	$(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/pip --disable-pip-version-check check
	touch .venv/core.stamp
	touch .venv/dev.stamp

# Known faults of what is pinned: asks PyPI about every package, and fails if it does not know one
audit: build/release.stamp
	build/release/bin/pip-audit --strict --no-deps --disable-pip -r requirements.lock

.venv/core.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/dev.stamp: .venv/core.stamp
	$(PIP) torch==2.13.0
	$(PIP) -e ".[dev]"
	touch $@

# Debian's Chromium, for the tests of the page, which skip without it, and the text of the experiments;
# left out where there is no root
debian:
	@{ command -v chromium && command -v bible; } >/dev/null || test "$$(id -u)" != 0 || { \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends \
		chromium fonts-liberation bible-kjv bible-kjv-text >/dev/null; }

clean:
	rm -rf .venv .venv-peers build dist .pytest_cache .mypy_cache .ruff_cache
