# Each target only calls `python -m minikv`, so a machine without make has the same commands.
PYTHON ?= python3

.PHONY: lab test fresh test-long test-gpu doctor clean
.NOTPARALLEL:

lab:
	"$(PYTHON)" -m minikv lab $(ARGS)

test:
	"$(PYTHON)" -m minikv test $(ARGS)

# Both as on a machine that never saw the course: for whoever changes a requirement.
fresh:
	"$(PYTHON)" -m minikv fresh $(ARGS)

test-long:
	"$(PYTHON)" -m minikv test --long $(ARGS)

# On the Python that is found, with what it has: nothing is installed, and no GPU is no failure.
test-gpu:
	"$(PYTHON)" -m minikv test-gpu $(ARGS)

doctor:
	"$(PYTHON)" -m minikv doctor

# The environment and what tools left behind; the converted model lives in the user's cache.
clean:
	rm -rf .venv build minikv.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
