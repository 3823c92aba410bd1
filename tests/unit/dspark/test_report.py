"""What speculation counted: exported, read back, added, shown."""

import json
import math

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from engine.dspark.reliability import Reliability
from engine.dspark.report import DraftReport
from engine.errors import InvalidRequest
from rollout.cli import app
from rollout.draft_metrics import draft_exposition, read_report
from rollout.metrics import merge_exposition
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import dspark, save_random


@pytest.fixture(scope="module")
def report(t_full, tmp_path_factory):
    """Of an engine with a block drafter whose whole windows were verified, for two domains."""
    drafter = save_random(tmp_path_factory.mktemp("drafters") / "d0")
    engine = make_engine(t_full, dspark=dspark(drafter))
    requests = [ask(name, prompt(10 + at), n=2, max_new=16) for at, name in enumerate(("math", "poetry", ""))]
    named = [msgspec.structs.replace(r, domain=r.group_id, group_id=f"g{r.group_id}") for r in requests]
    engine.generate(named)
    assert engine.draft_counters()["draft_steps"] == engine.draft_report().total("steps") > 0
    return engine.draft_report()


def test_sums_agree_with_each_other(report):
    assert report.domains == ["", "math", "poetry"] and report.drafts == 4
    windows, lengths = report.by("windows", "window"), report.by("lengths", "length")
    assert sum(int(n) * count for n, count in windows.items()) == report.total("verified")
    assert sum(int(n) * count for n, count in lengths.items()) == report.total("emitted")
    assert sum(windows.values()) == sum(lengths.values()) == report.total("steps")
    assert report.column("accepted_at", "position", 4).sum() == report.total("accepted")
    # Whole windows are their own ceiling, and a label is seen for every verified draft.
    assert report.total("ceiling_emitted") == report.total("emitted")
    assert report.total("ceiling_lower") <= report.total("ceiling_upper")
    assert report.bins("survival_count")[0].sum() == report.total("steps")
    assert report.total("accepted", domain="math") < report.total("accepted") or report.total("accepted") == 0
    assert sum(report.total("steps", domain=name) for name in report.domains) == report.total("steps")


def test_export_is_read_back_and_engines_add_up(report):
    texts = [draft_exposition(report, {"engine": name, "incarnation": "1"}) for name in ("a", "b")]
    steps = report.total("steps", domain="math")
    assert f'draft_steps_total{{adapter="",domain="math",engine="a",incarnation="1"}} {steps}' in texts[0]
    assert read_report(texts[0]).values == report.values
    both = read_report(merge_exposition(texts))
    assert both.values == report.plus(report).values
    for name, value in report.metrics().items():
        assert both.metrics()[name] == pytest.approx(value, nan_ok=True), name
    assert not any(report.since(report).values.values())
    with pytest.raises(InvalidRequest, match="drafter"):
        read_report("# nothing\n")


def test_calibration_is_that_of_the_reliability(report):
    sums = Reliability(2)
    rng = np.random.default_rng(0)
    predicted = rng.uniform(size=(400, 2))
    sums.observe(predicted, (rng.uniform(size=(400, 2)) < predicted**2).astype(float))
    from engine.dspark.report import series_of
    from engine.dspark.stats import DraftStats

    shown = DraftReport.of(series_of({("", ""): DraftStats(2)}, sums, {})).calibration()
    for name, expected in (("ece", sums.calibration_error()), ("auc", sums.auc()), ("brier", sums.brier())):
        np.testing.assert_allclose(shown[name], expected)
    assert shown["ece"][0] > 0.1 and shown["auc"][0] > 0.7
    assert all(math.isnan(value) for value in DraftReport().figures().values())


def test_the_command_shows_and_draws(report, tmp_path):
    file, png = tmp_path / "metrics.txt", tmp_path / "out" / "curves.png"
    file.write_text("other_total 3.0\n" + draft_exposition(report, {"engine": "a", "incarnation": "1"}))
    ran = CliRunner().invoke(app, ["inspect", "dspark", "--metrics", str(file), "--png", str(png)])
    assert ran.exit_code == 0 and "poetry" in ran.output and "predicted" in ran.output, ran.output
    assert png.read_bytes()[:4] == b"\x89PNG"
    ran = CliRunner().invoke(app, ["inspect", "dspark", "--metrics", str(file), "--json"])
    assert json.loads(ran.output)["draft/accept_length"] == report.figures()["accept_length"]
    ran = CliRunner().invoke(app, ["inspect", "dspark", "--metrics", str(tmp_path / "none")])
    assert ran.exit_code == 1 and "metrics text" in ran.output
