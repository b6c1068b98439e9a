"""Budgeted overrides: theory by brute force and closed forms, records by planted effects."""
import itertools

import numpy as np
import pandas as pd
import pytest
from scipy import integrate, stats

from neurips26_lit.decisions.discretion import gains as G
from neurips26_lit.decisions.discretion import programme as P
from neurips26_lit.decisions.discretion import service as S
from neurips26_lit.decisions.discretion import variants as V

FAMILIES = G.families()


# gains

@pytest.mark.parametrize("dist", [stats.uniform(-1, 3), stats.expon(1, 2), stats.halfnorm(0, 3), stats.norm(-1, 2), stats.lognorm(0.7, 1, 2), stats.gamma(2.5, 0, 0.3), stats.weibull_min(2.0, 1, 3),
                                  stats.pareto(3.5, 0, 2), stats.pareto(3.5, -2, 2), stats.genpareto(-0.4, 1, 2), stats.genpareto(0.2), stats.beta(2, 3, -1, 4), stats.t(4), stats.laplace(1)])
def test_excess_is_the_integral_of_the_survival_function(dist):
    gains = G.from_scipy(dist)
    low = max(dist.support()[0], dist.ppf(1e-4))
    theta = np.array([low - 1.0, *dist.ppf([0.05, 0.5, 0.95])])
    expect = [integrate.quad(dist.sf, t, min(dist.support()[1], dist.ppf(0.999999999)), points=None, limit=500)[0] + integrate.quad(dist.sf, dist.ppf(0.999999999), dist.support()[1])[0] * np.isinf(dist.support()[1]) for t in theta]
    assert np.allclose(gains.excess(theta), expect, rtol=3e-6)
    assert np.allclose(gains.sf(theta), dist.sf(theta)) and gains.excess(np.array(min(dist.support()[1], 1e300))) == pytest.approx(0, abs=1e-12)


def test_strict_survival_at_atoms():
    for gains in (G.empirical([1.0, 1.0, 2.0]), P.discrete([1.0, 2.0], [2 / 3, 1 / 3])):
        assert np.allclose(gains.sf([0.9, 1.0, 1.5, 2.0]), [1, 1 / 3, 1 / 3, 0]) and np.allclose(gains.excess([0.0, 1.0, 2.0]), [4 / 3, 1 / 3, 0])
    chance = G.with_opportunity(G.generalized_pareto(0.0), 0.3)
    assert chance.sf(0.0) == pytest.approx(0.3) and chance.sf(-1e-9) == pytest.approx(1) and chance.excess(-1.0) == pytest.approx(1.3)


def test_affine_is_the_law_of_the_transformed_gain():
    a, b = G.affine(G.from_scipy(stats.gamma(2)), 3.0, 2.0), G.from_scipy(stats.gamma(2, 3, 2))
    t = np.array([1.0, 3.0, 5.5, 20.0])
    assert np.allclose(a.sf(t), b.sf(t)) and np.allclose(a.excess(t), b.excess(t)) and a.support == b.support


