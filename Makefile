# Every target sets up what it needs: in a new clone, `make demo` or `make test` works at once.
# PYTHON is the interpreter for the virtual environment (3.10 or newer).
PYTHON ?= python3
VENV := .venv
PORTABLE := .venv-portable
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VERSION ?= 2.14.1
# make fuzz: seconds for each target.
SECONDS ?= 300
# make test-schedules: number of schedules.
COUNT ?= 200
# make test-rdma: pytest's mark expression. CI leaves out slow tests.
VERBS ?= verbs
# make test-slurm: pytest's mark expression. The nightly workflow runs SLURM=slurm, with the tests that wait for minutes.
SLURM ?= slurm and not slow
# make test-k8s: pytest's mark expression. Without the mesh of 100 pods: make test-k8s K8S="k8s and not nightly".
K8S ?= k8s
# make wheels: Python releases and platforms. Example with one wheel: make wheels PYTHONS=3.11 PLATFORMS=linux-x86_64.
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14 3.14t 3.15
PLATFORMS ?= linux-x86_64 linux-aarch64 macos-arm64
FUZZ := .envs/fuzz
# make test-torch: SELECTION=--all runs all parametrizations instead of one of each test function. AREAS: default all.
SELECTION ?=
AREAS ?=
# make test-xla: folder of the tests that also run on workers with XLA devices (tests/dtensor/xla_selection.py selects
# among them), and parametrizations of each test. They are few, because XLA compiles each graph.
ON_XLA ?= tests/dtensor
PER_TEST ?= 1
# make test-portable: paths of its two runs, which take equally long.
PORTABLE_TESTS ?= tests/actor
PORTABLE_TESTS_BESIDE ?= tests/core tests/mesh tests/processes tests/rdma tests/test_readme.py \
    tests/dtensor/controller/test_device_mesh.py tests/dtensor/controller/test_memory_access.py \
    $(patsubst %,tests/process_group/test_%.py,smoke collectives fast_paths object_collectives point_to_point shm_backend tensor_lists work)
# make test-clients: frameworks whose programs run. Example: make test-clients CLIENTS="accelerate ignite".
CLIENTS ?= accelerate transformers models ignite intel_mpi lightning mpich open_mpi torchmetrics deepspeed ray ray_client ray_job ray_resize skypilot torchtitan torchx
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup build-portable demo test test-fast test-portable test-slow test-nightly test-seeds test-model test-schedules test-sanitizers test-gpu test-xla test-rdma test-slurm test-k8s test-torch test-clients test-lowest test-tpu fuzz lint format docs bench wheels clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 17

setup: $(STAMP)  ## create the virtual environment with torch, the compiled core and the tools

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/python/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; run make PYTHON=python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch numpy "setuptools>=77" "pybind11>=2.13"
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation --config-settings editable_mode=compat -e '.[dev]'
	touch $@

build-portable: $(PORTABLE)/.installed  ## build the core without Linux-only system calls, in a second environment, .venv-portable

$(PORTABLE)/.installed: $(STAMP) tools/portable_env.py
	$(BIN)/python tools/portable_env.py --dir $(PORTABLE)
	touch $@

demo: $(STAMP)  ## train the language model with backend="monarch" on two ranks
	$(BIN)/torchrun --standalone --nproc-per-node=2 --log-dir=build/demo-logs examples/train_lm.py --parallel ddp --out build/demo

test: $(STAMP) lint  ## lint, types and the ordinary tests
	$(BIN)/python -m tests.parallel_runs -m "not slow and not gpu and not xla and not verbs and not slurm" --durations=25

test-fast: $(STAMP) lint  ## lint, types and the short tests of every package: at most 5 minutes
	$(BIN)/python -m tests.parallel_runs --fast -q -m "not slow and not gpu and not xla and not verbs and not slurm"

test-slow: $(STAMP)  ## long variants: torch's own suite, four-rank training, compiled steps, lost hosts
	$(BIN)/python -m tests.parallel_runs -m "slow and not nightly and not gpu and not xla and not verbs and not slurm and not k8s" --durations=25

test-nightly: $(STAMP) $(VENV)/.wheels  ## random programs, all of torch's operators, chaos, sanitizers, model checker: half an hour
	$(BIN)/python -m tests.parallel_runs -m "nightly and not gpu and not xla and not verbs and not slurm and not k8s" --durations=25

# Without fork each process imports torch, so these take longer than with `make test`.
test-portable: $(PORTABLE)/.installed  ## the code for macOS: the portable core, and no fork, /proc, memfd and so on
	MONARCH_PORTABLE=1 $(PORTABLE)/bin/python -m tests.parallel_runs -m "not slow and not gpu and not xla and not verbs and not slurm" --durations=10 -- $(PORTABLE_TESTS) -- $(PORTABLE_TESTS_BESIDE)

