"""A log of what planners decide."""

import gc

from benchmarks.round_log import lines, logged, read
from engine.dspark.planner import Planner
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import dspark, timeless


def test_plans_are_logged_and_hooks_go_again(t_full, tmp_path):
    choose, path = Planner.choose, tmp_path / "log.jsonl.gz"
    engine = make_engine(t_full, dspark=dspark("ngram", mode="compact"))
    timeless(engine)
    asked = ask("g", prompt(12), max_new=6)
    with logged(path):
        (group,) = engine.generate([asked])
        gc.collect()
    assert Planner.choose is choose
    events = read(path)
    plans = [event for event in events if event["event"] == "plan"]
    collections = [event for event in events if event["event"] == "garbage"]
    assert collections and collections[-1]["host"] > 0 and not any("garbage" in str(hook) for hook in gc.callbacks)
    assert len(group.samples[0].ids) == 6 and len(events) == len(plans) + len(collections) and 1 <= len(plans) <= 6
    assert all(plan["rows"] == 1 and plan["host"] >= 0 for plan in plans)
    text = list(lines(events))
    assert len(text) == len(events) + len({event["event"] for event in events}) and any(
        line.startswith("plan: ") for line in text
    )
    engine.generate([asked])
    assert len(read(path)) == len(events), "nothing is written behind the block"
