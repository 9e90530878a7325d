# Two commands do everything: `make demo` and `make test`. Each makes .venv and installs its needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test docs linkcheck debian quick lint types bench peers release clean

demo: .venv/core.stamp
	$(BIN)/rotary demo

# Threads that wait must not spin: two processes share the cores
test quick: export OMP_WAIT_POLICY = PASSIVE

test: .venv/dev.stamp debian
	$(BIN)/python -m pytest -n 2

quick: .venv/dev.stamp
	$(BIN)/python -m pytest -n 2 -m "not slow"

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

bench: .venv/dev.stamp
	$(BIN)/python -m benchmarks.run

# Other programs on every config, each in an environment of its own below .venv-peers; not in CI
peers: .venv/dev.stamp
	$(BIN)/python tests/peers/run.py
	$(BIN)/python tests/peers/hosts.py

# Wheel and sdist in dist/, checked and tried in empty environments; uploads nothing (RELEASE.md)
release: build/release.stamp
	build/release/bin/python -m tools.release $(RELEASE)

build/release.stamp:
	$(PYTHON) -m venv build/release
	build/release/bin/pip --disable-pip-version-check install --quiet build twine
	touch $@

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