@pytest.mark.parametrize("call,word", [
    (lambda: G.generalized_pareto(1.0), "excess is infinite: shape xi must be < 1"), (lambda: G.from_scipy(stats.genpareto(1.2)), "excess is infinite: shape xi must be < 1"), (lambda: G.from_scipy(stats.pareto(0.9)), "excess is infinite"),
    (lambda: G.from_scipy(stats.cauchy()), "excess is infinite"), (lambda: G.from_scipy(stats.norm), "dist:"), (lambda: G.empirical([np.nan]), "x:"), (lambda: G.affine(FAMILIES["uniform"], 0, 0), "scale:"),
    (lambda: G.with_opportunity(FAMILIES["uniform"], 1.5), "p:"), (lambda: FAMILIES["uniform"].excess(np.array([0.1, np.nan])), "theta:"),
    (lambda: P.solve(FAMILIES["uniform"], 0, 1), "T:"), (lambda: P.solve(FAMILIES["uniform"], 2, -1), "K:"), (lambda: P.solve(FAMILIES["uniform"], 2, 1.0), "K:"), (lambda: P.solve(FAMILIES["uniform"], 2, 1, discount=1.1), "discount:"),
    (lambda: P.spending_profile(P.solve(FAMILIES["uniform"], 3, 1), 2), "k0:"), (lambda: P.patience([]), "profile:"), (lambda: P.patience([np.nan]), "profile:"), (lambda: P.front_share([1.0], 0), "fraction:"),
    (lambda: P.simulate(P.solve(FAMILIES["uniform"], 3, 1), FAMILIES["uniform"], 0, np.random.default_rng(0)), "n:"), (lambda: P.play(P.solve(FAMILIES["uniform"], 3, 1), np.ones((2, 4))), "x:"),
    (lambda: P.discrete([1.0], [0.5]), "probs:"), (lambda: V.solve_opportunity(FAMILIES["uniform"], [1.2], 1), "chance:"), (lambda: V.birth_death(3, 0.8, 0.8), "opens:"), (lambda: V.solve_refilled(FAMILIES["uniform"], 1, 1, 0, 1), "weekly:"),
    (lambda: S.simulate_service(0, np.random.default_rng(0)), "n_days:"), (lambda: S.simulate_service(3, 0), "rng:"), (lambda: S.simulate_service(3, np.random.default_rng(0), effect_monday=np.nan), "effect_monday:"),
    (lambda: V.capacity_rates(P.solve(FAMILIES["uniform"], 3, 1), 3, 0.2, 0.2, 0.1, k0=2), "k0:"), (lambda: S.recover_default(pd.DataFrame({"a": range(20), "b": [0, 1] * 10}), ["c"], "b"), "features:"),
    (lambda: S.recover_default(pd.DataFrame({"a": [1], "b": [0]}), ["a"], "z"), "target:"), (lambda: S.override_model(pd.DataFrame({"date": []})), "df:"), (lambda: S.read_service("nowhere.csv"), "path:")])
def test_bad_input(call, word):
    with pytest.raises(ValueError) as e: call()
    assert str(e.value).startswith(word)


# the programme

@pytest.mark.parametrize("seed", range(6))
def test_optimal_over_all_histories(seed):
    rng = np.random.default_rng(seed)
    atoms, probs, T, K = rng.exponential(size=3) * rng.integers(0, 2, 3), rng.dirichlet(np.ones(3)), int(rng.integers(1, 6)), int(rng.integers(0, 4))
    assert abs(P.solve(P.discrete(atoms, probs), T, K).value[0, K] - P.history_tree(atoms, probs, T, K)) <= 1e-12


def test_optimal_over_all_listed_policies():
    for p in (0.2, 0.5, 0.9): assert abs(P.solve(P.discrete([0.4, 1.0], [1 - p, p]), 2, 1).value[0, 1] - P.all_policies([0.4, 1.0], [1 - p, p])) <= 1e-14


def test_forced_use_against_brute_force():
    atoms, probs, T, K = [-1.0, 0.3, 2.0], [0.5, 0.3, 0.2], 4, 2

    def best(t, k, first=True):
        if t == T: return 0.0 if k == 0 else -np.inf
        return sum(p * max(best(t + 1, k), x + best(t + 1, k - 1) if k else -np.inf) for x, p in zip(atoms, probs))
    forced, free = (P.solve(P.discrete(atoms, probs), T, K, free_disposal=d) for d in (False, True))
    assert forced.value[0, K] == pytest.approx(best(0, K)) and free.value[0, K] > forced.value[0, K]
    assert P.spending_profile(forced).sum() == pytest.approx(K)


def test_discount_against_brute_force():
    atoms, probs, T, K, g = [0.1, 0.5, 2.0], [0.5, 0.3, 0.2], 5, 2, 0.8

    def best(t, k):
        if t == T: return 0.0
        return sum(p * max(g * best(t + 1, k), x + g * best(t + 1, k - 1) if k else -np.inf) for x, p in zip(atoms, probs))
    assert P.solve(P.discrete(atoms, probs), T, K, discount=g).value[0, K] == pytest.approx(best(0, K), abs=1e-12)


