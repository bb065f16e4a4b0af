# make demo: trains the example on a fresh machine.   make test: the tests.   make check: what CI runs.
# make more: what make test leaves out: the same properties over more models and plans.
# make faults: real faults injected into real runs, as a table; some minutes.
# make wide: the libraries of benchmarks/zoo_wide.py.
PYTHON ?= python3
VENV := .venv/bin
# Tests wait for ranks, timeouts and disks: three workers keep two cores busy.
WORKERS := $(shell expr 3 \* $$(getconf _NPROCESSORS_ONLN) / 2)
TESTS := $(VENV)/python -m pytest -n $(WORKERS) --maxprocesses 12 --dist loadfile
PIP := $(VENV)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check more faults wide clean

demo: .venv/demo
	$(VENV)/python examples/digits.py
	@echo "         . .venv/bin/activate                                puts meshfit on the path, for this shell"

# Tests start real processes and kill them: on a busy machine one may lose a race. What fails is run once more, alone.
test: .venv/dev
	$(TESTS) || { echo "again, one at a time, what failed:"; $(VENV)/python -m pytest --last-failed --last-failed-no-failures none; }

more: .venv/dev
	$(TESTS) -m more

faults: .venv/dev
	$(VENV)/python -m tests.faults

check: .venv/dev
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/pyright
	$(MAKE) test

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable ".[demo]"
	touch $@

.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps --upgrade --target .venv/torchvision torchvision
	command -v chromium >/dev/null || apt-get install -qq -y --no-install-recommends chromium >/dev/null || echo "no Chromium: tests of pages are skipped"
	touch $@ .venv/demo

wide: .venv/dev
	$(PIP) --editable ".[wide]"
	$(PIP) --no-deps neuraloperator tensorly tensorly-torch configmypy ruamel.yaml zencfg
	$(PIP) --no-deps --upgrade --target .venv/torchvision timm

# torchvision lies beside the environment: its wheel needs a CUDA torch, and transformers would stumble over it.
clean:
	rm -rf .venv runs
