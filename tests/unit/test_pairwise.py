"""The choice of test cases contains what it promises."""

from itertools import combinations, product

from tests.pairwise import pairwise


def test_every_two_values_meet_in_few_cases():
    factors = {"size": [64, 96, 128, 256], "group": [1, 3, 4, 8, 16], "page": [1, 4, 16, 64], "long": [False, True]}
    cases = pairwise(factors)
    for a, b in combinations(factors, 2):
        assert {(case[a], case[b]) for case in cases} == set(product(factors[a], factors[b]))
    assert 20 <= len(cases) <= 26, "160 combinations, 20 are the least"
    assert pairwise(factors) == cases
