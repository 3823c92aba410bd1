"""The command line against real services."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from typer.testing import CliRunner

from rollout.cli import app
from rollout.model_catalog import PRESETS
from tests.unit.text.tiny_tokenizers import byte_level, codec_of


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_questions_to_a_running_service(fleet3) -> None:
    health = run("health", "--url", fleet3.url)
    assert health.exit_code == 0 and json.loads(health.stdout)["state"] == "ready"
    assert json.loads(run("capabilities", "--url", fleet3.url).stdout)["vocab_size"] == 512
    report = run("version", "--url", fleet3.url).stdout
    assert report.startswith("sparkroll ") and '"policy_version"' in report


def test_refusals_are_one_line_and_exit_code_one(fleet3) -> None:
    refused = run("generate", "hello", "--url", fleet3.url)
    assert refused.exit_code == 1 and "UNSUPPORTED" in refused.stderr and "Traceback" not in refused.output
    nobody = run("health", "--url", "http://127.0.0.1:9")
    assert nobody.exit_code == 1 and "UNREACHABLE" in nobody.stderr and "127.0.0.1:9" in nobody.stderr
    unknown = run("serve", "--set", "engine.nonsense=1")
    assert unknown.exit_code == 1 and "engine.nonsense" in unknown.stderr
    for command in (["generate", "x"], ["serve"]):
        missing = run(*command, "--model", "no-such-model")
        assert missing.exit_code == 1 and missing.stderr.startswith("NOT_FOUND") and "smollm2-135m" in missing.stderr


def test_models_that_have_names_are_listed() -> None:
    listed = run("models").stdout
    assert all(name in listed for name in PRESETS) and "LlamaForCausalLM" in listed


def test_generation_in_this_process(t_full, tmp_path) -> None:
    for file in t_full.iterdir():
        (tmp_path / file.name).symlink_to(file)
    codec_of(byte_level(), tmp_path)
    options = ["--set", "engine.dtype=float32", "--set", "engine.num_threads=1"]
    first, second = [
        run("generate", "abc", "--model", str(tmp_path), "--max-new", "8", "-n", "2", "--seed", "1", *options)
        for _ in range(2)
    ]
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout and first.stdout.count("8 tokens, length") == 2


def test_serve_says_when_it_is_ready_and_ends_on_ctrl_c(t_full) -> None:
    command = [sys.executable, "-c", "from rollout.cli import main; main()", "serve", "--model", str(t_full)]
    command += ["--port", "0", "--set", "engine.dtype=float32", "--set", "engine.num_threads=1"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RAY_ADDRESS": "local"},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        ready = process.stdout.readline()
        found = re.match(r"ready: (http://127\.0\.0\.1:\d+) \(policy version 0, 1 engine\(s\)\)", ready)
        assert found, (ready, process.stderr.read() if process.poll() is not None else "")
        assert run("health", "--url", found[1]).exit_code == 0
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "engine.dtype = 'float32'" in errors and "Traceback" not in errors and errors.endswith("stopped\n")
        deadline = time.monotonic() + 10
        while _session(process.pid) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not _session(process.pid), "processes were left behind"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _session(leader: int) -> list[int]:
    """Processes of the session that `leader` opened."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(name))
    return found