def test_classical_sequences():
    u, v = 0.5, 1.0
    uniform, exponential = P.solve(FAMILIES["uniform"], 30, 1).value[::-1, 1], P.solve(FAMILIES["exponential"], 30, 1).value[::-1, 1]
    for n in range(1, 30):
        assert uniform[n] == pytest.approx(u, abs=1e-14) and exponential[n] == pytest.approx(v, abs=1e-12)
        u, v = (1 + u * u) / 2, v + np.exp(-v)


@pytest.mark.parametrize("name", FAMILIES)
def test_structure_of_value_and_spending(name):
    prog = P.solve(FAMILIES[name], 20, 6)
    top = prog.value.max()
    assert (np.diff(prog.value, axis=0) <= 1e-12 * top).all() and (np.diff(prog.value, axis=1) >= -1e-12 * top).all() and (np.diff(prog.value, 2, axis=1) <= 1e-10 * top).all()
    assert (np.diff(prog.threshold[:, 1:], axis=0) <= 1e-10 * top).all() and (np.diff(prog.threshold[:, 1:], axis=1) <= 1e-10 * top).all()
    s = P.spending_profile(prog)
    assert s.sum() <= 6 + 1e-12 and (s.sum() == pytest.approx(6) or name.startswith("Bern"))
    assert P.spending_profile(prog, 0).sum() == 0 and np.isinf(prog.threshold[:, 0]).all() and (prog.rate[:, 0] == 0).all()
    assert P.solve(FAMILIES[name], 4, 9).value[0, 9] == pytest.approx(4 * FAMILIES[name].excess(np.array(0.0)))


def test_the_profile_is_the_law_of_a_chain_on_paths():
    prog = P.solve(FAMILIES["exponential"], 6, 2)
    total = np.zeros(6)
    for path in itertools.product((0, 1), repeat=6):
        k, p = 2, 1.0
        for t, a in enumerate(path):
            h = prog.rate[t, k]
            p *= h if a else 1 - h
            k -= a if h > 0 else 0
            if p == 0: break
        total += p * np.array(path)
    assert np.allclose(total, P.spending_profile(prog), atol=1e-14)


@pytest.mark.parametrize("name", ["uniform", "lognormal(1)", "Bernoulli × uniform", "gamma(0.5)"])
def test_played_welfare_and_bounds(name):
    law = FAMILIES[name]
    x = law.rvs((20_000, 20), np.random.default_rng(0))
    prog = P.solve(law, 20, 4)
    runs = P.play(prog, x)
    assert abs(runs["welfare"].mean() - prog.value[0, 4]) < 4 * runs["welfare"].std() / 20_000**0.5
    assert runs["spend"].sum(1).max() <= 4 and abs(runs["spend"].mean(0) - P.spending_profile(prog)).max() < 5 * 0.5 / 20_000**0.5
    prophet = np.sort(x, axis=1)[:, -4:].sum(1).mean()
    assert P.static_threshold(law, 20, 4)[1] <= prog.value[0, 4] + 1e-12 <= prophet + 0.05
    same = P.simulate(prog, law, 20_000, np.random.default_rng(0))
    assert np.array_equal(same["spend"], runs["spend"])


@pytest.mark.parametrize("name", FAMILIES)
def test_invariance(name):
    law, base = FAMILIES[name], P.solve(FAMILIES[name], 26, 8)
    for b in (1e-3, 1e4): assert abs(P.solve(G.affine(law, 0, b), 26, 8).rate - base.rate).max() <= 1e-9
    shift = abs(P.solve(G.affine(law, 0.5, 1), 26, 8).rate - base.rate)
    if name.startswith("Bern"): assert shift.max() == pytest.approx(0.6) and shift[:17, 1:].max() < 1e-9
    else: assert shift.max() <= 1e-8
    own = P.solve(G.from_scipy(stats.lognorm(1.0, scale=1e4), quadrature=True), 6, 2).rate
    assert abs(own - P.solve(FAMILIES["lognormal(1)"], 6, 2).rate).max() <= 1e-9


