"""Constraints, diagrams, engines and the projection layer, each by an independent route."""
import numpy as np
import pytest
import torch
from scipy import optimize

from neurips26_lit.decisions.casper import constraints as C
from neurips26_lit.decisions.casper import tasks as T
from neurips26_lit.decisions.casper.diagram import WidthExceeded, compile_diagram, random_problem
from neurips26_lit.decisions.casper.engines import build_engine, lexicographic_path
from neurips26_lit.decisions.casper.layer import Casper, cone_cost, project_cone
from neurips26_lit.decisions.casper.training import LOSSES, DigitNet, WeakLabels, equations, fit_sums, sum_data


def problems(count, seed=0, largest=6):
    "Feasible random problems with their models."
    rng = np.random.default_rng(seed)
    while count:
        problem = random_problem(rng, int(rng.integers(2, largest + 1)), int(rng.integers(1, 4)))
        models = problem.models()
        if len(models): count -= 1; yield problem, models, rng


def costs_of(models, cost): return torch.stack([cost[:, i, torch.as_tensor(models[:, i])] for i in range(models.shape[1])]).sum(0)


# constraints

def test_reading_and_checking_agree():
    for problem, _, rng in problems(60, 1):
        for c in problem.constraints:
            scope = problem.scope(c)
            sizes = [problem.sizes[i] for i in scope]
            order = list(range(len(scope))) if c.ordered else list(rng.permutation(len(scope)))
            reader = c.reader(sizes, order)
            for _ in range(30):
                y = np.array([rng.integers(s) for s in sizes])
                state = reader.start
                for depth, p in enumerate(order):
                    if state is None: break
                    state = reader.step(state, depth, int(y[p]))
                assert (state is not None) == bool(c.satisfied(y[None])[0]), (c, y)


def test_a_state_that_no_longer_matters_is_not_the_number_one():
    names = ("a", "b", "c")
    problem = C.Problem([C.Variable(n, 3) for n in names], [C.LinearLe(names, (1, 1, 1), 3), C.LinearEq(names, (1, 2, -1), 1)])
    assert compile_diagram(problem).count() == len(problem.models())


def test_huge_weights_are_exact():
    big = 10**400
    problem = C.Problem([C.Variable("a", 10), C.Variable("b", 10)], [C.LinearEq(("a", "b"), (big, -big - 1), -3)])
    assert problem.models().tolist() == [[3, 3]] and compile_diagram(problem).count() == 1


def test_given_fixes_variables():
    problem = T.addition(1).given({"s_0": 3, "s_1": 1})
    assert {int(a + b) for a, b, *_ in problem.models()} == {13}
    with pytest.raises(C.InfeasibleConstraint): compile_diagram(T.addition(1).given({"s_0": 9, "s_1": 1}))


# diagrams

def test_diagram_against_all_models():
    seen = 0
    for problem, models, rng in problems(200, 2):
        try: diagram = compile_diagram(problem)
        except WidthExceeded: continue
        seen += 1
        cost = torch.as_tensor(rng.standard_normal((3, len(problem.sizes), max(problem.sizes))))
        sums = costs_of(models, cost)
        y, value = diagram.min_sum(cost)
        assert diagram.count() == len(models) and problem.check(y).all()
        assert torch.allclose(value, sums.min(1).values, atol=1e-12) and torch.allclose(diagram.log_partition(-cost), torch.logsumexp(-sums, 1), atol=1e-10)
    assert seen > 180


def test_forbidden_values_and_rows_without_a_member():
    diagram = compile_diagram(T.addition(1))
    cost = torch.rand(2, 4, 10, dtype=torch.float64)
    cost[0, 2, torch.arange(10) != 5] = torch.inf
    cost[1, 2, torch.arange(10) != 9] = torch.inf; cost[1, 3, 0] = torch.inf
    y, value = diagram.min_sum(cost)
    assert y[0, 2] == 5 and (y[1] == -1).all() and torch.isinf(value[1])
    assert torch.isinf(diagram.log_partition(-cost)[1]) and torch.isfinite(diagram.log_partition(-cost)[0])


