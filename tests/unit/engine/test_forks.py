"""Samples that start together from prompts that end within a page."""

import pytest

from tests.support import ask, assert_sample_is_reference, make_engine, prompt


@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_what_forks_own_is_copied_once_for_all_of_them(t_full, loop):
    engine = make_engine(t_full, page_size=16, loop=loop, max_running=16)
    pool, copied = engine._parts.pages.pool, []
    copy = pool.copy_pages

    def copy_pages(sources, targets):
        copied.append(len(sources))
        copy(sources, targets)

    pool.copy_pages = copy_pages
    prompts = [prompt(21), prompt(37, 100), prompt(16, 200)]
    groups = engine.generate([ask(str(i), ids, n=4, max_new=9) for i, ids in enumerate(prompts)])
    for ids, group in zip(prompts, groups, strict=True):
        for sample in group.samples:
            assert_sample_is_reference(t_full, ids, sample, 9)
    # The last prompt fills its page, which is shared.
    assert [count for count in copied if count] == [6]
    engine.check()