def test_static_cutoff_is_a_maximum_and_its_welfare_exact():
    law = FAMILIES["lognormal(1)"]
    theta, worth = P.static_threshold(law, 52, 10)
    assert worth == pytest.approx(42.02, abs=0.01) and all(P.static_welfare(law, 52, 10, t) <= worth for t in np.linspace(0, 3 * theta, 200))
    x = law.rvs((100_000, 52), np.random.default_rng(1))
    over = x > theta
    played = np.where(over & (over.cumsum(1) <= 10), x, 0).sum(1)
    assert abs(played.mean() - worth) < 4 * played.std() / 100_000**0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_fluid_rule_accepts_the_even_share(name):
    rule = P.fluid_rule(FAMILIES[name], 20, 5)
    share = np.minimum(1, np.arange(1, 6) / (20 - np.arange(20)[:, None]))
    if name.startswith("Bern"): assert (rule.rate[:, 1:] <= share + 1e-9).all() and rule.rate.max() == pytest.approx(0.4)
    else: assert np.allclose(rule.rate[:, 1:], share, atol=1e-9)
    assert rule.value[0, 5] <= P.solve(FAMILIES[name], 20, 5).value[0, 5] + 1e-12


def test_numbers_at_52_and_10():
    law = FAMILIES["lognormal(1)"]
    assert P.solve(law, 52, 10).value[0, 10] == pytest.approx(44.69, abs=0.01) and P.fluid_rule(law, 52, 10).value[0, 10] == pytest.approx(44.36, abs=0.01)
    assert P.greedy_rule(law, 52, 10).value[0, 10] == pytest.approx(10 * np.exp(0.5))
    assert P.rationing_welfare(law, 52, 10) < P.greedy_rule(law, 52, 10).value[0, 10]


def test_empirical_law_reproduces_the_parametric_profile():
    x = stats.lognorm(1.0).rvs(100_000, random_state=0)
    a, b = (P.spending_profile(P.solve(g, 52, 10)) for g in (G.empirical(x), FAMILIES["lognormal(1)"]))
    assert abs(a - b).max() <= 0.02


def test_edges():
    one = P.solve(FAMILIES["uniform"], 1, 1)
    assert one.value[0, 1] == pytest.approx(0.5) and P.patience(P.spending_profile(one)) == 0.5
    none = P.solve(FAMILIES["uniform"], 3, 0)
    assert none.value.max() == 0 and none.rate.shape == (3, 1)
    assert P.front_share([1.0, 1.0, 1.0, 1.0, 1.0]) == pytest.approx(0.25) and P.patience([0, 0, 1.0]) == 1


# variants

def test_weekly_allowance_by_tree():
    atoms, probs = [0.2, 1.0], [0.6, 0.4]

    def best(history, weeks, days, weekly, K):
        t = len(history)
        if t == weeks * days: return 0.0
        ok = sum(a for _, a in history) < K and sum(a for _, a in history[t - t % days:]) < weekly
        return sum(p * max(best((*history, (x, 0)), weeks, days, weekly, K), x + best((*history, (x, 1)), weeks, days, weekly, K) if ok else -np.inf) for x, p in zip(atoms, probs))
    for weeks, days, weekly, K in ((2, 2, 1, 2), (3, 2, 1, 2), (2, 3, 2, 3), (1, 4, 1, 3)):
        found = V.solve_refilled(P.discrete(atoms, probs), weeks, days, weekly, K)
        assert found.value[0, K, weekly] == pytest.approx(best((), weeks, days, weekly, K), abs=1e-12)
        assert found.spending_profile().sum() <= min(K, weeks * weekly) + 1e-12