def test_log_partition_has_the_gradient_of_marginals():
    problem = T.addition(1)
    logits = torch.randn(2, 4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    models = problem.models()
    diagram = compile_diagram(problem)
    (g,) = torch.autograd.grad(diagram.log_partition(logits).sum(), logits)
    w = torch.softmax(costs_of(models, logits.detach()), 1)
    for v in range(10): assert torch.allclose(g[:, 0, v], w[:, torch.as_tensor(models[:, 0] == v)].sum(1), atol=1e-12)
    assert torch.autograd.gradcheck(diagram.log_partition, logits)


@pytest.mark.parametrize("n", [1, 2, 5, 100, 1024])
def test_addition_has_two_states_between_digits(n):
    diagram = compile_diagram(T.addition(n))
    assert all(diagram.widths[3 * j] <= 2 for j in range(1, n + 1)) and max(diagram.widths) <= 20
    assert diagram.count() == 100**n and diagram.n_arcs <= 150 * n


def test_width_budget_names_the_layer():
    with pytest.raises(WidthExceeded, match=r"max_width: layer \d+ .*sequential"): compile_diagram(T.sudoku(3), max_width=64)


# engines

def test_assignment_is_the_diagram_of_a_permutation():
    rng = np.random.default_rng(0)
    for n in range(1, 8):
        names = tuple(f"v{i}" for i in range(n))
        problem = C.Problem([C.Variable(v, n) for v in names], [C.Permutation(names)])
        cost = torch.as_tensor(rng.standard_normal((5, n, n)))
        a, b = build_engine(problem), build_engine(problem, "diagram")
        assert a.name == "assignment" and a.exact and torch.allclose(a.min_sum(cost)[1], b.min_sum(cost)[1]) and torch.equal(a.min_sum(cost)[0], b.min_sum(cost)[0])


def test_paths_are_cheapest_and_chordless():
    import networkx as nx
    rng = np.random.default_rng(0)
    for k in range(120):
        h, w, near = int(rng.integers(2, 7)), int(rng.integers(2, 7)), int(rng.choice([4, 8]))
        grid = T.grid_path(h, w, neighbours=near).constraints[0]
        rho = np.where(rng.random(h * w) < 0.5, 0.0, rng.random(h * w))
        path = lexicographic_path(rho, grid.near, 0, h * w - 1)
        graph = nx.DiGraph()
        graph.add_weighted_edges_from((i, j, rho[j]) for i, js in enumerate(grid.near) for j in js)
        assert rho[path].sum() == pytest.approx(rho[0] + nx.dijkstra_path_length(graph, 0, h * w - 1))
        mask = np.zeros(h * w, dtype=bool); mask[path] = True
        assert T.valid_path(mask.reshape(h, w), neighbours=near) and grid.satisfied(mask[None].astype(int))[0]


def test_judges_of_paths_agree():
    for h, w, near in ((3, 3, 8), (2, 4, 8), (3, 3, 4)):
        problem = T.grid_path(h, w, neighbours=near)
        y = np.array(np.unravel_index(np.arange(2 ** (h * w)), (2,) * (h * w))).T
        judged = np.array([T.valid_path(m.reshape(h, w), neighbours=near) for m in y])
        assert (judged == problem.check(y)).all() and judged.sum() == len(problem.constraints[0].paths)


def test_sat_engine_is_valid_and_refuses_what_has_no_member():
    for problem, models, rng in problems(80, 3):
        cost = torch.as_tensor(rng.random((2, len(problem.sizes), max(problem.sizes))))
        y, value = build_engine(problem, "sequential").min_sum(cost)
        assert problem.check(y).all() and (value >= costs_of(models, cost).min(1).values - 1e-12).all()
    with pytest.raises(C.InfeasibleConstraint): build_engine(T.addition(1).given({"s_0": 9, "s_1": 1}), "sequential")


def test_sudoku_with_one_solution():
    rng = np.random.default_rng(0)
    board = T.sudoku_board(rng)
    givens = T.unique_givens(board, rng)
    layer = Casper(T.sudoku())
    assert layer.engine == "sequential" and not layer.exact and (givens < 0).sum() > 30
    y = layer.decode(torch.randn(3, 81, 9, dtype=torch.float64), torch.as_tensor(givens.ravel()).expand(3, -1))
    assert (y.numpy() == board.ravel()).all()


# the layer

def test_projection_is_that_of_a_quadratic_programme():
    rng = np.random.default_rng(0)
    for _ in range(100):
        D = int(rng.integers(2, 8)); k, m = int(rng.integers(D)), float(rng.uniform(0.05, 2))
        x = rng.standard_normal(D) * 3
        z = project_cone(torch.as_tensor(x), torch.tensor(k), m).numpy()
        found = optimize.minimize(lambda v: ((v - x) ** 2).sum(), x, jac=lambda v: 2 * (v - x), method="SLSQP", constraints={"type": "ineq", "fun": lambda v: np.delete(v[k] - v - m, k)}, options={"ftol": 1e-15, "maxiter": 300})
        assert ((z - x) ** 2).sum() == pytest.approx(found.fun, abs=1e-6) and np.allclose(z, found.x, atol=1e-4)
        assert cone_cost(torch.as_tensor(x), m)[k] == pytest.approx(((z - x) ** 2).sum(), abs=1e-12)
        assert (np.delete(z[k] - z, k) >= m - 1e-12).all()


def test_layer_against_brute_force():
    for problem, models, rng in problems(80, 4):
        layer = Casper(problem, margin=0.15)
        x = [torch.as_tensor(rng.standard_normal((2, s))) for s in problem.sizes]
        z = layer(x)
        y = torch.stack([p.argmax(-1) for p in z], 1)
        assert torch.equal(y, layer.decode(x)) and problem.check(y).all()
        moved = sum(((a - b) ** 2).sum(-1) for a, b in zip(x, z))
        best = torch.stack([sum(((p - project_cone(p, torch.full((2,), int(v)), 0.15)) ** 2).sum(-1) for p, v in zip(x, m)) for m in models]).min(0).values
        assert (moved >= best - 1e-12).all() and torch.allclose(layer.distance(x), moved)
        if layer.exact: assert torch.allclose(moved, best, atol=1e-8)
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(layer(z), z))


