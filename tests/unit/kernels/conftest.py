"""Which files a process collects: Triton decides to interpret or to compile when it is imported.

`TRITON_INTERPRET=1 pytest tests/unit/kernels` runs the interpreted files by themselves; without it
`test_interpreter.py` runs them all in one process.
"""

import importlib.util
import os
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    collect_ignore_glob = ["test_interpreter.py", "test_*_compile*.py"]
elif importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*_interpreted.py", "test_*_compile*.py"]
else:
    collect_ignore_glob = ["test_*_interpreted.py"]


def adapt_language_once() -> None:
    """The interpreter goes through Triton's whole language at every call of a device function, which a launch
    has adapted before: half of its time. Here once for each module, for the names that only that module sees.
    """
    from triton.runtime import interpreter

    adapted: set[str] = set()

    def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in adapted:
            interpreter._patch_lang(self.fn)
            adapted.add(self.fn.__module__)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


if INTERPRETED:
    adapt_language_once()
