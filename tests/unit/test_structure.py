"""The rules of the repository's structure that a machine can hold."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = ["lora", "engine", "trainer_bridge", "rollout", "recipes"]
"""Each package may import itself and those before it."""

BANNED = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
LIGHT = ["engine.types", "engine.errors", "engine.config", "rollout.protocol", "rollout.cli"]
LIGHT += [f"recipes.{name}.config" for name in ("grpo", "lora_grpo", "population", "train_drafter")]
LIGHT += ["recipes.grpo.__main__", "recipes.population.__main__", "recipes.train_drafter.__main__"]
LIGHT += ["recipes.calibrate_drafter"]


def modules(package):
    return sorted((ROOT / package).rglob("*.py"))


@cache
def parsed(path):
    return ast.parse(path.read_text())


@cache
def imports(path):
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package):
    later = set(ORDER[ORDER.index(package) + 1 :]) | {"tests", "benchmarks"}
    for path in modules(package):
        wrong = {name for name in imports(path) if name.split(".")[0] in later}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_engine_knows_no_transport_and_no_text():
    foreign = {"ray", "httpx", "starlette", "uvicorn", "transformers", "tokenizers", "wandb", "peft"}
    for path in modules("engine"):
        wrong = {name for name in imports(path) if name.split(".")[0] in foreign}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", ORDER)
def test_case_n1_nothing_that_unpickles_is_imported(package):
    for path in modules(package):
        wrong = {name for name in imports(path) if name.split(".")[0] in BANNED}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"
        text = path.read_text()
        assert "trust_remote_code=True" not in text
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, f"{path.relative_to(ROOT)}: {call}"


@pytest.mark.parametrize("package", ORDER)
def test_waiting_with_a_limit_never_swallows_a_cancellation(package):
    """`asyncio.wait_for` of Python 3.11 does when both fall together; `asyncio.timeout` does not."""
    for path in modules(package):
        assert "asyncio.wait_for(" not in path.read_text(), path.relative_to(ROOT)


@pytest.mark.parametrize("package", [*ORDER, "benchmarks"])
def test_every_module_says_what_it_owns(package):
    for path in modules(package):
        if path.name != "__init__.py":
            assert ast.get_docstring(parsed(path)), f"{path.relative_to(ROOT)} has no docstring"


def test_request_types_settings_and_command_lines_load_without_torch():
    import subprocess
    import sys

    code = f"import sys; import {', '.join(LIGHT)}; "
    code += "found = {'torch', 'transformers', 'ray'} & sys.modules.keys(); assert not found, found"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