test-sanitizers: $(STAMP)  ## the C++ core under AddressSanitizer, UBSan and ThreadSanitizer
	$(BIN)/python -m pytest -m slow tests/shm/test_sanitizers.py tests/transport/test_channel_sanitizers.py tests/rdma/test_sanitizers.py tests/dtensor/worker/test_record_sanitizers.py

test-seeds: $(STAMP)  ## 5,000 simulated worlds, and 5,000 with deadlocks, in addition to those of the ordinary run
	MONARCH_TEST_SEEDS=5000 $(BIN)/python -m pytest -m slow tests/testing/test_random_worlds.py tests/testing/test_random_deadlocks.py

test-model: $(STAMP)  ## model checking of the flag protocol of csrc/shm, also with three ranks: minutes, needs spin
	$(BIN)/python csrc/shm/model/check.py --slow

test-schedules: $(STAMP)  ## random faults on four busy hosts, 3 s each: make test-schedules COUNT=200
	$(BIN)/python -m tests.hosts.fault_schedules 0 $(COUNT)

test-gpu: $(STAMP)  ## tests that need an NVIDIA or AMD GPU; they skip with the reason if there is none
	$(BIN)/python -m pytest -m gpu

test-xla: $(STAMP)  ## the XLA route and meshes of XLA devices, in an environment with torch_xla 2.9 that it builds once
	$(BIN)/python tools/torch_env.py 2.9.0 --xla --run -- python -m pytest -m xla tests/xla
	MONARCH_TEST_XLA_PER_TEST=$(PER_TEST) MONARCH_TEST_XLA_PYTHON=$(CURDIR)/.envs/torch-2.9.0-xla/bin/python \
	    $(BIN)/python -m pytest -m "not slow and not gpu and not verbs and not slurm" $(ON_XLA) --durations=10

# First prepare the guest. If the machine cannot run it, print a clear message and do not fail. The ibverbs wheel is not
# installed into the virtual environment: only these tests need both verbs packages, and most users have neither.
test-rdma: $(STAMP)  ## verbs between two soft-RoCE devices, in a guest that it builds once (minutes), with both packages
	@rc=0; tools/rxe_guest.sh --prepare || rc=$$?; \
	if [ $$rc = 3 ]; then echo; echo "######## SKIPPED: make test-rdma. NOT ONE VERBS TEST HAS RUN; the reason is above ########"; echo; exit 0; fi; \
	[ $$rc = 0 ] || exit $$rc; \
	test -d .envs/rdma/ibverbs || $(BIN)/pip install -q --no-deps --target .envs/rdma ibverbs; \
	PYTHONPATH=$(CURDIR)/.envs/rdma RXE_GUEST_SECONDS=2000 tools/rxe_guest.sh $(CURDIR)/$(BIN)/python -m pytest --color=no -p no:cacheprovider -m "$(VERBS)" --durations=10 tests/rdma tests/process_group/test_rdma_p2p.py \
	    tests/transport/test_rdma_between_processes.py tests/hosts/test_nic_transfers.py

# The packages are slurmctld, slurmd, slurm-client and munge. Without them or without root all tests skip.
test-slurm: $(STAMP)  ## jobs and srun on a real Slurm cluster of network namespaces (root, Slurm's packages)
	$(BIN)/python -m pytest -m "$(SLURM)" --durations=10 tests/job

test-k8s: $(STAMP)  ## KubernetesJob on a real control plane, which it builds once (minutes), with pods in namespaces (root, Debian)
	@rc=0; tools/k8s_control_plane.sh --prepare || rc=$$?; \
	if [ $$rc = 3 ]; then echo; echo "######## SKIPPED: make test-k8s. NOT ONE TEST ON KUBERNETES HAS RUN; the reason is above ########"; echo; exit 0; fi; \
	[ $$rc = 0 ] || exit $$rc; \
	$(BIN)/python -m pytest --color=no -m "$(K8S)" --durations=10 tests/k8s

# tools/torch_table.py defines the areas: process groups, commands, actors, hosts and registered memory, and from torch
# 2.11 on the controller. Results are in docs/reference/torch-results, and their table in
# docs/reference/torch-releases.md.
test-torch: $(STAMP)  ## a sample of the tests on another torch: make test-torch VERSION=2.14.1 SELECTION=--all AREAS="backend fsdp"
	$(BIN)/python tools/torch_tests.py $(VERSION) $(SELECTION) $(if $(AREAS),--area $(AREAS)); \
	    rc=$$?; $(BIN)/python tools/torch_table.py; exit $$rc

test-clients: $(STAMP)  ## programs of frameworks such as Accelerate and Lightning, in environments that it builds once
	$(BIN)/python tools/clients_env.py $(CLIENTS) --test