def test_changing_chances():
    law, chance = FAMILIES["exponential"], np.array([1.0, 0.0, 0.4, 1.0, 0.1])
    prog = V.solve_opportunity(law, chance, 2)
    rng = np.random.default_rng(0)
    x = np.where(rng.random((60_000, 5)) < chance, law.rvs((60_000, 5), rng), 0.0)
    runs = P.play(prog, x)
    assert abs(runs["welfare"].mean() - prog.value[0, 2]) < 4 * runs["welfare"].std() / 60_000**0.5
    assert abs(runs["spend"].mean(0) - P.spending_profile(prog)).max() < 0.01 and P.spending_profile(prog)[1] == 0


def test_capacity_without_effect_drops_out_and_law_is_stationary():
    prog = P.solve(FAMILIES["beta(5,1)"], 30, 5)
    matrix, law = V.birth_death(6, 0.2, 0.3)
    assert np.allclose(law @ matrix, law) and np.allclose(matrix.sum(1), 1)
    assert np.allclose(V.capacity_rates(prog, 6, 0.2, 0.3, 0.0).spending, P.spending_profile(prog), atol=1e-12)
    with_effect = V.capacity_rates(P.solve(FAMILIES["beta(5,1)"], 30, 10), 6, 0.2, 0.3, 0.4, k0=5)
    assert (np.diff(with_effect.rate[0]) >= 0).all() and with_effect.rate[0, 6] > with_effect.rate[0, 0] and np.allclose(with_effect.law, law)


# records

@pytest.fixture(scope="module")
def records(): return S.simulate_service(3 * 365, np.random.default_rng(0), effect_capacity=0.3, effect_monday=0.4, effect_fiscal=0.4)


