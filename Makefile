# Environments, tests and the demo. Everything is built from nothing the first time and reused after that.
#
#   make demo     the whole job in small, from questions to a drafter that is accepted: demo-out/
#   make test     everything: checks, unit tests, and the real SGLang on the CPU (about 10 GB of environments)
#   make check    ruff, formatting, types

PYTHON ?= python3

# Servers in the tests start 7 s faster with bytecode on disk.
unexport PYTHONDONTWRITEBYTECODE
# The environments have their own packages; somebody's PYTHONPATH must not be mixed in.
unexport PYTHONPATH

BIN := .venv/bin
RELEASES := 0.5.11 0.5.17
RELEASE_FOLDERS := $(RELEASES:%=.cache/sglang-%)
ENV := tests/engine_env

.DELETE_ON_ERROR:
.PHONY: demo test environments check format .venv .venv-sglang engines sglang-wheels tiny-models consumers clean

demo: .venv
	$(BIN)/python -m hsdump.demo.run

# Two at a time: installing is the work of one core, and SGLang's environment is half of it.
test:
	$(MAKE) -j2 --output-sync=target environments
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 40

environments: engines .venv consumers tiny-models check

check: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# hsdump for users and developers. torch goes first: asked for alone and exactly, pip takes a CPU build where it has one.
# Bytecode is made when a module is first imported: most of what comes along never is.
.venv: .venv/built
.venv/built: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-compile torch==2.13.0
	$(BIN)/python -m pip install -q --no-compile -e '.[dev]'
	@touch $@

# The real SGLang on the CPU, for tests.
engines: .venv-sglang $(RELEASE_FOLDERS:%=%/built) .cache/sglang-overlay/built sglang-wheels

.venv-sglang: .venv-sglang/built-hsdump
.venv-sglang/built: $(ENV)/build_sglang.sh $(ENV)/requirements.txt $(wildcard $(ENV)/sgl_kernel/*.py)
	PYTHON=$(PYTHON) $(ENV)/build_sglang.sh .venv-sglang
	@touch $@

# Without dependencies: what runs inside the server needs torch and the standard library only. The entry point in
# pyproject.toml is how SGLang finds it.
.venv-sglang/built-hsdump: .venv-sglang/built pyproject.toml
	.venv-sglang/bin/python -m pip install -q --no-deps -e .
	@touch $@

# Other releases, put before the installed one on PYTHONPATH.
$(RELEASE_FOLDERS:%=%/built): .cache/sglang-%/built: $(ENV)/unpack_release.sh .venv-sglang/built
	$(ENV)/unpack_release.sh .venv-sglang/bin/python $* .cache/sglang-$*
	@touch $@

.cache/sglang-overlay/built: $(ENV)/overlay-requirements.txt .venv-sglang/built
	rm -rf $(@D)
	.venv-sglang/bin/python -m pip install -q --no-deps --target $(@D) -r $<
	@touch $@

# Every release that the source patch is for, SGLang's own wheel only: 330 MB.
sglang-wheels: .cache/sglang-wheels/built
.cache/sglang-wheels/built: $(ENV)/download_wheels.sh $(ENV)/releases.txt .venv-sglang/built
	$(ENV)/download_wheels.sh .venv-sglang/bin/python $(ENV)/releases.txt $(@D)
	@touch $@

# Trainers whose readers load our exports: the modules alone, a few megabytes.
consumers: .cache/consumers/built
.cache/consumers/built: tests/store/consumers/requirements.txt .venv/built
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --no-deps --target $(@D) -r $<
	$(BIN)/python -m pip install -q --no-deps --target $(@D)/v1 speculators==0.3.0
	@touch $@

tiny-models: .venv
	$(BIN)/python -m tests.tiny_models

clean:
	rm -rf .venv .venv-sglang .cache demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis
