"""Order statistics of the area decisions, against closed forms and simulation."""
import numpy as np
import pytest
from scipy import special, stats

from neurips26_lit.decisions.order_stats import binomial_curve, expected_order_stat, gauss_legendre, generalized_pareto, hill


@pytest.mark.parametrize("n,r", [(1, 1), (2, 2), (7, 3), (52, 10), (300, 300), (5000, 1)])
def test_uniform_order_statistics(n, r):
    assert expected_order_stat(lambda u: u, n, r) == pytest.approx((n + 1 - r) / (n + 1), abs=1e-12)


@pytest.mark.parametrize("law", [stats.expon(), stats.norm(2, 3), stats.lognorm(1.0), stats.pareto(3.0), stats.beta(5, 1)])
def test_all_ranks_add_up_to_n_means(law):
    assert sum(expected_order_stat(law.ppf, 12, r) for r in range(1, 13)) == pytest.approx(12 * law.mean(), rel=1e-5)


def test_pareto_maximum_in_closed_form():
    exact = np.exp(special.gammaln(31) - special.gammaln(31 - 1 / 3) + special.gammaln(1 - 1 / 3))  # n B(n, 1 - 1/a)
    assert expected_order_stat(stats.pareto(3.0).ppf, 30, 1) == pytest.approx(exact, rel=1e-5)


def test_quadrature_is_exact_for_polynomials():
    x, w = gauss_legendre(5)
    for degree in range(10): assert (w * x**degree).sum() == pytest.approx(1 / (degree + 1), abs=1e-14)
    assert abs((w * x**10).sum() - 1 / 11) > 1e-9


@pytest.mark.parametrize("n", [1, 2, 15, 60])
def test_bernstein_curve(n):
    rng = np.random.default_rng(n)
    weights, F = rng.standard_normal(n), rng.random((3, 4))
    pmf = stats.binom.pmf(np.arange(n)[:, None, None], n - 1, 1 - F)
    assert np.allclose(binomial_curve(weights, F), (weights[:, None, None] * pmf).sum(0), atol=1e-12)
    assert binomial_curve(np.ones(n), 0.3) == pytest.approx(1)


def test_a_large_number_of_ranks_stays_in_range():
    weights = np.linspace(0, 1, 3000)
    values = binomial_curve(weights, np.linspace(0, 1, 11))
    assert (0 <= values).all() and (values <= 1).all() and (np.diff(values) < 0).all()


def test_generalised_pareto_and_hill():
    assert generalized_pareto(0.25).mean() == pytest.approx(1 / 0.75) and generalized_pareto(-1.0).support() == (0.0, 1.0)
    x = stats.pareto(4.0).rvs(50_000, random_state=0)
    found = hill(x, 1000)
    assert found.low < 0.25 < found.high and hill(7 * x, 1000).value == pytest.approx(found.value)


@pytest.mark.parametrize("call,word", [
    (lambda: gauss_legendre(0), "n:"), (lambda: expected_order_stat(lambda u: u, 3, 0), "r:"), (lambda: expected_order_stat(lambda u: u, 3, 4), "r:"), (lambda: expected_order_stat(lambda u: u * np.nan, 3, 1), "quantile:"),
    (lambda: binomial_curve([], 0.5), "weights:"), (lambda: binomial_curve([1.0], np.nan), "F:"), (lambda: generalized_pareto(np.nan), "xi:"), (lambda: hill(np.ones(5), 5), "k:"), (lambda: hill(-np.ones(5), 2), "x:")])
def test_bad_input(call, word):
    with pytest.raises(ValueError) as e: call()
    assert str(e.value).startswith(word)
