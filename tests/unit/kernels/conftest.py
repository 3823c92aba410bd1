"""Which files a process collects: Triton decides to interpret or to compile when it is imported.

`TRITON_INTERPRET=1 pytest tests/unit/kernels` runs the interpreted files by themselves; without it
`test_interpreter.py` runs them all in one process.
"""

import dataclasses
import functools
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


def spare_waste() -> None:
    """What Triton 3.6 and 3.7 interpret without effect is left out; it is two thirds of the time.

    Every call of a device function goes through the whole language, which the launch has adapted before: once
    for each module is enough, for the names that only that module sees. Overflow is computed, and then not
    looked at without `debug`. A dtype's counterpart in numpy is looked up in a table made anew.
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
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    numpy_type, scalar_type = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)

    def known_type(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, interpreter.tl.block_type) else kind
        return (numpy_type if isinstance(scalar, interpreter.tl.pointer_type) else scalar_type)(scalar)

    interpreter._get_np_dtype = known_type


if INTERPRETED:
    spare_waste()
