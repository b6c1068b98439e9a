"""core.stats against closed forms, scipy, statsmodels and scikit-learn; the coverage of every interval over 1,000 samples."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import roc_auc_score
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from neurips26_lit.core import stats as S

floats = st.floats(-1e3, 1e3, allow_nan=False).map(lambda v: round(v, 3))
samples = hnp.arrays(float, st.integers(2, 40), elements=floats)


def coverage(draw, interval, truth, reps=1000, seed=0):
    rng = np.random.default_rng(seed)
    return np.mean([interval(draw(rng), rng).contains(truth) for _ in range(reps)])


def test_import_leaves_torch_out():
    code = "import sys, neurips26_lit.core.stats; assert 'torch' not in sys.modules and 'statsmodels' not in sys.modules and 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- bootstrap

@pytest.mark.parametrize("stat", [np.mean, np.median, np.std])
@pytest.mark.parametrize("n", [7, 60])
def test_plain_bootstrap_is_scipys(stat, n):
    x = np.random.default_rng(n).lognormal(size=n)
    ours = S.bootstrap(x, stat, seed=3, small_sample=False)
    theirs = scipy.stats.bootstrap((x,), stat, n_resamples=2000, method="percentile", rng=3).confidence_interval
    assert np.allclose([ours.low, ours.high], theirs, atol=1e-12)
    assert ours.value == stat(x) and ours.n == n


def test_batches_do_not_change_the_draws():
    x = np.random.default_rng(0).normal(size=30_000)                  # 4e6 // n = 133 resamples a batch
    ours = S.bootstrap(x, seed=1, n_boot=400, small_sample=False)
    rng = np.random.default_rng(1)
    means = [x[rng.integers(0, x.size, x.size)].mean() for _ in range(400)]
    assert np.allclose([ours.low, ours.high], np.quantile(means, [0.025, 0.975]), atol=1e-12)


def test_a_function_without_axis_gives_the_same_interval():
    x = np.random.default_rng(0).normal(size=25)
    a, b = S.bootstrap(x, seed=0), S.bootstrap(x, lambda v: float(v.mean()), seed=0)
    assert np.allclose([a.low, a.high], [b.low, b.high], atol=1e-12)


def test_stretch_is_student_over_normal():
    for n in (2, 5, 50, 10_000):
        expected = np.sqrt(n / (n - 1)) * scipy.stats.t.ppf(0.975, n - 1) / scipy.stats.norm.ppf(0.975)
        assert np.isclose(S.stretch(n), expected, rtol=1e-10)
    assert S.stretch(10_000) < 1.001


@settings(max_examples=60, deadline=None)
@given(samples, st.integers(0, 99))
def test_bootstrap_moves_and_scales_with_the_data(x, seed):
    a, b = S.bootstrap(x, seed=seed, n_boot=200), S.bootstrap(2 * x - 7, seed=seed, n_boot=200)
    assert np.allclose([2 * a.low - 7, 2 * a.high - 7], [b.low, b.high], atol=1e-6)
    assert a.low <= a.value <= a.high


@pytest.mark.parametrize("n", [5, 10, 30])
def test_bootstrap_covers_the_mean(n):
    hit = coverage(lambda r: r.normal(size=n), lambda x, r: S.bootstrap(x, seed=r, n_boot=1000), 0.0, seed=n)
    assert 0.925 <= hit <= 0.97                                        # Monte Carlo sd 0.007; the plain interval has 0.84 at n = 5


def test_constant_values_give_zero_width():
    assert S.bootstrap([3.0] * 5, seed=0) == S.Interval(3.0, 3.0, 3.0, 5)


def test_undefined_statistic_is_an_error():
    rows = np.column_stack([np.ones(6), np.arange(6.0)])
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="stat: undefined"):
        S.bootstrap(rows, lambda r: np.corrcoef(r.T)[0, 1], seed=0)


# ---------------------------------------------------------------- clusters, pairs

def documents(rng, C=25):
    doc = np.repeat(np.arange(C), rng.integers(1, 15, C))
    return rng.normal(size=C)[doc] + rng.normal(size=doc.size), doc


def test_cluster_bootstrap_covers_where_rows_do_not():
    assert 0.925 <= coverage(documents, lambda d, r: S.cluster_bootstrap(*d, seed=r, n_boot=1000), 0.0) <= 0.975
    assert coverage(documents, lambda d, r: S.bootstrap(d[0], seed=r, n_boot=300), 0.0, reps=300) < 0.85


def test_clusters_of_one_are_the_plain_bootstrap():
    x = np.random.default_rng(2).normal(size=50)
    labels = [f"doc {i}" for i in range(50)]
    a, b = S.cluster_bootstrap(x, labels, seed=4), S.bootstrap(x, seed=4)
    assert np.allclose([a.low, a.high], [b.low, b.high]) and a.n == 50


def test_repeating_every_row_changes_nothing():
    x = np.random.default_rng(2).normal(size=12)
    a, b = S.cluster_bootstrap(np.repeat(x, 9), np.repeat(np.arange(12), 9), seed=4), S.bootstrap(x, seed=4)
    assert np.allclose([a.low, a.high], [b.low, b.high]) and a.n == 12


def test_general_statistic_equals_the_fast_mean():
    y, doc = documents(np.random.default_rng(1))
    a, b = S.cluster_bootstrap(y, doc, seed=0, n_boot=200), S.cluster_bootstrap(y, doc, lambda v: v.mean(), seed=0, n_boot=200)
    assert np.allclose([a.value, a.low, a.high], [b.value, b.low, b.high], atol=1e-12)


@pytest.mark.parametrize("n", [5, 10])
def test_paired_difference_covers(n):
    def pairs(r):
        shared = 5 * r.normal(size=n)
        return shared + 0.3 + r.normal(size=n), shared + r.normal(size=n)
    hit = coverage(pairs, lambda p, r: S.paired_diff(*p, seed=r, n_boot=1000), 0.3, seed=1)
    assert 0.925 <= hit <= 0.97


@settings(max_examples=30, deadline=None)
@given(samples, st.integers(0, 99))
def test_paired_difference_is_antisymmetric(a, seed):
    b = np.roll(a, 1)
    x, y = S.paired_diff(a, b, seed=seed, n_boot=200), S.paired_diff(b, a, seed=seed, n_boot=200)
    assert np.allclose([x.value, x.low, x.high], [-y.value, -y.high, -y.low], atol=1e-6)


# ---------------------------------------------------------------- proportions, tests

@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_solves_its_quadratic(kn):
    k, n = kn
    w, z = S.wilson(k, n), scipy.stats.norm.ppf(0.975)
    roots = np.roots([1 + z**2 / n, -(2 * k / n + z**2 / n), (k / n) ** 2])
    assert np.allclose(sorted([w.low, w.high]), np.clip(sorted(roots.real), 0, 1), atol=1e-7)
    assert np.allclose([w.low, w.high], proportion_confint(k, n, method="wilson"), atol=1e-12)
    exact = S.proportion(k, n, method="exact")
    binom = scipy.stats.binomtest(k, n).proportion_ci(method="exact")
    assert np.allclose([exact.low, exact.high], binom, atol=1e-8)


def test_wilson_covers():
    for p in (0.05, 0.3, 0.5):
        assert 0.925 <= coverage(lambda r: r.binomial(60, p), lambda k, r: S.wilson(k, 60), p, seed=7) <= 0.985


def test_tost_speaks_the_ledgers_words():
    inside, wide, beyond, touching = (S.Interval((a + b) / 2, a, b, 9) for a, b in ((-.05, .09), (-.2, .05), (.1, .3), (.05, .1)))
    assert [S.tost(i, 0.1) for i in (inside, wide, beyond, touching)] == ["holds", "inconclusive", "fails", "inconclusive"]
    assert S.tost(S.Interval(-.2, -.3, -.1, 9), 0.1) == "fails"


@settings(max_examples=15, deadline=None)
@given(hnp.arrays(float, st.integers(1, 25), elements=st.floats(0, 1)))
def test_holm_is_statsmodels(p):
    assert np.allclose(S.holm(p), multipletests(p, method="holm")[1], atol=1e-12)
    named = S.holm({f"c{i}": v for i, v in enumerate(p)})
    assert np.allclose(list(named.values()), S.holm(p)) and list(named) == [f"c{i}" for i in range(len(p))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_mcnemar_is_a_coin(pairs):
    a, b = np.array(pairs).T
    only_a, only_b = int((a & ~b).sum()), int((~a & b).sum())
    expected = scipy.stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    statistic, p = S.mcnemar(a, b)
    assert np.isclose(p, expected) and statistic == min(only_a, only_b)


# ---------------------------------------------------------------- AUROC

def scores(rng, n=60, gap=1.0):
    y = rng.permutation(np.arange(n) % 2)
    shared = rng.normal(size=n)
    return y, gap * y + shared, 0.6 * gap * y + 0.7 * shared + 0.7 * rng.normal(size=n)


def naive_variance(y, s1, s2=None):
    "DeLong's variance of A(s1) - A(s2) from all pairs."
    def psi(s):
        d = s[y == 1][:, None] - s[y == 0][None]
        return (d > 0) + 0.5 * (d == 0)
    k = psi(s1) - (0 if s2 is None else psi(s2))
    return k.mean(1).var(ddof=1) / len(k) + k.mean(0).var(ddof=1) / k.shape[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 2))
def test_auroc_is_scikit_learns_and_delong_is_all_pairs(seed, digits):
    y, s1, s2 = scores(np.random.default_rng(seed), 31)
    s1, s2 = s1.round(digits), s2.round(digits)
    ci, diff = S.auroc_ci(y, s1), S.auroc_diff(y, s1, s2)
    assert np.isclose(ci.value, roc_auc_score(y, s1), atol=1e-12) and 0 <= ci.low <= ci.value <= ci.high <= 1
    assert np.isclose(diff.value, roc_auc_score(y, s1) - roc_auc_score(y, s2), atol=1e-12)
    se = np.sqrt(naive_variance(y, s1, s2))
    assert np.isclose(diff.width, 2 * scipy.stats.norm.ppf(0.975) * se, rtol=1e-6)
    if ci.value < 1:
        logit_se = np.sqrt(naive_variance(y, s1)) / (ci.value * (1 - ci.value))
        assert np.isclose(scipy.special.logit(ci.high) - scipy.special.logit(ci.value), scipy.stats.norm.ppf(0.975) * logit_se, rtol=1e-6)


def test_auroc_intervals_cover():
    truth = scipy.stats.norm.cdf(1 / np.sqrt(2))
    assert 0.93 <= coverage(scores, lambda d, r: S.auroc_ci(d[0], d[1]), truth) <= 0.975
    gap2 = scipy.stats.norm.cdf(0.6 / np.sqrt(2 * 0.98))               # second score: signal 0.6, sd sqrt(.49 + .49)
    assert 0.92 <= coverage(scores, lambda d, r: S.auroc_diff(*d), truth - gap2, reps=500) <= 0.98


def test_delong_agrees_with_the_cluster_bootstrap_of_single_rows():
    y, s1, s2 = scores(np.random.default_rng(3), 200)
    for a, b in ((S.auroc_ci(y, s1), S.auroc_ci(y, s1, np.arange(200), n_boot=800)), (S.auroc_diff(y, s1, s2), S.auroc_diff(y, s1, s2, np.arange(200), n_boot=800))):
        assert a.value == pytest.approx(b.value, abs=1e-12) and abs(a.low - b.low) < 0.02 and abs(a.high - b.high) < 0.02


def test_auroc_edges():
    y = np.arange(40) % 2
    assert S.auroc_ci(y, np.ones(40)) == S.Interval(0.5, 0.5, 0.5, 40)
    best, worst = S.auroc_ci(y, y), S.auroc_ci(y, -y)
    assert best.value == best.high == 1 and 0.8 < best.low < 0.99
    assert np.isclose(worst.high, 1 - best.low, atol=1e-9) and worst.value == worst.low == 0
    same = S.auroc_diff(y, y, 3 * y + 1)
    assert (same.value, same.width, same.p) == (0, 0, 1)


# ---------------------------------------------------------------- effects, trends, scaling

def test_cohens_d_and_t():
    a, b = np.random.default_rng(0).normal(0.5, 1, 12), np.random.default_rng(1).normal(0, 2, 12)
    e = S.cohens_d(a, b, paired=True)
    assert np.isclose(e.d_z * np.sqrt(12), scipy.stats.ttest_rel(a, b).statistic)
    assert np.isclose(e.d_av, (a - b).mean() / ((a.std(ddof=1) + b.std(ddof=1)) / 2))
    c = b[:7]
    assert np.isclose(S.cohens_d(a, c, paired=False) * np.sqrt(12 * 7 / 19), scipy.stats.ttest_ind(a, c).statistic)


def chains(rng, G=8, T=10, slope=0.1):
    g, x = np.repeat(np.arange(G), T), np.tile(np.arange(T), G).astype(float)
    return x, rng.normal(size=G)[g] + (slope + 0.15 * rng.normal(size=G))[g] * x + 0.5 * rng.normal(size=G * T), g


@pytest.mark.parametrize("seed", range(4))
def test_trend_of_a_balanced_design_is_a_t_test_on_slopes(seed):
    x, y, g = chains(np.random.default_rng(seed))
    each = [np.polyfit(x[g == i], y[g == i], 1)[0] for i in range(8)]
    t, ours = scipy.stats.ttest_1samp(each, 0), S.trend_test(x, y, g)
    assert np.isclose(ours.slope, np.mean(each), rtol=2e-3) and np.isclose(ours.p, t.pvalue, rtol=0.05, atol=1e-4)
    assert np.allclose([ours.low, ours.high], t.confidence_interval(), atol=5e-3)


def test_trend_is_within_groups_not_between():
    g = np.repeat(np.arange(6), 8)                                      # rises between groups, falls inside each
    x = np.tile(np.arange(8.0), 6) + 10 * g
    y = 10.0 * g - np.tile(np.arange(8.0), 6) + 0.1 * np.random.default_rng(0).normal(size=48)
    slope, low, high, p = S.trend_test(x, y, g)
    assert high < 0 and np.isclose(slope, -1, atol=0.05)
    assert S.mann_kendall(x, y, g).statistic < -0.9 and S.mann_kendall(x, y).statistic > 0


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(int, st.integers(4, 30), elements=st.integers(0, 6)), st.integers(0, 99))
def test_mann_kendall_of_one_group_is_kendalls_test(y, seed):
    x = np.random.default_rng(seed).integers(0, 9, len(y))
    if np.ptp(y) == 0 or np.ptp(x) == 0: return
    assert np.isclose(S.mann_kendall(x, y).p, scipy.stats.kendalltau(x, y, method="asymptotic").pvalue, atol=1e-9)


def test_loglog_slope_of_a_power_law_is_exact():
    n = np.array([1, 3, 10, 40.0])
    for k in (-1, 0.5, 2):
        found = S.loglog_slope(np.tile(n, 3), np.repeat([1, 5, 9.0], 4) * np.tile(n, 3) ** k, np.repeat(["a", "b", "c"], 4))
        assert np.isclose(found.value, k) and found.width < 1e-9 and found.n == 3
    noisy = n**2 * np.array([1.1, 0.9, 1.2, 1.0])
    fit = scipy.stats.linregress(np.log(n), np.log(noisy))
    assert np.isclose(S.loglog_slope(n, noisy).width, 2 * scipy.stats.t.ppf(0.975, 2) * fit.stderr)


def test_loglog_slope_covers():
    n = np.array([8, 16, 32, 64, 128.0])
    draw = lambda r: (np.tile(n, 5), 3 * np.tile(n, 5) ** np.repeat(1.5 + 0.1 * r.normal(size=5), 5) * np.exp(0.1 * r.normal(size=25)), np.repeat(np.arange(5), 5))
    assert 0.93 <= coverage(draw, lambda d, r: S.loglog_slope(*d), 1.5) <= 0.97


# ---------------------------------------------------------------- at_equal

def test_at_equal_interpolates_by_hand():
    df = pd.DataFrame({"method": ["a", "a", "b", "b", "b"], "seed": [0, 0, 0, 0, 0], "cost": [1, 4, 2, 2, 8], "gap": [0, 3, 5, 7, 0.0], "note": list("vwxyz")})
    out = S.at_equal(df, "cost", 2).set_index("method")
    assert out.gap.tolist() == [1.0, 6.0] and out.reached.all() and "note" not in out            # repeats are averaged
    assert np.isclose(S.at_equal(df, "cost", 2, log=True).gap[0], 1.5)                             # halfway from 1 to 4 in log
    late = S.at_equal(df, "cost", 5, by=["method", "seed"]).set_index("method")
    assert np.isnan(late.gap["a"]) and not late.reached["a"] and late.gap["b"] == pytest.approx(3.0)
    assert S.at_equal(df, "cost", 5, outside="nearest").gap[0] == 3.0
    with pytest.raises(ValueError, match="swept over"): S.at_equal(df, "cost", 5, outside="error")


# ---------------------------------------------------------------- bad input

ok = np.arange(6.0)
BAD = [
    (lambda: S.bootstrap([], seed=0), "values: 0 value"),
    (lambda: S.bootstrap([1.0], seed=0), "values: 1 value"),
    (lambda: S.bootstrap([1, np.nan], seed=0), "values: 1 of 2 values are NaN"),
    (lambda: S.bootstrap([1, np.inf, 2], seed=0), "NaN or infinite"),
    (lambda: S.bootstrap(["a", "b"], seed=0), "values: expected numbers"),
    (lambda: S.bootstrap(ok, seed=0, level=95), "level"),
    (lambda: S.bootstrap(ok, seed=0, n_boot=10), "n_boot"),
    (lambda: S.cluster_bootstrap(ok, [0] * 6, seed=0), "clusters: one cluster"),
    (lambda: S.cluster_bootstrap(ok, [0] * 5, seed=0), "clusters: 5 labels for 6 values"),
    (lambda: S.cluster_bootstrap(ok, ["a", None] * 3, seed=0), "clusters: 3 labels are missing"),
    (lambda: S.paired_diff(ok, ok[:5], seed=0), "a 6, b 5"),
    (lambda: S.wilson(3, 2), "k, n"),
    (lambda: S.wilson(0, 0), "k, n"),
    (lambda: S.proportion(1, 2, method="wald"), "method"),
    (lambda: S.tost(S.Interval(0, 0, 0, 2), -1), "margin"),
    (lambda: S.Interval(0.0, 1.0, -1.0, 3), "low <= high"),
    (lambda: S.Interval(float("nan"), 0, 1, 3), "NaN"),
    (lambda: S.holm([0.1, 1.2]), "pvalues"),
    (lambda: S.mcnemar([0.5, 1], [1, 0]), "a, b"),
    (lambda: S.auroc_ci([0, 1, 2, 1], ok[:4]), "y: expected labels"),
    (lambda: S.auroc_ci([0, 0, 0, 1], ok[:4]), "y: 1 positives"),
    (lambda: S.auroc_diff([0, 0, 1, 1], ok[:4], ok[:3]), "s2: 3 value"),
    (lambda: S.auroc_diff([0, 0, 1, 1], ok[:4], ok), "lengths differ"),
    (lambda: S.cohens_d(ok, ok + 1, True), "no spread"),
    (lambda: S.trend_test(ok, np.ones(6), [0, 0, 0, 1, 1, 1]), "y: constant"),
    (lambda: S.trend_test(np.ones(6), ok, [0, 0, 0, 1, 1, 1]), "x: a group"),
    (lambda: S.trend_test(ok, ok, [0] * 6), "groups: one cluster"),
    (lambda: S.mann_kendall(ok, np.ones(6)), "tied"),
    (lambda: S.loglog_slope([1, 2, 0], [1, 2, 3]), "positive"),
    (lambda: S.loglog_slope([2, 2, 2], [1, 2, 3]), "all sizes are equal"),
    (lambda: S.at_equal(pd.DataFrame({"method": ["a"]}), "cost", 1), "no column"),
]


@pytest.mark.parametrize("call, message", BAD, ids=[m for _, m in BAD])
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=None) as e: call()
    assert message in str(e.value) and "\n" not in str(e.value)
