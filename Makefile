# make setup   a .venv in this folder with everything the project needs
# make demo    a toy world is made, then the main job improves its video model, all on this machine's CPU
# make test    lint, type check and the whole test suite
# make test-kills  kill and resume at every injected point (half an hour)
# make evidence-algorithms  every algorithm's recipe, true and flipped, three seeds (an hour)
# make evidence-experts  both A14B families, true and flipped, three seeds (a quarter of an hour)
# make evidence-toy-world  GRPO on the toy world, true and flipped, three seeds (half an hour)
# make evidence  seeds 0, 1, 2 with true, flipped and zero learning signal (hours)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO ?= runs/demo
STAMP := $(VENV)/.installed
COMMA := ,

.PHONY: setup demo test lint test-kills evidence evidence-algorithms evidence-experts evidence-toy-world clean
setup: $(STAMP)

$(STAMP): pyproject.toml
	@echo "installing into $(VENV): about 12 GB, several minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/miles-wan tiny --trained --out $(DEMO)/tiny
	$(BIN)/python scripts/run_diffusion_grpo_wan22_ti2v.py --recipe toy_world \
	  --model $(DEMO)/tiny/Wan2.2-TI2V-5B-tiny \
	  --data-jsonl $(DEMO)/tiny/data/train.jsonl --eval-data-jsonl $(DEMO)/tiny/data/validation.jsonl \
	  --reward-model $(DEMO)/tiny/PickScore-tiny --device cpu --num-gpus 2 --output-dir $(DEMO)/run

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

test-kills: setup
	MILES_WAN_ALL_KILL_POINTS=1 $(BIN)/python -m pytest tests/e2e/test_kill_and_resume.py

evidence: setup
	$(BIN)/python benchmarks/evidence.py --out runs/evidence

evidence-algorithms: setup
	$(BIN)/python benchmarks/evidence.py --out runs/evidence-algorithms --in-process --workers 2 --signals true flipped \
	  --recipes tiny_ti2v $(patsubst configs/algorithms/%.yaml,tiny_ti2v$(COMMA)%,$(wildcard configs/algorithms/*.yaml)) \
	  --extra="--device cpu --rollout.engine local --rollout.samples-per-call 8 --num-gpus 1 --eval.interval 10"

evidence-experts: setup
	for family in t2v i2v; do $(BIN)/python benchmarks/evidence.py --out runs/evidence-$$family --in-process --workers 2 \
	  --signals true flipped --family wan2.2-$$family-a14b --recipes tiny_a14b \
	  --extra="--device cpu --rollout.engine local --rollout.samples-per-call 8 --num-gpus 1 --eval.interval 10" || exit 1; done

evidence-toy-world: setup
	$(BIN)/python benchmarks/evidence.py --out runs/evidence-toy-world --trained --in-process --workers 2 \
	  --signals true flipped --recipes toy_world \
	  --extra="--device cpu --rollout.engine local --rollout.samples-per-call 8 --num-gpus 1"

clean:
	rm -rf runs build *.egg-info