def test_gradients_are_those_of_the_projection():
    for problem, _, rng in problems(25, 5):
        layer = Casper(problem, margin=0.2)
        x = [torch.as_tensor(rng.standard_normal((2, s))).requires_grad_() for s in problem.sizes]
        assert torch.autograd.gradcheck(lambda *p: tuple(layer(list(p))), x)
        for g, a, b in zip(torch.autograd.grad(layer.distance(x).sum(), x), x, layer(x)): assert torch.allclose(g, 2 * (a - b), atol=1e-10)


@pytest.mark.parametrize("dtype,top", [(torch.float32, 1e4), (torch.float64, 1e9), (torch.float16, 1.0)])
def test_the_margin_survives_rounding(dtype, top):
    layer = Casper(T.addition(2), margin=0.1)
    x = [(torch.randn(50, s, generator=torch.Generator().manual_seed(s)) * top / 5).to(dtype).clamp(-top, top) for s in layer.problem.sizes]
    y = torch.stack([p.argmax(-1) for p in layer(x)], 1)
    assert all(T.valid_sum(r) for r in y.tolist()) and layer(x)[0].dtype == dtype


def test_ties_batches_and_observations():
    layer = Casper(T.addition(1))
    zero = [torch.zeros(3, s) for s in layer.problem.sizes]
    assert torch.equal(layer.decode(zero)[0], layer.decode(zero)[2]) and T.valid_sum(layer.decode(zero)[0].tolist())
    x = [torch.randn(6, s, generator=torch.Generator().manual_seed(s)) for s in layer.problem.sizes]
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(layer.decode([p[order] for p in x]), layer.decode(x)[order])
    seen = torch.tensor([[-1, -1, 3, 1]]).expand(6, -1)
    y = layer.decode(x, seen)
    assert (y[:, 0] + y[:, 1] == 13).all()
    assert [tuple(p.shape) for p in layer([p[:0] for p in x])] == [(0, 10), (0, 10), (0, 10), (0, 2)]
    with pytest.raises(C.InfeasibleConstraint, match="row 1"): layer.decode(x, torch.tensor([[-1] * 4, [-1, -1, 9, 1]] + [[-1] * 4] * 4))


