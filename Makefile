# Every target works from a fresh clone: the first one to need it sets up .venv. `make help` lists them all.
#   NPROC=4        number of ranks for demo and labs (2)
#   PYTHON=...     the interpreter that .venv is made with (python3)
#   ARGS=...       more arguments, e.g. make test ARGS="-k zero2 -x"
SHELL := bash
NPROC ?= 2
PYTHON ?= python3
ARGS ?=
PY := .venv/bin/python

# The stamp's name holds a checksum of what the set-up depends on, so any change of it asks for a new set-up.
INPUTS := $(shell { cat pyproject.toml constraints.txt scripts/setup.sh; pwd; } | cksum | cut -d ' ' -f 1)
READY := .venv/ready-test-$(INPUTS)
BENCH_READY := .venv/ready-bench-$(INPUTS)

.PHONY: help setup demo test lab-00 lab-01 lab-02 lab-03 lab-04 bench lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## make .venv with the pinned dependencies (the other targets do it by themselves)

demo: $(READY) ## train a small GPT under DP, ZeRO-1, ZeRO-2, ZeRO-3; table, plots, results/demo/report.json
	@$(PY) -m zero_course.demo --nproc $(NPROC) $(ARGS)

test: $(READY) ## run the test suite
	@$(PY) -m pytest $(ARGS)

lab-00: $(READY) ## the memory wall: what a model costs, predicted and measured
	@$(PY) labs/lab_00_memory_wall/lab.py --nproc $(NPROC) $(ARGS)

lab-01: $(READY) ## data parallel: bytes by formula, ledger and interface counters; overlap
	@$(PY) labs/lab_01_data_parallel/lab.py --nproc $(NPROC) $(ARGS)

lab-02: $(READY) ## ZeRO-1: the optimizer states in shards
	@$(PY) labs/lab_02_zero1/lab.py --nproc $(NPROC) $(ARGS)

lab-03: $(READY) ## ZeRO-2: the gradients too
	@$(PY) labs/lab_03_zero2/lab.py --nproc $(NPROC) $(ARGS)

lab-04: $(READY) ## ZeRO-3: the parameters too
	@$(PY) labs/lab_04_zero3/lab.py --nproc $(NPROC) $(ARGS)

bench: $(BENCH_READY) ## compare speed and memory with DDP, FSDP2 and DeepSpeed; results/bench/report.json
	@$(PY) bench/bench.py $(ARGS)

lint: $(READY) ## check style
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: $(READY) ## format the code and mend what can be mended by machine
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

clean: ## remove results and caches (.venv stays; rm -r .venv removes it)
	@rm -rf results runs build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(READY):
	@PYTHON=$(PYTHON) scripts/setup.sh test $@

$(BENCH_READY): $(READY)
	@PYTHON=$(PYTHON) scripts/setup.sh bench $@
