# One command per wish. Each makes the environment it needs, so a fresh machine wants Python >= 3.11 and nothing else.
#
#   make demo         the evaluation over every policy on the bundled model, with its report
#   make test         style, types and tests: what CI runs
#   make test-slow    the tests that take minutes
#   make test-gpu     the tests that need a CUDA device
#   make test-shapes  the tests again, every shape and dtype that a signature states checked at run time
#   make test-sanitised   the C kernels' tests with gcc's sanitizers beneath them
#   make test-matrix  the Hugging Face edge on the oldest and the newest supported transformers
#   make test-newest  the tests on what a plain installation brings today: nothing is pinned
#   make docs         the generated parts of README.md and docs/
#   make clean        everything above undone, environments included

PYTHON ?= python3
VENV ?= .venv
OLDEST := transformers==5.17.0 huggingface_hub==1.33.0
TRITON := triton==3.6.0

# The repository root must stay off sys.path: `kernels/` would hide Hugging Face's package of that name.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

BIN := $(VENV)/bin
OLD := .venv-5.17
NEW := .venv-newest
EDGE = $(wildcard tests/test_hf*.py tests/families) $(addprefix tests/test_,compiled_states.py lifecycle.py hidden_tokens.py ragged_turns.py replay.py states.py saved_beside.py)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test style types unit test-slow test-gpu test-shapes test-sanitised test-matrix test-newest docs clean environment

demo: environment
	$(BIN)/kvengine demo

# mypy keeps one core busy for a minute, and tests are on two.
test: style
	@$(MAKE) --no-print-directory -j2 types unit

style: environment
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: environment
	$(BIN)/python tests/view.py
	$(BIN)/python -m mypy

unit: environment
	$(PYTEST) -n 2 --dist worksteal

test-slow: environment
	$(PYTEST) -n 2 --dist worksteal -m "slow and not gpu"

test-gpu: environment
	$(PYTEST) -m gpu

test-shapes: environment
	$(PYTEST) -n 2 --dist worksteal --jaxtyping-packages=kvengine,support_types.checked

test-sanitised: environment
	OMP_NUM_THREADS=1 $(BIN)/python tests/sanitise.py tests/kernels -k "not triton"

test-matrix: environment $(OLD)/.ready
	OMP_NUM_THREADS=1 $(OLD)/bin/python -m pytest -n 2 --dist worksteal -m "not gpu" $(EDGE)
	$(PYTEST) -n 2 --dist worksteal -m "not gpu" $(EDGE)

test-newest: $(NEW)/.ready
	OMP_NUM_THREADS=1 $(NEW)/bin/python -m pytest -n 2 --dist worksteal

docs: environment
	$(BIN)/python docs/build.py

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

environment: $(VENV)/.ready

# torch goes first and alone, so that pip settles on the build that suits the machine before anything else asks for it.
# The last line brings Triton's interpreter to machines whose torch has none; where no wheel exists its tests are skipped.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvengine needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install -q -c $(2) torch
	$(1)/bin/python -m pip install -q -c $(2) -e '.[dev]'
	@$(1)/bin/python -c 'import triton' 2>/dev/null || $(1)/bin/python -m pip install -q '$(TRITON)' || echo "no $(TRITON) here"
	touch $(1)/.ready
endef

$(VENV)/.ready: pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt)

$(NEW)/.ready: pyproject.toml
	$(call install,$(NEW),/dev/null)

# An old transformers wants a hub client of its time; the rest stays as pinned.
$(OLD)/.ready: pyproject.toml constraints.txt
	test -x $(OLD)/bin/python || $(PYTHON) -m venv $(OLD)
	grep -vE '^(transformers|huggingface_hub)==' constraints.txt > $(OLD)/constraints.txt
	printf '%s\n' $(OLDEST) >> $(OLD)/constraints.txt
	$(call install,$(OLD),$(OLD)/constraints.txt)
