"""The device-resident loop end to end in interpreted kernels: same tokens as transformers.

Runs in a process of its own, since Triton decides to interpret when it is first imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]

CODE = """
import sys
import numpy as np, torch
torch.set_num_threads(1)
from tests.support import ask, assert_sample_is_reference, make_engine, prompt
from pathlib import Path
folder = Path(sys.argv[1])
device = make_engine(folder, page_size=4, burst=3, attention="triton", loop="overlapped", max_running=6)
plain = make_engine(folder, page_size=4)
work = [
    ask("greedy", prompt(9), max_new=5),
    ask("group", prompt(10), n=3, max_new=6, temperature=1.0, seed=3),
    ask("stop", prompt(3, 40), max_new=6, temperature=0.7, top_k=5, seed=4, stop_ids=list(range(0, 512, 20))),
]
fast, reference = device.generate(work), plain.generate(work)
assert_sample_is_reference(folder, prompt(9), fast[0].samples[0], 5)
for one, other in zip(fast, reference, strict=True):
    for a, b in zip(one.samples, other.samples, strict=True):
        assert a.ids.tolist() == b.ids.tolist(), (one.group_id, a.ids, b.ids)
        assert a.finish == b.finish
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
assert device._loop._stepper.captures > 0
device.check()
print("equal")
"""


@pytest.mark.parametrize("model", ["t_full", "t_qwen3"])
def test_interpreted_steps_equal_plain_ones(model, request):
    folder = request.getfixturevalue(model)
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0 and "equal" in run.stdout, run.stderr[-3000:]
