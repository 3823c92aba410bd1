"""Which files a process collects: Triton decides to interpret or to compile when it is imported.

`TRITON_INTERPRET=1 pytest tests/unit/kernels` runs the interpreted files by themselves; without it
`test_interpreter.py` runs them all in one process.
"""

import importlib.util
import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    collect_ignore_glob = ["test_interpreter.py", "test_*_compile*.py"]
elif importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*_interpreted.py", "test_*_compile*.py"]
else:
    collect_ignore_glob = ["test_*_interpreted.py"]
