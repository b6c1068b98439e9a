"""Sparse Hessians: the eleven oracles of the method, each by an independent route, and mutations that must turn them red."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.sparse import csr_array

torch = pytest.importorskip("torch")
ase = pytest.importorskip("ase")
pytest.importorskip("ase.build")
nx = pytest.importorskip("networkx")
pytest.importorskip("numba")

from neurips26_lit.science.sparse_hessian import coloring as col  # noqa: E402
from neurips26_lit.science.sparse_hessian import hessian as hes  # noqa: E402
from neurips26_lit.science.sparse_hessian import pattern as pat  # noqa: E402
from neurips26_lit.science.sparse_hessian import potentials as pot  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ani():
    pytest.importorskip("torchani")
    return pot.load_ani1x()


def band(n, width):
    return np.abs(np.subtract.outer(np.arange(n), np.arange(n))) <= width


def cloud_pattern(seed, n=40, side=5.0, cutoff=1.5, layers=1):
    pos = np.random.default_rng(seed).random((n, 3)) * side
    return pos, pat.hessian_pattern(pat.neighbour_matrix(pos, cutoff), layers)


def graph_of(pattern):
    return nx.from_numpy_array(np.asarray(pattern.toarray() & ~np.eye(pattern.shape[0], dtype=bool)))


def is_star(pattern, colors):
    "By definition, on paths; shares nothing with the module."
    G = graph_of(pattern)
    if any(colors[i] == colors[j] for i, j in G.edges): return False
    for w, x in G.edges:
        for u, y in itertools.product(set(G[w]) - {x}, set(G[x]) - {w}):
            if u != y and len({colors[u], colors[w], colors[x], colors[y]}) < 3: return False
    return True


def symmetric_integers(pattern, seed):
    n = pattern.shape[0]
    M = np.triu(np.random.default_rng(seed).integers(-99, 100, (3 * n, 3 * n)) * np.kron(pattern.toarray(), np.ones((3, 3), int)))
    return M + np.triu(M, 1).T


# 1. Patterns one can write down

@pytest.mark.parametrize("layers", [1, 2, 3])
def test_path_graph_gives_a_band(layers):
    assert (pat.hessian_pattern(csr_array(band(30, 1) & ~np.eye(30, dtype=bool)), layers).toarray() == band(30, 2 * layers)).all()


def test_far_molecules_are_block_diagonal():
    one = pot.alkane(4).positions
    S = pat.hessian_pattern(pat.neighbour_matrix(np.vstack([one, one + [0, 100, 0]]), 5.0), 3).toarray()
    assert not S[:14, 14:].any() and S[:14, :14].any()


@given(st.integers(0, 10**6), st.integers(1, 3), st.floats(0.8, 2.0))
@settings(max_examples=25, deadline=None)
def test_pattern_equals_shortest_paths(seed, layers, cutoff):
    pos = np.random.default_rng(seed).random((18, 3)) * 4
    near = (d := np.linalg.norm(pos[:, None] - pos, axis=-1)) < cutoff
    hops = dict(nx.all_pairs_shortest_path_length(nx.from_numpy_array(near & (d > 0))))
    expected = np.array([[hops[i].get(j, 99) <= 2 * layers for j in range(18)] for i in range(18)])
    assert (pat.hessian_pattern(pat.neighbour_matrix(pos, cutoff), layers).toarray() == expected).all()


def test_counts_of_paths_dont_overflow():
    hub = np.zeros((258, 258), dtype=bool)
    hub[:2, 2:] = hub[2:, :2] = True
    assert pat.hessian_pattern(csr_array(hub), 1)[0, 1]


def test_layers_of_different_graphs_apply_first_to_last():
    first, last = np.zeros((3, 3), bool), np.zeros((3, 3), bool)
    first[1, 2], last[0, 1] = True, True  # 1 hears 2, then 0 hears 1
    assert pat.receptive_field([csr_array(first), csr_array(last)], 2)[0, 2]
    assert not pat.receptive_field([csr_array(last), csr_array(first)], 2)[0, 2]


@pytest.mark.parametrize("pbc", [False, True, (True, False, True), (False, False, True)])
@pytest.mark.parametrize("cutoff", [1.0, 4.5, 9.0])
def test_neighbours_equal_ase(pbc, cutoff):
    from ase.neighborlist import neighbor_list

    cell = np.array([[6.0, 0, 0], [2.5, 5.5, 0], [-1.0, 1.5, 4.0]])
    pos = (np.random.default_rng(3).random((12, 3)) * 3 - 1) @ cell  # also outside the cell
    i, j, shift = neighbor_list("ijS", ase.Atoms("H12", pos, cell=cell, pbc=pbc), cutoff)
    ours = pat.neighbour_list(pos, cutoff, cell, pbc)
    pairs = lambda i, j, s: sorted(zip(i.tolist(), j.tolist(), *(np.round(s, 6) + 0.0).T.tolist()))
    assert pairs(ours.centre, ours.neighbour, ours.shift) == pairs(i, j, shift @ cell)


# 2. What models depend on

@pytest.mark.parametrize("layers", [1, 2, 3])
def test_dependence_of_random_weights_is_the_receptive_field(layers):
    atoms, model = pot.alkane(8, 0.03), pot.LocalPotential(3.0, layers, seed=4)
    pos = torch.as_tensor(atoms.positions)
    measured = pat.dependence_matrix(lambda x: model.atomic_energies(atoms.numbers, x), pos).toarray()
    assert (measured == pat.receptive_field(pat.neighbour_matrix(pos, 3.0), layers).toarray()).all()


def test_ani_depends_on_no_more_than_its_cutoff(ani):
    atoms = pot.alkane(8, 0.03)
    pos = torch.as_tensor(atoms.positions)
    measured = pat.dependence_matrix(lambda x: ani.atomic_energies(atoms.numbers, x), pos).toarray()
    predicted = pat.receptive_field(pat.neighbour_matrix(pos, 5.2, closed=True), 1).toarray()
    assert not (measured & ~predicted).any() and measured.sum() > 0.95 * predicted.sum() and not predicted.all()


# 3. Exactness

CASES = [(3.0, 1, "alkane"), (3.0, 2, "alkane"), (3.0, 3, "alkane"), (5.0, 1, "alkane"), (3.0, 1, "water"), (3.0, 1, "box")]


@pytest.mark.parametrize("cutoff, layers, kind", CASES)
def test_sparse_equals_dense(cutoff, layers, kind):
    atoms = {"alkane": lambda: pot.alkane(10, 0.03), "water": lambda: pot.water_cluster(8, relax=0), "box": lambda: pot.water_box(8)}[kind]()
    where = (atoms.cell.array, True) if kind == "box" else (None, False)
    model = pot.LocalPotential(cutoff, layers, seed=1)
    pos, energy_fn = torch.as_tensor(atoms.positions), model.energy_fn(atoms.numbers, *where)
    S = model.pattern(atoms.numbers, pos, *where)
    dense = hes.dense_hessian(energy_fn, pos)
    for rule in ("star", "distance2", np.arange(len(pos))):
        got = hes.sparse_hessian(energy_fn, pos, S, rule)
        assert np.abs(got.matrix.toarray() - dense.numpy()).max() <= 1e-9 * dense.abs().max()
        assert got.num_hvps == 3 * col.num_colors(got.colors)
    assert (dense.numpy()[~np.kron(S.toarray(), np.ones((3, 3), bool))] == 0).all()
    assert np.abs(got.matrix - got.matrix.T).max() == 0


def test_sparse_equals_dense_on_ani(ani):
    atoms = pot.alkane(10, 0.03)
    pos, energy_fn = torch.as_tensor(atoms.positions), ani.energy_fn(atoms.numbers)
    S = ani.pattern(atoms.numbers, pos)
    got, dense = hes.sparse_hessian(energy_fn, pos, S, chunk=1), hes.dense_hessian(energy_fn, pos, 1)
    assert got.num_hvps < 96 and not S.toarray().all()
    assert np.abs(got.matrix.toarray() - dense.numpy()).max() <= 1e-9 * dense.abs().max()
    assert (dense.numpy()[~np.kron(S.toarray(), np.ones((3, 3), bool))] == 0).all()


@pytest.mark.parametrize("name", ["ani", "network"])
def test_modes_chunks_and_torch_func_agree(name, request):
    atoms = pot.alkane(3, 0.03)
    potential = request.getfixturevalue("ani") if name == "ani" else pot.LocalPotential(3.0, 2)
    pos, energy_fn = torch.as_tensor(atoms.positions), potential.energy_fn(atoms.numbers)
    seeds = torch.randn(5, 11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference = torch.einsum("iajb,pjb->pia", torch.func.hessian(energy_fn)(pos), seeds)
    for mode, chunk in itertools.product(("reverse_over_reverse", "forward_over_reverse"), (1, 2, 16)):
        assert (hes.hvps(energy_fn, pos, seeds, chunk, mode) - reference).abs().max() <= 1e-10 * reference.abs().max()


def test_finite_differences(ani):
    atoms = pot.alkane(3, 0.03)
    pos = torch.as_tensor(atoms.positions)
    smooth = pot.LocalPotential(3.0, 2).energy_fn(atoms.numbers)
    dense = hes.dense_hessian(smooth, pos)
    coarse, fine = (hes.finite_difference_hessian(smooth, pos, h) for h in (1e-3, 5e-4))
    assert ((4 * fine - coarse) / 3 - dense).abs().max() <= 1e-5 * dense.abs().max()  # Richardson from h = 1e-3 Å
    kinked = ani.energy_fn(atoms.numbers)  # CELU: only a small step stays on one side
    dense = hes.dense_hessian(kinked, pos, 1)
    assert (hes.finite_difference_hessian(kinked, pos, 1e-5) - dense).abs().max() <= 1e-5 * dense.abs().max()


# 4. and 5. Symmetries

def test_rows_sum_to_zero_and_six_modes_vanish(ani):
    atoms = ase.build.molecule("CH3CH2OH")
    energy_fn = ani.energy_fn(atoms.numbers)
    pos = pot.relax(energy_fn, torch.as_tensor(atoms.positions), fmax=1e-5)
    H = hes.sparse_hessian(energy_fn, pos, ani.pattern(atoms.numbers, pos), chunk=1).matrix
    assert np.abs(H.toarray().reshape(9, 3, 9, 3).sum(2)).max() <= 1e-9 * np.abs(H.data).max()
    waves, modes = hes.lowest_modes(H, atoms.get_masses(), 27)
    assert (np.abs(waves) < 10).sum() == 6
    assert np.allclose(np.linalg.norm(modes.reshape(27, -1), axis=1), 1)


def test_linear_molecule_has_five_zero_modes(ani):
    atoms = ase.build.molecule("CO2")
    energy_fn = ani.energy_fn(atoms.numbers)
    pos = pot.relax(energy_fn, torch.as_tensor(atoms.positions), fmax=1e-6)
    assert (np.abs(hes.lowest_modes(hes.dense_hessian(energy_fn, pos, 1), atoms.get_masses(), 9)[0]) < 10).sum() == 5


def test_mirror_plane_keeps_digits(ani):
    "torchani's prod loses eight digits when a coordinate difference is tiny; general position keeps them."
    atoms = ase.build.molecule("CH3CH2OH")
    pos = torch.as_tensor(atoms.positions) + 1e-9 * torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    energy_fn = ani.energy_fn(atoms.numbers)
    dense = hes.dense_hessian(energy_fn, pos, 1)
    assert (dense - dense.T).abs().max() < 1e-11 * dense.abs().max()


def test_rotation_turns_the_hessian():
    atoms, model = pot.alkane(6, 0.03), pot.LocalPotential(3.0, 1)
    pos, energy_fn = torch.as_tensor(atoms.positions), model.energy_fn(atoms.numbers)
    Q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))[0]
    H, turned = (hes.sparse_hessian(energy_fn, x, model.pattern(atoms.numbers, x)).matrix.toarray() for x in (pos, pos @ Q.T))
    big = np.kron(np.eye(len(pos)), Q.numpy())
    assert np.abs(turned - big @ H @ big.T).max() <= 1e-8 * np.abs(H).max()


def test_renaming_atoms_permutes_the_hessian_and_keeps_counts():
    atoms, model = pot.alkane(14, 0.03), pot.LocalPotential(3.0, 1)
    p = np.random.default_rng(0).permutation(len(atoms))
    pos = torch.as_tensor(atoms.positions)
    S, T = model.pattern(atoms.numbers, pos), model.pattern(atoms.numbers[p], pos[p])
    assert (T.toarray() == S.toarray()[p][:, p]).all()
    for rule in (col.star_coloring, col.distance2_coloring):
        assert (rule(S, "largest_first", pos)[p] == rule(T, "largest_first", pos[p])).all()
    H = hes.sparse_hessian(model.energy_fn(atoms.numbers), pos, S).matrix.toarray()
    K = hes.sparse_hessian(model.energy_fn(atoms.numbers[p]), pos[p], T).matrix.toarray()
    q = (3 * p[:, None] + np.arange(3)).ravel()
    assert np.abs(K - H[q][:, q]).max() <= 1e-12 * np.abs(H).max()


# 6. and 7. Colorings

@given(st.integers(0, 10**6), st.integers(2, 12), st.floats(0.05, 0.8))
@settings(max_examples=60, deadline=None)
def test_outputs_are_star_and_distance2_colorings(seed, n, density):
    rng = np.random.default_rng(seed)
    m = rng.random((n, n)) < density
    S = csr_array(m | m.T | np.eye(n, dtype=bool))
    for order in ("best", "largest_first", "smallest_last", "random"):
        star, d2 = col.star_coloring(S, order, seed=seed), col.distance2_coloring(S, order, seed=seed)
        assert is_star(S, star) and col.is_star_coloring(S, star)
        assert col.is_distance2_coloring(S, d2) and is_star(S, d2)
        assert sorted(set(star)) == list(range(col.num_colors(star)))
    assert col.num_colors(col.star_coloring(S)) <= col.num_colors(col.distance2_coloring(S))
    assert col.num_colors(col.distance2_coloring(S)) >= np.diff(S.indptr).max()


@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_checker_equals_the_definition(seed, n, k):
    rng = np.random.default_rng(seed)
    m = rng.random((n, n)) < 0.4
    S, colors = csr_array(m | m.T | np.eye(n, dtype=bool)), rng.integers(0, k, n)
    assert col.is_star_coloring(S, colors) == is_star(S, colors)
    assert col.is_distance2_coloring(S, colors) == all(len(set(colors[r])) == r.sum() for r in S.toarray())


def star_chromatic_number(S):
    n, dense = S.shape[0], S.toarray()

    def grow(colors, limit):
        k = len(colors)
        if k and not is_star(csr_array(dense[:k, :k]), colors): return False
        return k == n or any(grow([*colors, c], limit) for c in range(min(max(colors, default=-1) + 2, limit)))
    return next(k for k in range(1, n + 1) if grow([], k))


def test_greedy_against_exhaustive_search():
    rng, below = np.random.default_rng(0), []
    for _ in range(60):
        n = int(rng.integers(4, 10))
        m = rng.random((n, n)) < rng.uniform(0.15, 0.5)
        S = csr_array(m | m.T | np.eye(n, dtype=bool))
        order = rng.permutation(n)
        star = col.num_colors(col.star_coloring(S, order))
        assert star >= star_chromatic_number(S)
        below.append(star <= col.num_colors(col.distance2_coloring(S, order)))
    assert np.mean(below) >= 0.95


def test_cube_edges_exact_case():
    "A 3-cube's graph has star chromatic number 4."
    S = nx.to_numpy_array(nx.hypercube_graph(3)).astype(bool) | np.eye(8, dtype=bool)
    assert star_chromatic_number(csr_array(S)) == 4 <= col.num_colors(col.star_coloring(csr_array(S)))


@pytest.mark.parametrize("order", ["natural", "largest_first", "smallest_last"])
@pytest.mark.parametrize("seed", range(4))
def test_distance2_equals_networkx_on_the_square(order, seed):
    pos, S = cloud_pattern(seed, n=70, side=8.0, cutoff=2.0)
    square = nx.from_numpy_array((S.toarray().astype(int) @ S.toarray() > 0) & ~np.eye(70, dtype=bool))
    visit = col.visiting_order(col._graph(S), order, pos).tolist()
    theirs = nx.greedy_color(square, strategy=lambda G, c: visit)
    assert [theirs[v] for v in range(70)] == col.distance2_coloring(S, order, pos).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_smallest_last_peels_the_emptiest(seed):
    _, S = cloud_pattern(seed, n=30)
    G, order = graph_of(S), col.visiting_order(col._graph(S), "smallest_last")
    for v in order[::-1]:
        assert G.degree[v] == min(d for _, d in G.degree)
        G.remove_node(v)


def test_many_colors_widen_the_table():
    S = csr_array(np.ones((200, 200), dtype=bool))
    assert col.num_colors(col.star_coloring(S, "largest_first")) == 200


# 8. and 9. Reading back

@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_decompression_is_bit_exact(seed):
    _, S = cloud_pattern(seed, n=25, side=4.0)
    M = symmetric_integers(S, seed)
    for colors in (col.star_coloring(S), col.distance2_coloring(S), np.random.default_rng(seed).permutation(25)):
        assert (hes.decompress(S, colors, hes.compress(M, colors)).toarray() == M).all()
        assert (hes.decompress(S, colors, hes.compress(csr_array(M), colors).numpy()).toarray() == M).all()


def test_quadratic_energy_gives_its_matrix():
    pos, S = cloud_pattern(0)
    K = np.kron(S.toarray(), np.ones((3, 3))) * np.random.default_rng(0).standard_normal((120, 120))
    K = K + K.T
    energy = lambda x: 0.5 * x.flatten() @ torch.as_tensor(K) @ x.flatten()
    assert np.abs(hes.sparse_hessian(energy, torch.as_tensor(pos), S).matrix.toarray() - K).max() <= 1e-12 * np.abs(K).max()


# 10. and 11. Closed forms and a peer

def test_lennard_jones_blocks_and_pattern():
    pos = torch.as_tensor(3.7 * np.stack(np.meshgrid(*[np.arange(3.0)] * 3), -1).reshape(-1, 3) + np.random.default_rng(1).normal(0, 0.1, (27, 3)))
    lj, numbers = pot.lennard_jones(5.0), np.full(27, 18)
    A = pat.neighbour_matrix(pos, 5.0).toarray()
    S = lj.pattern(numbers, pos)
    assert (S.toarray() == (A | np.eye(27, dtype=bool))).all() and pat.hessian_pattern(csr_array(A), 1).nnz > S.nnz
    H = hes.sparse_hessian(lj.energy_fn(numbers), pos, S).matrix.toarray().reshape(27, 3, 27, 3)
    for i, j in np.argwhere(A):
        r = (pos[j] - pos[i]).numpy()
        d = np.linalg.norm(r)
        rr, s = np.outer(r, r) / d**2, 3.4 / d
        phi1, phi2 = 4 * 0.0103 * (-12 * s**12 + 6 * s**6) / d, 4 * 0.0103 * (156 * s**12 - 42 * s**6) / d**2
        assert np.abs(H[i, :, j] + phi2 * rr + phi1 / d * (np.eye(3) - rr)).max() <= 1e-12


def test_periodic_argon_equals_ase_finite_differences():
    from ase.build import bulk
    from ase.calculators.lj import LennardJones

    atoms = bulk("Ar", "fcc", a=5.3, cubic=True) * (2, 2, 2)
    atoms.rattle(0.05, seed=0)
    atoms.calc = LennardJones(sigma=3.4, epsilon=0.0103, rc=5.0, ro=5.0, smooth=False)
    n, h, columns = len(atoms), 1e-4, []
    for i, a in itertools.product(range(n), range(3)):
        forces = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.calc = atoms.calc
            moved.positions[i, a] += sign * h
            forces.append(moved.get_forces())
        columns.append((forces[1] - forces[0]).ravel() / (2 * h))
    reference = np.stack(columns)
    lj = pot.lennard_jones(5.0)
    pos, where = torch.as_tensor(atoms.positions), (atoms.cell.array, True)
    S = lj.pattern(atoms.numbers, pos, *where)
    H = hes.sparse_hessian(lj.energy_fn(atoms.numbers, *where), pos, S).matrix.toarray()
    assert np.abs(H - reference).max() <= 1e-5 * np.abs(reference).max()
    assert S.nnz > pat.neighbour_matrix(atoms.positions, 5.0).nnz + n  # pairs through images


# Mutations: one rule altered, and an oracle turns red

def test_mutation_one_hop_short_is_unsound():
    atoms, model = pot.alkane(12, 0.03), pot.LocalPotential(3.0, 2)
    pos, energy_fn = torch.as_tensor(atoms.positions), model.energy_fn(atoms.numbers)
    short = pat.receptive_field(pat.neighbour_matrix(pos, 3.0), 2)  # the energy's reach taken for the Hessian's
    assert (hes.dense_hessian(energy_fn, pos).numpy()[~np.kron(short.toarray(), np.ones((3, 3), bool))] != 0).any()
    probes = torch.Generator().manual_seed(0)
    assert hes.verify(energy_fn, pos, hes.sparse_hessian(energy_fn, pos, short).matrix, generator=probes) > 1e-9
    assert hes.verify(energy_fn, pos, hes.sparse_hessian(energy_fn, pos, model.pattern(atoms.numbers, pos)).matrix, generator=probes) < 1e-12


@pytest.mark.parametrize("dropped", ["count[v, cw] > 1 or ", " or count[x, cw] > 1", "forbidden[cw] = v"])
def test_mutation_of_a_star_rule_is_caught(dropped):
    "The greedy kernel recompiled in Python with one of its rules removed."
    import inspect

    source = inspect.getsource(col._greedy_star.py_func)
    assert dropped in source
    space = {"np": np, "_first_free": col._first_free.py_func, "njit": lambda **_: lambda f: f}
    exec(source.replace(dropped, "pass" if "=" in dropped else ""), space)
    caught = 0
    for seed in range(6):
        pos, S = cloud_pattern(seed, n=40)
        graph = col._graph(S)
        wrong = space["_greedy_star"](graph.indptr, graph.indices, np.arange(40))
        right = col._greedy_star.py_func(graph.indptr, graph.indices, np.arange(40))
        assert is_star(S, right) and col.is_star_coloring(S, right) and (right == col.star_coloring(S, np.arange(40))).all()
        caught += not col.is_star_coloring(S, wrong)
    assert caught


def test_mutation_of_the_reading_rule_is_caught(monkeypatch):
    _, S = cloud_pattern(0)
    M, colors = symmetric_integers(S, 0), col.star_coloring(S)
    honest = hes.recoverable
    monkeypatch.setattr(hes, "recoverable", lambda p, c: (*honest(p, c)[:2], np.ones_like(honest(p, c)[2]), np.zeros_like(honest(p, c)[3])))
    assert not (hes.decompress(S, colors, hes.compress(M, colors)).toarray() == M).all()


def test_mutation_of_the_seed_order_is_caught(monkeypatch):
    atoms, model = pot.alkane(6, 0.03), pot.LocalPotential(3.0, 1)
    pos, energy_fn = torch.as_tensor(atoms.positions), model.energy_fn(atoms.numbers)
    S = model.pattern(atoms.numbers, pos)
    honest = hes.seed_vectors
    monkeypatch.setattr(hes, "seed_vectors", lambda c: honest(c).reshape(-1, 3, len(c), 3).transpose(0, 1).reshape(-1, len(c), 3))  # axis-major
    assert hes.verify(energy_fn, pos, hes.sparse_hessian(energy_fn, pos, S).matrix) > 1e-3


# Public boundary

def test_errors_name_the_argument():
    pos, S = cloud_pattern(0)
    x = torch.as_tensor(pos)
    bad = [(lambda: pat.neighbour_matrix(np.zeros((2, 3)), 1.0), "pos: atoms 0 and 1 coincide"), (lambda: pat.neighbour_matrix(pos, -1.0), "cutoff"),
           (lambda: pat.neighbour_matrix(np.full((2, 3), np.inf), 1.0), "pos: atom 0"), (lambda: pat.neighbour_matrix(pos, 1.0, pbc=True), "cell"),
           (lambda: pat.neighbour_matrix(pos, 1.0, np.ones((3, 3)), True), "cell: the lattice"), (lambda: pat.hessian_pattern(S, 0), "num_layers"),
           (lambda: pat.hessian_pattern(S, 1.5), "num_layers"), (lambda: pat.hessian_pattern(S, float("inf")), "num_layers.*full"), (lambda: pat.hessian_pattern(csr_array((2, 3)), 1), "adj"),
           (lambda: pat.hessian_pattern(S, 1, csr_array((2, 2))), "pair_terms"), (lambda: col.star_coloring(S, "natural"), "pos"), (lambda: col.star_coloring(S, "fast"), "order"),
           (lambda: col.star_coloring(csr_array(np.triu(S.toarray()))), "pattern: expected a symmetric"), (lambda: col.is_star_coloring(S, np.zeros(3)), "colors"),
           (lambda: hes.sparse_hessian(lambda x: x.pow(2).sum(), x, S[:5, :5]), "pattern"), (lambda: hes.sparse_hessian(lambda x: x.pow(2).sum(), x, S, np.zeros(40, int)), r"colors: not a star coloring; block \(0, 0\)"),
           (lambda: hes.hvp(lambda x: x.sum(), x, x), "energy_fn: its gradient"), (lambda: hes.hvp(lambda x: x.detach().sum(), x, x), "energy_fn: its value"), (lambda: hes.hvp(lambda x: x, x, x), "energy_fn: expected a scalar"),
           (lambda: hes.hvps(lambda x: x.pow(2).sum(), x, x), "seeds"), (lambda: hes.hvp(lambda x: x.pow(2).sum(), x, x, "fast"), "mode"), (lambda: hes.compress(np.eye(6), np.zeros(3, int)), "matrix"),
           (lambda: hes.decompress(S, np.arange(40), np.zeros((3, 40, 3))), "compressed"), (lambda: hes.lowest_modes(np.eye(6), np.ones(3)), "masses"), (lambda: hes.lowest_modes(np.eye(6), -np.ones(2)), "masses"),
           (lambda: hes.verify(lambda x: x.pow(2).sum(), x, np.eye(3)), "matrix"), (lambda: pot.LocalPotential(-1.0), "cutoff"), (lambda: pot.alkane(0), "n:"), (lambda: pot.water_box(9), "n:"), (lambda: pot.peptide("1"), "sequence"),
           (lambda: pot.load_foundation("x"), "name"), (lambda: pot.published_pattern("x", pos), "name"), (lambda: pot.LocalPotential().pattern([1], pos), "numbers")]
    for call, text in bad:
        with pytest.raises(ValueError, match=text): call()


def test_missing_foundation_model_says_what_to_install():
    for name in ("MACE-OFF23 small", "SevenNet-0"):
        with pytest.raises(ImportError, match="needs the package"): pot.load_foundation(name)


class MaceStandIn(torch.nn.Module):
    "Has MACE's inputs and outputs, computes vectors as MACE does, and our own network inside."

    def __init__(self, inner):
        super().__init__()
        self.inner, self.r_max, self.num_interactions, self.atomic_numbers = inner, torch.tensor(inner.cutoff), torch.tensor(inner.num_layers), torch.tensor([1, 8])

    def forward(self, data, training=False, compute_force=True):
        assert training and not compute_force
        sender, receiver = data["edge_index"]
        assert torch.allclose(data["unit_shifts"] @ data["cell"], data["shifts"])
        near = pat.Neighbours(receiver.numpy(), sender.numpy(), -data["shifts"].numpy())
        return {"node_energy": self.inner.from_neighbours(self.atomic_numbers[data["node_attrs"].argmax(1)], data["positions"], near)}


class SevenNetStandIn(torch.nn.Module):
    "Has SevenNet's keys; energies from edge vectors alone."

    def __init__(self):
        super().__init__()
        for k in range(2): self.add_module(f"{k}_convolution", torch.nn.Identity())
        self.add_module("force_output", torch.nn.Identity())

    def set_is_batch_data(self, flag): self.batched = flag

    def forward(self, data):
        assert not self.batched and "force_output" not in self._modules
        s6 = (2.0 / data["edge_vec"].pow(2).sum(1)) ** 3
        return {"inferred_atomic_energy": torch.zeros(len(data["x"]), 1, dtype=torch.float64).index_add(0, data["edge_index"][1], (s6**2 - s6)[:, None])}


def test_adapters_of_foundation_models_on_stand_ins():
    box, inner = pot.water_box(8), pot.LocalPotential(3.0, 2)
    x, where = torch.as_tensor(box.positions), (box.cell.array, True)
    mace = pot.MACEPotential(MaceStandIn(inner))
    assert (mace.cutoff, mace.num_layers) == (3.0, 2) and isinstance(mace, pot.Potential)
    assert torch.allclose(mace.atomic_energies(box.numbers, x, *where), inner.atomic_energies(box.numbers, x, *where), atol=1e-12)
    with pytest.raises(ValueError, match="numbers"): mace.atomic_energies([6], x[:1])
    seven = pot.SevenNetPotential(SevenNetStandIn(), 4.0, {1: 0, 8: 1})
    assert (seven.cutoff, seven.num_layers) == (4.0, 2)
    near = pat.neighbour_list(x, 4.0, *where)
    d2 = ((box.positions[near.neighbour] + near.shift - box.positions[near.centre]) ** 2).sum(1)
    expected = np.bincount(near.centre, (2 / d2) ** 6 - (2 / d2) ** 3, minlength=24)
    assert np.allclose(seven.atomic_energies(box.numbers, x, *where).numpy(), expected)
    with pytest.raises(ValueError, match="numbers"): seven.atomic_energies([6], x[:1])


def test_tensors_and_arrays_are_accepted_and_dtypes_kept():
    pos, S = cloud_pattern(0)
    assert (pat.neighbour_matrix(torch.as_tensor(pos).requires_grad_(), 1.5).toarray() == pat.neighbour_matrix(pos, 1.5).toarray()).all()
    colors = col.star_coloring(S, pos=torch.as_tensor(pos))
    assert colors.dtype == np.int64 and colors.shape == (40,) and S.dtype == bool
    assert hes.seed_vectors(colors).shape == (3 * col.num_colors(colors), 40, 3)
    assert (hes.seed_vectors(colors).reshape(-1, 3, 40, 3).sum((0, 1)) == 1).all()


# Structures and potentials

@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_alkanes_have_the_right_bonds(n):
    atoms = pot.alkane(n)
    assert len(atoms) == 3 * n + 2
    d = atoms.get_all_distances()
    C, H = atoms.numbers == 6, atoms.numbers == 1
    assert np.allclose(d[H][:, C].min(1), 1.09, atol=1e-9)
    assert np.allclose([d[k, k + 1] for k in range(n - 1)], 1.53, atol=1e-9) and (((d < 1.2) & (d > 0))[C][:, H].sum(1) == (4 if n == 1 else np.r_[3, np.full(n - 2, 2), 3] if n > 1 else 4)).all()
    assert d[np.triu_indices(len(d), 1)].min() > 1.0


def test_water_is_dense_and_made_of_molecules():
    box = pot.water_box(64)
    assert abs(box.get_masses().sum() / box.get_volume() / 0.602214076 - 0.997) < 1e-3
    for atoms in (box, pot.water_cluster(5, relax=3)):
        d = atoms.get_all_distances()
        assert (np.array([d[k, k + 1] for k in range(0, len(d), 3)]) < 1.1).all() and re.fullmatch(r"(OH2)+|H\d+O\d+", atoms.get_chemical_formula())


def test_peptides():
    pytest.importorskip("rdkit")
    atoms = pot.peptide("KLVFFAE")
    assert len(atoms) == 125 and set(atoms.numbers) <= {1, 6, 7, 8}
    norleucine = pot.peptide("AM")  # C3H7NO2 + C6H13NO2 - H2O
    assert norleucine.get_chemical_formula() == "C9H18N2O3"


def test_ani_reference_energies():
    pytest.importorskip("torchani")
    ensemble = pot.load_ani1x(None)
    for name, hartree in (("H2O", -76.3885), ("CH3CH2OH", -154.9901), ("C6H6", -232.1787)):
        atoms = ase.build.molecule(name)
        assert abs(float(ensemble.energy_fn(atoms.numbers)(torch.as_tensor(atoms.positions))) / pot.HARTREE - hartree) < 1e-3
    with pytest.raises(ValueError, match="numbers"): ensemble.atomic_energies([17], torch.zeros(1, 3))


def test_ani_equals_torchani_itself(ani):
    import torchani
    from pathlib import Path
    from torchani import neurochem

    folder = Path(torchani.__file__).parent / "resources" / "ani-1x_8x"
    constants = neurochem.Constants(str(folder / "rHCNO-5.2R_16-3.5A_a4-8.params"))
    theirs = torch.nn.Sequential(torchani.AEVComputer(**constants), neurochem.load_model(constants.species, str(folder / "train0" / "networks")), neurochem.load_sae(str(folder / "sae_linfit.dat"))).double()
    atoms = pot.peptide("GS", seed=3)
    species = torch.tensor([[{1: 0, 6: 1, 7: 2, 8: 3}[z] for z in atoms.numbers]])
    pos = torch.as_tensor(atoms.positions)
    reference = theirs((species, pos[None])).energies.item() * pot.HARTREE
    assert abs(float(ani.energy_fn(atoms.numbers)(pos)) - reference) < 1e-9 * abs(reference)


def test_ani_periodic_equals_a_large_cluster_inside(ani):
    "The atomic energies of a periodic cell equal those of the centre of an explicit 3×3×3 block."
    box = pot.water_box(27, seed=1)
    block = box * (3, 3, 3)
    centre = np.arange(13 * len(box), 14 * len(box))
    periodic = ani.atomic_energies(box.numbers, torch.as_tensor(box.positions), box.cell.array, True)
    order = slice(0, 60)
    explicit = pot.ase.Atoms(block.numbers, block.positions)
    near = np.linalg.norm(explicit.positions[:, None] - explicit.positions[centre[order]], axis=-1).min(1) < 5.3
    kept = np.flatnonzero(near)
    energies = ani.atomic_energies(explicit.numbers[kept], torch.as_tensor(explicit.positions[kept]))
    where = [int(np.flatnonzero(kept == c)[0]) for c in centre[order]]
    assert (energies[where] - periodic[order]).abs().max() < 1e-9


def test_fit_lowers_the_error_and_changes_nothing_else():
    teacher = pot.lennard_jones(4.0, epsilon=0.05, sigma=2.0)
    rng = np.random.default_rng(0)
    data = [pot.label(teacher, ase.Atoms("C6", np.array([[i % 3, i // 3, 0] for i in range(6)]) * 2.2 + rng.normal(0, 0.1, (6, 3)))) for _ in range(8)]
    fit = lambda: pot.fit_potential(pot.LocalPotential(4.0, 1, width=16), data, steps=120, lr=1e-2, batch=8, generator=torch.Generator().manual_seed(0))
    history = fit()
    assert fit().loss == history.loss and len(history.loss) == len(history.force_mae) == 120
    assert np.mean(history.force_mae[-5:]) < 0.5 * np.mean(history.force_mae[:5])
    numbers, pos, energy, forces = data[0]
    assert torch.allclose(forces, -torch.autograd.grad(teacher.energy_fn(numbers)(x := pos.clone().requires_grad_()), x)[0])


def test_lowest_modes_sparse_path_equals_dense_path():
    atoms, model = pot.alkane(16, 0.05), pot.LocalPotential(3.0, 1)
    pos = torch.as_tensor(atoms.positions)
    H = hes.sparse_hessian(model.energy_fn(atoms.numbers), pos, model.pattern(atoms.numbers, pos)).matrix
    few, modes = hes.lowest_modes(H, atoms.get_masses(), 10)
    m = np.repeat(atoms.get_masses(), 3)
    values, vectors = np.linalg.eigh(H.toarray() / np.sqrt(np.outer(m, m)))
    assert values[0] < -1e-3  # random weights: imaginary modes must be found too
    expected = np.sign(values) * np.sqrt(np.abs(values)) * 521.4708
    assert np.abs(few - expected[:10]).max() < 0.05
    mode = modes[0].ravel() * np.sqrt(m)
    assert abs(abs(mode @ vectors[:, 0]) / np.linalg.norm(mode) - 1) < 1e-6


def test_coloring_3000_atoms_is_fast():
    import time

    box = pot.water_box(1000)
    S = pat.hessian_pattern(pat.neighbour_matrix(box.positions, 3.0, box.cell.array, True), 1)
    col.star_coloring(S, "largest_first")
    start = time.process_time()
    colors = col.star_coloring(S, "largest_first")
    assert time.process_time() - start < 1.0 and col.is_star_coloring(S, colors)


def _methane():
    atoms = pot.alkane(1)
    pos, model = torch.as_tensor(atoms.positions), pot.LocalPotential(3.0, 1, seed=0)
    return pos, model, model.energy_fn(atoms.numbers), model.pattern(atoms.numbers, pos)


@pytest.mark.parametrize("change, text", [
    (lambda p: p.long(), "pos: expected floats"), (lambda p: p[:, :2], r"pos: expected \[n, 3\]"), (lambda p: p[:0], r"pos: expected \[n, 3\]"),
    (lambda p: torch.where(torch.arange(5)[:, None] == 3, math.nan, p), "pos: atom 3"), (lambda p: p + math.inf, "pos: atom 0")])
def test_wrong_positions_are_named(change, text):
    pos, _, energy, S = _methane()
    bad = change(pos)
    for call in (lambda: hes.sparse_hessian(energy, bad, S), lambda: hes.dense_hessian(energy, bad), lambda: hes.finite_difference_hessian(energy, bad),
                 lambda: hes.verify(energy, bad, np.eye(15)), lambda: hes.hvps(energy, bad, torch.zeros(2, 5, 3))):
        with pytest.raises(ValueError, match=text): call()


def test_array_positions_and_colors_with_gaps_are_taken():
    pos, _, energy, S = _methane()
    want = hes.sparse_hessian(energy, pos, S)
    found = hes.sparse_hessian(energy, pos.numpy(), S, coloring=3 * np.arange(5))
    assert found.num_hvps == 15 and abs(found.matrix - want.matrix).max() <= 1e-12


def test_more_wrong_arguments_are_named():
    pos, model, energy, S = _methane()
    for call, text in ((lambda: hes.hvps(energy, pos, torch.zeros(0, 5, 3)), "seeds"), (lambda: hes.verify(energy, pos, np.eye(15), num_probes=0), "num_probes"),
                       (lambda: hes.finite_difference_hessian(energy, pos, h=0), "h: "), (lambda: hes.finite_difference_hessian(energy, pos, h=math.nan), "h: "),
                       (lambda: hes.sparse_hessian(lambda x: (x - x).sqrt().sum(), pos, S), "energy_fn: its second derivative"),
                       (lambda: model.energy_fn([6, 1, 1])(pos), "numbers: 3 atoms"), (lambda: pot.lennard_jones(-1.0), "cutoff"), (lambda: pot.lennard_jones(3.0, sigma=0), "sigma"),
                       (lambda: hes.sparse_hessian(energy, pos, csr_array(np.triu(S.toarray()))), "pattern"), (lambda: hes.sparse_hessian(energy, pos, csr_array(S.toarray() & ~np.eye(5, dtype=bool))), "pattern")):
        with pytest.raises(ValueError, match=text): call()


# What a second reader found

def test_stored_false_entries_are_no_blocks():
    "`S.data &= mask` and `S[i, j] = False` keep the entry; the block next to it must not be read in its place."
    for seed in range(30):
        rng = np.random.default_rng(seed)
        _, S = cloud_pattern(seed, n=int(rng.integers(8, 40)), side=4.0, cutoff=1.6)
        drop = np.triu(rng.random(S.shape) < rng.choice([0.02, 0.1, 0.3]), 1)
        entries = S.tocoo()
        clean = csr_array(S.toarray() & ~(drop | drop.T))
        S.data = S.data & ~(drop | drop.T)[entries.row, entries.col]
        stored, M = S.nnz, symmetric_integers(clean, seed)
        colors = col.star_coloring(S)
        assert (colors == col.star_coloring(clean)).all() and is_star(clean, colors)
        assert (hes.decompress(S, colors, hes.compress(M, colors)).toarray() == M).all()
        assert pat.pattern_stats(S) == pat.pattern_stats(clean) and S.nnz == stored >= clean.nnz  # the caller's matrix is left alone


@pytest.mark.parametrize("seed", range(5))
def test_directed_reach_gives_pairs_seen_together(seed):
    reach = np.random.default_rng(seed).random((12, 12)) < 0.2
    together = np.array([[i == j or any(reach[k, i] and reach[k, j] for k in range(12)) for j in range(12)] for i in range(12)])
    assert (pat.pattern_from_reach(csr_array(reach)).toarray() == together).all()


def test_pairs_at_the_cutoff_follow_the_model():
    pos = np.array([[0.0, 0, 0], [0, 0, 5.2], [0, 5.2, 5.2]])
    assert pat.neighbour_matrix(pos, 5.2).nnz == 0 and pat.neighbour_matrix(pos, 5.2, closed=True).nnz == 4


def test_directed_pair_terms_make_symmetric_blocks():
    pairs = csr_array((np.ones(1, bool), ([0], [2])), shape=(3, 3))
    assert pat.hessian_pattern(csr_array((3, 3), dtype=bool), 1, pair_terms=pairs).toarray().tolist() == [[True, False, True], [False, True, False], [True, False, True]]


def test_more_than_sixty_four_colors_stay_star():
    box = pot.water_box(125)
    S = pat.hessian_pattern(pat.neighbour_matrix(box.positions, 4.0, box.cell.array, True), 1)
    colors = col.star_coloring(S, "random", seed=1)
    graph, count = S.toarray() & ~np.eye(375, dtype=bool), col.num_colors(colors)
    of_color = np.stack([(graph & (colors == c)).sum(1) for c in range(count)])  # [C, n]
    i, j = np.nonzero(graph)
    assert count > 128 and ((of_color[colors[j], i] == 1) | (of_color[colors[i], j] == 1)).all() and (colors[i] != colors[j]).all()


def test_best_is_never_worse_than_distance2():
    rng = np.random.default_rng(0)
    for _ in range(100):
        n = int(rng.integers(6, 25))
        m = rng.random((n, n)) < rng.uniform(0.1, 0.6)
        S = csr_array(m | m.T | np.eye(n, dtype=bool))
        alone = min(col.num_colors(col.star_coloring(S, order)) for order in ("largest_first", "smallest_last"))
        d2 = col.num_colors(col.distance2_coloring(S))
        assert col.num_colors(col.star_coloring(S)) == min(alone, d2)


def test_verify_is_the_worst_probe_and_knows_zero():
    pos, S = cloud_pattern(0)
    K = np.kron(S.toarray(), np.ones((3, 3))) * np.random.default_rng(0).standard_normal((120, 120))
    K, x = K + K.T, torch.as_tensor(pos)
    wrong = K.copy()
    wrong[0, 0] += 1
    probes = torch.randn(8, 40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).reshape(8, -1).numpy()
    worst = max(np.linalg.norm((wrong - K) @ v) / np.linalg.norm(K @ v) for v in probes)
    energy = lambda y: 0.5 * y.flatten() @ torch.as_tensor(K) @ y.flatten()
    assert abs(hes.verify(energy, x, wrong, 8, torch.Generator().manual_seed(3)) - worst) < 1e-12 * worst + 1e-12
    apart, net = torch.tensor([[0.0, 0, 0], [50, 0, 0]], dtype=torch.float64), pot.LocalPotential()
    H = hes.sparse_hessian(net.energy_fn([1, 1]), apart, net.pattern([1, 1], apart)).matrix
    assert hes.verify(net.energy_fn([1, 1]), apart, H) == 0 and hes.verify(net.energy_fn([1, 1]), apart, np.eye(6)) == math.inf


def test_moving_ani_leaves_the_cached_one_where_it_is(ani):
    moved = ani.to("meta")
    assert next(moved.networks[0].parameters()).is_meta and moved.self_energies.is_meta
    for module in (ani.aev, *ani.networks): assert not any(x.is_meta for x in (*module.parameters(), *module.buffers()))
    assert pot.load_ani1x() is ani and pot.water_cluster(1).get_chemical_formula() == "H2O"


def test_hops_over_two_graphs_keep_their_order():
    "A row of dimers, 2.5 Å within and 5 Å between: only alternate hops walk along it."
    pos = np.cumsum(np.tile([5, 2.5], 9))[:, None] * [1.0, 0, 0]
    atoms, bonds = (np.abs(pos[:, :1] - pos[:, 0]) < r for r in (6.0, 3.0))
    seen = np.eye(len(pos), dtype=bool)
    for hop in (atoms, bonds, atoms, bonds, atoms, bonds, atoms): seen = hop.astype(int) @ seen > 0
    assert (pot.published_pattern("CHGNet 0.3.0", pos).toarray() == (seen.T.astype(int) @ seen > 0)).all()


def test_cells_elements_and_counts_are_named(ani):
    two, net = torch.tensor([[0.0, 0, 0], [1, 0, 0]], dtype=torch.float64), pot.LocalPotential()
    S = net.pattern([1, 1], two)
    for potential, z in ((ani, 6), (net, 6), (pot.lennard_jones(3.0), 18)):
        for cell, pbc, text in ((None, True, "cell: needed"), (np.diag([9.0, 9, 0]), (True, True, False), "cell: the lattice"), (np.ones((2, 3)), True, "cell: expected"),
                                (np.full((3, 3), math.nan), True, "cell: expected"), (9 * np.eye(3), (True, False), "pbc")):
            with pytest.raises(ValueError, match=text): potential.energy_fn([z, z], cell, pbc)(two)
    for call, text in ((lambda: net.energy_fn([118, 1])(two), "numbers"), (lambda: net.energy_fn([-1, 1])(two), "numbers"), (lambda: pat.hessian_pattern(S, None), "num_layers"),
                       (lambda: hes.sparse_hessian(net.energy_fn([1, 1]), two, S, chunk=1.5), "chunk"), (lambda: pot.water_box(0), "n:"), (lambda: pot.peptide("kc"), "sequence")):
        with pytest.raises(ValueError, match=text): call()
    assert hes.hvps(net.energy_fn([1, 1]), two.numpy(), np.ones((2, 2, 3))).shape == (2, 2, 3)
    with torch.no_grad(): assert hes.sparse_hessian(net.energy_fn([1, 1]), two, S).num_hvps == 6


def test_ani_counts_a_pair_at_its_cutoff(ani):
    pos = np.array([[0.0, 0, 0], [5.2, 0, 0], [0, 1.1, 0]])
    assert ani.pattern([6, 6, 1], pos)[0, 1] and not pot.LocalPotential(5.2).pattern([6, 6, 1], pos)[0, 1]


def test_units_and_envelope():
    from scipy import constants

    assert abs(pot.HARTREE / constants.physical_constants["Hartree energy in eV"][0] - 1) < 1e-6
    t = torch.tensor([0.0, 0.5, 1.0, 1.7], dtype=torch.float64, requires_grad=True)
    value = pot.envelope(t)
    assert torch.allclose(value.detach(), torch.tensor([1.0, 0.5, 0, 0], dtype=torch.float64), atol=1e-12)
    for _ in range(3):
        value = torch.autograd.grad(value.sum(), t, create_graph=True)[0]
        assert value[[0, 2, 3]].abs().max() < 1e-9


def test_degenerate_modes_are_all_found():
    "A perfect crystal, molecules far apart, and a straight chain on which every bend is free."
    from ase.build import bulk

    def check(H, masses, k):
        found, modes = hes.lowest_modes(H, masses, k)
        m = np.repeat(masses, 3)
        values = np.linalg.eigvalsh(H.toarray() / np.sqrt(np.outer(m, m)))[:k]
        assert np.abs(np.sign(found) * (found / hes._WAVENUMBER) ** 2 - values).max() < 1e-8
        weighted = modes.reshape(k, -1) * np.sqrt(m)
        weighted /= np.linalg.norm(weighted, axis=1, keepdims=True)
        assert np.abs(weighted @ weighted.T - np.eye(k)).max() < 1e-6

    argon, lj = bulk("Ar", "fcc", a=5.26, cubic=True) * (2, 2, 2), pot.lennard_jones(5.2)
    pos, where = torch.as_tensor(argon.positions), (argon.cell.array, True)
    H = hes.sparse_hessian(lj.energy_fn(argon.numbers, *where), pos, lj.pattern(argon.numbers, pos, *where)).matrix
    for k in (12, 40): check(H, argon.get_masses(), k)
    water, net = ase.build.molecule("H2O"), pot.LocalPotential()
    numbers = np.tile(water.numbers, 8)
    pos = torch.as_tensor(np.vstack([water.positions + 50 * np.array(s) for s in itertools.product(range(2), repeat=3)]))
    H = hes.sparse_hessian(net.energy_fn(numbers), pos, net.pattern(numbers, pos)).matrix
    for k in (5, 12, 20): check(H, np.tile(water.get_masses(), 8), k)
    line = torch.zeros(60, 3, dtype=torch.float64)
    line[:, 0] = torch.arange(60)
    H = hes.sparse_hessian(lambda x: ((x[1:] - x[:-1]).norm(dim=1) - 1).pow(2).sum(), line, csr_array(band(60, 1))).matrix
    check(H, np.linspace(1, 16, 60), 12)
