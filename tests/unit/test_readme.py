"""What the README shows works as it stands."""

import re
from pathlib import Path

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_ten_lines_answer(t_full, capsys):
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Engine" in block)
    assert len([line for line in code.splitlines() if line]) <= 10
    named = 'resolve_model("smollm2-135m")'
    assert named in code
    exec(code.replace(named, repr(str(t_full))), {})
    lines = capsys.readouterr().out.splitlines()
    assert sum("'length'" in line or " length " in line for line in lines) == 4