def test_soft_distance_tends_to_the_distance():
    layer = Casper(T.addition(1), margin=1.0)
    x = [torch.randn(4, s, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in layer.problem.sizes]
    gaps = [float((layer.distance(x) - layer.soft_distance(x, t)).max()) for t in (1.0, 0.1, 1e-3)]
    assert gaps[0] > gaps[1] > gaps[2] >= 0 and gaps[2] < 0.01


@pytest.mark.parametrize("call,word", [
    (lambda: C.Variable("a", 0), "size:"), (lambda: C.Variable("", 2), "name:"), (lambda: C.AllDifferent(()), "vars:"), (lambda: C.AllDifferent(("a", "a")), "vars:"), (lambda: C.LinearEq(("a",), (1, 2), 0), "weights:"),
    (lambda: C.LinearEq(("a",), (1.5,), 0), "weights:"), (lambda: C.Cardinality(("a",), 0, 2, 1), "lo:"), (lambda: C.Table(("a", "b"), [(1,)]), "rows:"), (lambda: C.CNF(("a",), [(0,)]), "clauses:"),
    (lambda: C.GridPath(("a",), 1, 1, (0, 0), (0, 0)), "goal:"), (lambda: C.GridPath(("a", "b"), 1, 2, (0, 0), (3, 0)), "goal:"), (lambda: C.GridPath(("a",), 1, 2, (0, 0), (0, 1)), "vars:"),
    (lambda: C.Problem([], []), "variables:"), (lambda: C.Problem([C.Variable("a", 2)], [C.AllDifferent(("b",))]), "constraints:"), (lambda: C.Problem([C.Variable("a", 3)], [C.CNF(("a",), [(1,)])]), "vars:"),
    (lambda: C.Problem([C.Variable("a", 3)], [C.Permutation(("a",))]), "vars:"), (lambda: T.addition(1).check([[1]]), "y:"), (lambda: T.addition(1).given({"z": 1}), "fixed:"), (lambda: T.addition(1).given({"a_0": 10}), "fixed:"),
    (lambda: T.addition(3).models(), "sizes:"), (lambda: compile_diagram(T.addition(1), order=[0, 0, 1, 2]), "order:"), (lambda: compile_diagram(T.addition(1)).min_sum(torch.zeros(1, 2, 10)), "cost:"),
    (lambda: compile_diagram(T.addition(1)).min_sum(torch.full((1, 4, 10), torch.nan)), "cost:"), (lambda: Casper(T.addition(1), margin=0), "margin:"), (lambda: Casper(T.addition(1), engine="x"), "engine:"),
    (lambda: Casper(T.addition(1), engine="monotone"), "engine:"), (lambda: Casper(T.addition(1))(torch.zeros(1, 4, 10)), "x: variable s_1 expects 2 scores, got 10"), (lambda: Casper(T.addition(1))([torch.zeros(1, 9)] * 4), "x: variable a_0 expects 10 scores, got 9"),
    (lambda: Casper(T.sudoku(2))(torch.full((1, 16, 4), torch.nan)), "x:"), (lambda: Casper(T.sudoku(2))(torch.full((1, 16, 4), torch.inf)), "x:"), (lambda: Casper(T.sudoku(2))(torch.full((1, 16, 4), 1e6)), "margin: 0.1 is lost"),
    (lambda: Casper(T.sudoku(2))(torch.zeros(1, 16, 4), torch.zeros(1, 15, dtype=torch.int64)), "observed:"), (lambda: Casper(T.sudoku(2))(torch.zeros(1, 16, 4), torch.full((1, 16), 4)), "observed:"),
    (lambda: project_cone(torch.zeros(3), torch.tensor(3), 0.1), "k:"), (lambda: project_cone(torch.zeros(3), torch.tensor(1), -0.1), "margin:"), (lambda: T.addition(0), "n_digits:"), (lambda: T.digit_images("val", np.random.default_rng(0)), "split:"),
    (lambda: T.digit_images("train", np.random.default_rng(0), "mnist"), "source:"), (lambda: T.terrain_maps(0, 5, np.random.default_rng(0)), "n:"), (lambda: WeakLabels(1, "mse"), "loss:")])
def test_bad_input(call, word):
    with pytest.raises(ValueError) as e: call()
    assert str(e.value).startswith(word)


# tasks and training

@pytest.mark.parametrize("source,shape", [("sklearn", (1, 8, 8)), ("mfeat", (1, 16, 15))])
def test_no_picture_is_in_both_splits(source, shape):
    parts = [T.digit_images(s, np.random.default_rng(1), source) for s in ("train", "test")]
    assert parts[0][0].shape[1:] == shape and not {p.numpy().tobytes() for p in parts[0][0]} & {p.numpy().tobytes() for p in parts[1][0]}
    assert len(parts[0][1]) / (len(parts[0][1]) + len(parts[1][1])) == pytest.approx(0.7, abs=0.001) and float(parts[0][0].max()) == 1


def test_equations_add_up_and_show_their_digits():
    _, y = T.digit_images("test", np.random.default_rng(0))
    where, digit = equations(200, 4, y, np.random.default_rng(0))
    assert all(T.valid_sum(r) for r in digit.tolist()) and torch.equal(y[where], digit)


def test_terrain_labels_are_cheapest_paths():
    import networkx as nx
    maps = T.terrain_maps(3, 9, np.random.default_rng(0))
    grid = T.grid_path(9, 9).constraints[0]
    for cost, path in zip(maps["cost"].double().numpy(), maps["path"].numpy()):
        graph = nx.DiGraph()
        graph.add_weighted_edges_from((i, j, cost.ravel()[j]) for i, js in enumerate(grid.near) for j in js)
        assert cost[path].sum() == pytest.approx(cost[0, 0] + nx.dijkstra_path_length(graph, 0, 80), rel=1e-5) and T.valid_path(path)
    with pytest.raises(ValueError, match="no terrain rows"):
        import tempfile; f = tempfile.NamedTemporaryFile(suffix=".sav"); f.write(b"nothing"); f.flush(); T.read_scenario(f.name)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_gradients_and_learn(name):
    x, y = T.digit_images("train", np.random.default_rng(0))
    pairs, total = sum_data(128, 1, y, np.random.default_rng(0))
    torch.manual_seed(0)
    history = fit_sums(DigitNet(), WeakLabels(1, name), x, pairs, total, 2, torch.Generator().manual_seed(0))
    assert np.isfinite(history).all()
    scores = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(lambda s: WeakLabels(1, name)(s, total[:3], 0), scores)