test-lowest: $(STAMP)  ## tests of process groups and actors with the lowest version of every dependency, such as torch 2.9.0
	$(BIN)/python tools/torch_env.py 2.9.0 --lowest --run -- python -m pytest -m "not slow and not gpu and not xla and not verbs and not slurm" tests/process_group tests/cli tests/tpu tests/test_torch_patches.py tests/actor

# torch-tpu warns at import, which our pytest settings would turn into an error. Only its import-time requirements are
# installed.
test-tpu: $(STAMP)  ## tests that need the torch-tpu package but no TPU: 800 MB in .envs/tpu
	test -d .envs/tpu/torch_tpu || $(BIN)/pip install -q --no-deps --target .envs/tpu torch_tpu libtpu frozendict immutabledict absl-py portpicker
	PYTHONPATH=$(CURDIR)/.envs/tpu $(BIN)/python -m pytest -o filterwarnings= tests/tpu

# The environment has no torch, since the fuzzed code needs none. atheris has wheels for some Python releases only.
fuzz: $(FUZZ)/.installed  ## coverage-guided fuzzing of parsers that read bytes from peers: make fuzz SECONDS=300
	nice $(FUZZ)/bin/python -m tests.fuzz handshake -max_total_time=$(SECONDS) -max_len=512 -timeout=10
	nice $(FUZZ)/bin/python -m tests.fuzz frames -max_total_time=$(SECONDS) -max_len=512 -timeout=10

$(FUZZ)/.installed:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "atheris needs Python 3.11 or newer; run make PYTHON=python3.11 fuzz"; exit 1; }
	test -x $(FUZZ)/bin/python || $(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/pip install -q "atheris>=3.0" "msgspec>=0.19"
	touch $@

lint: $(STAMP)  ## ruff (format and lint), layers of packages and import cycles, prose, mypy --strict
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache .importlinter .importlinter-cycles
	$(BIN)/python tools/check_prose.py
	$(BIN)/mypy

format: $(STAMP)  ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The build is offline: it fetches no page and checks no external link.
docs: $(STAMP)  ## build the documentation site in build/docs, with warnings as errors
	$(BIN)/python -m sphinx -E -W --keep-going -q -d build/doctrees -b html docs build/docs

bench: $(VENV)/.bench  ## run all benchmarks; results on the terminal, tables and plots in build/benchmarks
	$(BIN)/python benchmarks/import_hook.py
	$(BIN)/python benchmarks/c10d_overhead.py
	$(BIN)/python benchmarks/failure_detection.py
	$(BIN)/python benchmarks/launch.py
	$(BIN)/python benchmarks/call_comparison.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/training_steps.py
	$(BIN)/python benchmarks/async_collectives.py
	-$(BIN)/python tools/peer_env.py torchmonarch ray nixl
	$(BIN)/python benchmarks/actors.py
	-$(BIN)/python benchmarks/hosts.py
	-$(BIN)/python benchmarks/slurm_jobs.py
	-$(BIN)/python benchmarks/kubernetes_jobs.py
	$(BIN)/python benchmarks/rdma.py
	-test -d .envs/rdma/ibverbs || $(BIN)/pip install -q --no-deps --target .envs/rdma ibverbs
	-PYTHONPATH=$(CURDIR)/.envs/rdma tools/rxe_guest.sh $(CURDIR)/$(BIN)/python benchmarks/rdma.py --only verbs --rounds 3
	-PYTHONPATH=$(CURDIR)/.envs/rdma tools/rxe_guest.sh $(CURDIR)/$(BIN)/python benchmarks/hosts_nics.py
	$(BIN)/python benchmarks/scale.py

# DeepSpeed builds only against an installed torch. If the build fails, the benchmark runs without DeepSpeed.
$(VENV)/.bench: $(STAMP)
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation --config-settings editable_mode=compat -e '.[dev,bench]'
	-DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(BIN)/pip install -q -c constraints.txt --no-deps --no-build-isolation 'deepspeed>=0.19'
	touch $@

# If there is a wheel for this machine's platform and Python, it is installed and tested. See docs/operate/release.md.
wheels: $(STAMP) $(VENV)/.wheels  ## build the source distribution and a wheel for each Python and platform in dist: about an hour
	nice $(BIN)/python -m tools.wheels.build --python $(PYTHONS) --platform $(PLATFORMS)
	$(BIN)/python -m tools.wheels.check dist
	$(BIN)/python -m tools.wheels.smoke dist --here
	$(BIN)/python -m tools.wheels.table

# Do not use `pip install -e` here: it would compile the core again.
$(VENV)/.wheels: $(STAMP)
	$(BIN)/python -c 'import importlib.metadata as m; print(*(r.split(";")[0] for r in m.requires("monarch_backend") if "== \"wheels\"" in r))' \
	    | xargs $(BIN)/pip install -q -c constraints.txt
	touch $@

clean:  ## remove what the other targets have built
	rm -rf $(VENV) $(PORTABLE) .envs build dist *.egg-info monarch_backend/*.so
