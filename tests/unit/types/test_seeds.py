import pytest

from sametoken.types.sampling_params import derive_seed


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63 - 1])
def test_the_first_completion_keeps_the_seed(seed):
    assert derive_seed(seed, 0) == seed


def test_derived_seeds_are_distinct_in_range_and_fixed():
    derived = [derive_seed(seed, index) for seed in range(100) for index in range(1, 20)]
    assert len(set(derived)) == len(derived)
    assert all(0 <= seed < 2**63 for seed in derived)
    assert derive_seed(42, 1) == derive_seed(42, 1)
    assert derive_seed(1, 11) != derive_seed(11, 1)


def test_a_derived_seed_never_changes_between_releases():
    assert derive_seed(42, 1) == 6478890928803595225