def test_simulated_records(records):
    assert list(records.columns) == ["date", "case_type", "severity", "assigned", "default", "exits_7d", "occupancy"]
    daily = records.groupby("date").size()
    weekend = daily.index.day_of_week >= 5
    assert daily[~weekend].mean() == pytest.approx(8, abs=0.4) and daily[weekend].sum() / (3 * 104.3) == pytest.approx(0.8, abs=0.15)
    assert records.default.between(0, 4).all() and records.assigned.between(0, 4).all() and records.occupancy.between(0, 1).all()
    by_year = (records.assigned != records.default).groupby((records.date.dt.year * 12 + records.date.dt.month - 7) // 12).sum()
    assert (by_year <= S.BUDGET).all()
    assert records.equals(S.simulate_service(3 * 365, np.random.default_rng(0), effect_capacity=0.3, effect_monday=0.4, effect_fiscal=0.4))


def test_constant_rate_agent():
    null = S.simulate_service(4 * 365, np.random.default_rng(3), effect_fiscal=None)
    over = null.assigned != null.default
    assert over.mean() == pytest.approx(S.BUDGET / S.CASES, abs=0.012)


def test_planted_effects_come_back_and_absent_ones_do_not(records):
    one = S.contrasts(S.override_model(records))
    assert list(one.index) == ["capacity", "monday", "early"] and (one.loc[["capacity", "monday"], "low"] > 0).all()
    many = np.array([S.contrasts(S.override_model(t)).estimate for t in S.simulate_counts(40, 2 * 365, np.random.default_rng(2), effect_capacity=0.3, effect_monday=0.4, effect_fiscal=0.4)])
    assert (many.mean(0) > 4 * many.std(0) / 40**0.5).all()
    p = np.array([S.joint_weekday_test(S.override_model(t)) for t in S.simulate_counts(60, 2 * 365, np.random.default_rng(1))])
    assert stats.kstest(p, "uniform").pvalue > 1e-3


def test_counts_and_cases_give_one_fit(records):
    fit = S.override_model(records)
    import statsmodels.api as sm
    date = records.date.dt
    names = np.where(date.day_of_week >= 5, "weekend", np.array(S.WEEKDAYS)[date.day_of_week])
    X = pd.DataFrame({c: (names == c[8:-1]).astype(float) if c.startswith("weekday") else ((date.month - 7) % 12 + 1 == int(c[-3:-1])).astype(float) if c.startswith("fiscal") else
                      {"const": 1.0, "log_exits": np.log1p(records.exits_7d), "occupancy": records.occupancy}[c] for c in fit.params.index})
    each = sm.Logit((records.assigned != records.default).astype(float), X).fit(disp=0)
    assert np.allclose(each.params, fit.params, atol=1e-6)
    assert not np.allclose(each.bse, fit.bse, rtol=1e-3)  # clusters, not cases
    given = S.override_model(records.drop(columns=["default", "assigned"]).assign(case_type=records.default), override=(records.assigned != records.default).to_numpy())
    assert np.allclose(given.params, fit.params, atol=1e-8)


def test_clusters_widen_intervals_where_days_are_dependent():
    rng = np.random.default_rng(0)
    day = np.repeat(np.arange(140), 20)
    rate = np.clip(0.3 + 0.2 * rng.standard_normal(140), 0.02, 0.98)[day]  # days differ: cases of a day are dependent
    df = pd.DataFrame({"date": pd.Timestamp("2021-01-04") + pd.to_timedelta(day, unit="D"), "case_type": 0})
    over = rng.random(len(df)) < rate
    profile = S.weekday_profile(df, over)
    naive = [1.96 * (r * (1 - r) / 400) ** 0.5 for r in profile.rate]
    assert ((profile.high - profile.low) / 2 > 1.5 * np.array(naive)).all()
    assert [over[df.date.dt.day_of_week == i].mean() for i in range(7)] == pytest.approx(profile.rate.tolist())


def test_weekday_profile_needs_every_weekday(records):
    with pytest.raises(ValueError, match="no case on a Sun"): S.weekday_profile(records[records.date.dt.day_of_week != 6])
    with pytest.raises(ValueError, match="can't be estimated"): S.override_model(records, override=((records.assigned != records.default) & (records.date.dt.day_of_week != 0)).to_numpy())


def test_default_is_recovered_out_of_fold(records):
    found = S.recover_default(records, ["severity", "case_type"], "assigned")
    assert (found == records.default).mean() > 0.97
    text = records.assign(band=pd.cut(records.severity, 5, labels=list("abcde")).astype(str))
    assert (S.recover_default(text, ["band"], "assigned") == records.default).mean() > 0.97
    noise = records.assign(assigned=np.random.default_rng(0).integers(2, size=len(records)), unit=np.arange(len(records)))
    assert (S.recover_default(noise, ["severity", "unit"], "assigned", max_depth=12, min_samples_leaf=1) == noise.assigned).mean() < 0.54  # memorising would give far more


def test_placebo(records):
    rng = np.random.default_rng(0)
    over = (rng.random(len(records)) < np.where(records.date.dt.day_of_week == 0, 0.4, 0.1))
    seen, null, p = S.date_placebo(records, over, 99, rng)
    assert p == 0.01 and seen > null.max() and null.mean() == pytest.approx(6, abs=1.5)  # six degrees of freedom
    assert S.date_placebo(records, rng.random(len(records)) < 0.1, 99, rng)[2] > 0.01


def test_real_stops():
    stops, where = S.minneapolis_stops()
    assert len(stops) == 43_699 and stops.search.mean() == pytest.approx(0.133, abs=0.001) and "2017" in str(where)
    assert set(stops.columns) == {"date", "case_type", "precinct", "hours", "neighbourhood", "search"}
    assert stops.date.min() >= pd.Timestamp("2017-01-01") and stops.date.max() < pd.Timestamp("2018-01-01")


def test_records_from_a_file(tmp_path, records):
    path = tmp_path / "records.csv"
    records.head(900).to_csv(path, index=False)
    assert np.allclose(S.read_service(path).exits_7d, records.exits_7d.head(900))
    records.head(900).drop(columns="default").to_csv(path, index=False)
    assert (S.read_service(path).default == records.default.head(900)).mean() > 0.9
    records.head(9).drop(columns="severity").to_csv(path, index=False)
    with pytest.raises(ValueError, match="severity"): S.read_service(path)
    records.head(9).assign(date="31st").to_csv(path, index=False)
    with pytest.raises(ValueError, match="path: a date"): S.read_service(path)
