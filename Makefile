# make demo     set up .venv and run the experiment `tiny` on real linked pages; prints the report's path
# make test     set up .venv and run all checks
# make airflow  the same experiment in the Airflow UI; PORT=8181 for another port, Ctrl-C stops it
#
# Settings: PYTHON=python3.12  CORPUS=web.parquet  SCORER=model.bin  SCORER_TEXT=lines.txt  TOKENIZER=tokenizer.json  SEEDS=seeds.txt
#           ARGS="--set pages=300 --jobs 1"   (further arguments of `craw4llm run`)

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c '' >/dev/null 2>&1 && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/.ready
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

SET := $(if $(CORPUS),--set "corpus=$(CORPUS)") $(if $(SCORER),--set "scorer=$(SCORER)") $(if $(SCORER_TEXT),--set "scorer_text=$(SCORER_TEXT)") \
       $(if $(TOKENIZER),--set "tokenizer=$(TOKENIZER)") $(if $(SEEDS),--set "seeds=$(SEEDS)")

.PHONY: demo test check airflow venv lock clean

demo: venv
	@$(BIN)/craw4llm fetch demo-web
	@$(BIN)/craw4llm run tiny $(SET) $(ARGS)

test: venv check
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

airflow: venv
	@$(BIN)/craw4llm fetch demo-web
	@$(BIN)/python scripts/airflow_server.py start

venv: $(READY)

# Torch first, with its own dependencies (its CPU or CUDA build decides them), then everything else from the lock.
$(READY): pyproject.toml requirements/lock.txt requirements/torch.txt
	@test -n "$(PYTHON)" || { echo "no Python found: install Python 3.11, 3.12 or 3.13 (Debian, Ubuntu: apt install python3 python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) -V); this project needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: apt install python3-venv"; exit 1; }
	@echo "setting up .venv (once; about 2 GB)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/torch.txt uv==0.13.9
	@VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/uv pip install --quiet --compile-bytecode --no-deps -r requirements/lock.txt
	@VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/uv pip install --quiet --no-deps --config-setting editable_mode=compat -e .
	@$(BIN)/python -m compileall -q craw4llm training
	@touch $@

# Writes requirements/lock.txt anew from pyproject.toml.
lock: venv
	PATH=$(CURDIR)/$(BIN):$$PATH bash requirements/lock.sh

clean:
	rm -rf .venv artifacts .airflow
