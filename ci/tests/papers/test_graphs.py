"""Shared modules of the area graphs: loaders, generators, baselines, sampler and the training loop, each by a second route."""
import math
import platform

import networkx as nx
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.sparse import csr_array

from neurips26_lit.core.data import MissingData, wordnet
from neurips26_lit.graphs import data, generators, operators
from neurips26_lit.graphs.data import GraphData, Masks, fraction_split, induced_ball, random_split
from neurips26_lit.graphs.models import APPNP, GCN, MLP, SAGE
from neurips26_lit.graphs.operators import to_torch_csr
from neurips26_lit.graphs.training import NeighborSampler, fit_node_classifier


def ring(n=12):
    return csr_array(nx.to_scipy_sparse_array(nx.cycle_graph(n), dtype=float))


# data

def test_wordnet_counts_and_edges():
    whole = data.wordnet_graph("all", None, largest_cc=False)
    assert (whole.n, whole.m, len(whole.classes)) == (117_659, 183_789, 45)
    net, _ = wordnet()
    ids = list(net.synsets.index)
    rng = np.random.default_rng(0)
    for i in rng.integers(whole.n, size=20):  # the neighbours of a synset are its pointers, in either direction
        pointers = net.pointers[(net.pointers.source == ids[i]) | (net.pointers.target == ids[i])]
        near = ({*pointers.source, *pointers.target}) - {ids[i]}
        assert {ids[j] for j in whole.adj[[i]].indices} == near
        assert whole.classes[int(whole.y[i])] == net.synsets.lexname.iloc[i]
    part = data.largest_component(whole)
    assert part.n == 115_426 and nx.is_connected(nx.from_scipy_sparse_array(induced_ball(part, 300).adj))


def test_wordnet_features_do_not_name_the_class():
    assert data._hidden("an animal, or Animals; animal's (animal)", ["Animal"]).split() == ["an", ",", "or", "Animals;", "'s", "()"]
    a, b = (data._hashed(("a small dog", "a small cat", ""), "tfidf", 16) for _ in range(2))
    assert torch.equal(a, b) and torch.equal(a[2], torch.zeros(16)) and torch.allclose(a[:2].norm(dim=1), torch.ones(2))


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="counts move with Python's patch releases")
def test_syntax_tree_counts():
    graph = data.python_ast_graph(40, None)
    assert (graph.n, graph.m) == (82_833, 127_246)
    every_type = torch.as_tensor(np.unique(data._syntax(40)[1], return_inverse=True)[1])
    assert generators.edge_homophily(graph.adj, every_type) == pytest.approx(0.131, abs=0.0005)


def test_syntax_trees_are_trees_with_sibling_edges():
    types, texts, edges = data._syntax_nodes("def f(x):\n    return x + 1 + 2\n")
    g = nx.Graph(edges)
    assert nx.is_connected(g) and len(g) == len(types) == len(texts) and texts[0].startswith("def f(x)")
    assert all(len(t) <= 64 for t in texts) and types.count("Add") == 2


@pytest.mark.parametrize("load,n", [(data.minnesota_roads, 2642), (data.digits_knn_graph, 1797), (data.karate, 34), (data.les_miserables, 77), (data.davis, 32), (data.umls, 135), (data.kinships, 104)])
def test_every_loader_gives_an_undirected_graph_and_says_from_where(load, n):
    graph = load()
    assert graph.n == n and graph.provenance and graph.licence
    operators.check_adjacency(graph.adj)
    assert set(np.unique(graph.adj.data)) == {1.0}


def test_connectomes():
    mice = data.mouse_connectomes()
    assert len(mice) == 32 and len({m.label for m in mice}) == 4 and all(m.n == 332 for m in mice)
    left = data.larva_connectome("left")
    assert int(left.edge_weight.sum()) == 25_322 and left.edge_weight.shape == left.edge_index.shape[1:]
    assert (left.adj != (csr_array((np.ones(left.edge_index.shape[1]), left.edge_index.numpy()), shape=(left.n,) * 2).maximum(
        csr_array((np.ones(left.edge_index.shape[1]), left.edge_index.flip(0).numpy()), shape=(left.n,) * 2)))).nnz == 0


def test_triples_are_the_file(tmp_path):
    graph = data.umls()
    lines = [line.split("\t") for part in ("train", "valid", "test") for line in data.data_file("pykeen", "datasets", "umls", f"{part}.txt").read_text().splitlines()]
    things = sorted({x for h, _, t in lines for x in (h, t)})
    for k in (0, 1000, len(lines) - 1):
        h, r, t = lines[k]
        assert [things[i] for i in graph.edge_index[:, k]] == [h, t] and graph.relations[graph.edge_type[k]] == r


def test_a_subgraph_keeps_its_typed_edges():
    graph = induced_ball(data.umls(), 40, seed=3)
    dense = graph.adj.toarray()
    ends = graph.edge_index[:, graph.edge_index[0] != graph.edge_index[1]]
    assert graph.n == 40 and dense[ends[0], ends[1]].all() and len(graph.edge_type) == graph.edge_index.shape[1]


@pytest.mark.parametrize("call,word", [
    (lambda: data.wordnet_graph("verb"), "pos:"), (lambda: data.wordnet_graph("noun", "bert"), "features:"), (lambda: data.wordnet_graph("noun", "hash", 0), "d:"),
    (lambda: data.python_ast_graph(0), "files:"), (lambda: data.digits_knn_graph(0), "k:"), (lambda: data.larva_connectome("top"), "side:"),
    (lambda: data.benchmark("corra"), "name:"), (lambda: induced_ball(data.karate(), 0), "n:"),
    (lambda: data.from_edge_index(torch.tensor([[0, 5], [1, 2]]), 3), "edge_index:"), (lambda: GraphData(ring(), y=torch.zeros(3)), "y:"),
    (lambda: random_split(torch.full((5,), -1)), "y:"), (lambda: fraction_split(torch.tensor([0, 1]), 0.9, 0.5), "train:"), (lambda: random_split(torch.tensor([0, 1]), 0), "per_class:")])
def test_bad_input_names_the_argument(call, word):
    with pytest.raises(ValueError) as e: call()
    assert str(e.value).startswith(word)


def test_missing_files_say_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    with pytest.raises(MissingData, match="wordnet-base"): data.data_file("wordnet-base", "data.noun")
    with pytest.raises(MissingData, match="snap.stanford.edu"): data.snap_graph(tmp_path / "com-amazon.txt")


@pytest.mark.parametrize("name", ["pubmed", "roman-empire"])
def test_benchmark_loader_on_a_stub(monkeypatch, name):
    import torch_geometric.datasets as peers
    from torch_geometric.data import Data

    class Stub(list):
        def __init__(self, root, name):
            super().__init__([Data(x=torch.ones(3, 2), y=torch.tensor([0, 1, 1]), edge_index=torch.tensor([[0, 1, 1], [1, 0, 2]]))])
    monkeypatch.setattr(peers, "Planetoid", Stub); monkeypatch.setattr(peers, "HeterophilousGraphDataset", Stub)
    graph = data.benchmark(name)
    assert (graph.n, graph.m, graph.name, graph.y.tolist()) == (3, 2, name, [0, 1, 1])


def test_ogb_without_the_package_says_so():
    with pytest.raises(MissingData, match="pip install ogb"): data.benchmark("ogbn-arxiv")


def test_splits_are_stratified_disjoint_and_reproducible():
    y = torch.tensor([0] * 50 + [1] * 10 + [2] * 3 + [-1] * 7)
    for make in (lambda g: random_split(y, 5, 0.2, g), lambda g: fraction_split(y, 0.6, 0.2, g)):
        a, b, c = (make(torch.Generator().manual_seed(s)) for s in (0, 0, 1))
        assert all(torch.equal(p, q) for p, q in zip(a, b)) and not torch.equal(a.train, c.train)
        assert torch.equal(sum(m.int() for m in a).bool(), y >= 0) and sum(m.int() for m in a).max() == 1
    assert torch.bincount(y[random_split(y, 5, 0.2, None).train]).tolist() == [5, 5, 2]
    assert torch.bincount(y[fraction_split(y, 0.6, 0.2, None).train]).tolist() == [30, 6, 2]


# generators

def test_pairs_of_a_block_are_uniform():
    counts = np.zeros((6, 6))
    for seed in range(3000):
        e = generators._between(np.arange(6), None, 0.3, np.random.default_rng(seed))
        counts[e[0], e[1]] += 1
    seen = counts[np.tril_indices(6, -1)]
    assert seen.sum() == counts.sum()  # i > j: no loops, no pair twice
    assert stats.chisquare(seen).pvalue > 1e-3 and abs(seen.mean() / 3000 - 0.3) < 0.01


@pytest.mark.parametrize("h", [0.0, 0.3, 1.0])
def test_csbm_hits_its_targets(h):
    graph = generators.csbm(3001, 4, 8, 10.0, h, 0.5, np.random.default_rng(0))
    assert torch.bincount(graph.y).tolist() == [751, 750, 750, 750]
    assert 2 * graph.m / graph.n == pytest.approx(10, rel=0.03) and generators.edge_homophily(graph.adj, graph.y) == pytest.approx(h, abs=0.02)


def test_csbm_features_carry_the_signal():
    strong, none = (generators.csbm(4000, 2, 16, 4.0, 0.5, s, np.random.default_rng(0)) for s in (3.0, 0.0))
    gap = lambda g: float((g.x[g.y == 0].mean(0) - g.x[g.y == 1].mean(0)).norm())
    assert gap(strong) > 20 * gap(none) and float(none.x.std()) == pytest.approx(1, abs=0.02)


def test_degree_corrected_blocks():
    graph = generators.csbm(5000, 3, 4, 8.0, 0.8, 0.5, np.random.default_rng(0), degree_exponent=3.0)
    assert generators.edge_homophily(graph.adj, graph.y) == pytest.approx(0.8, abs=0.03) and 6 < 2 * graph.m / graph.n <= 8.5
    degree = operators.degrees(graph.adj)
    assert degree.max() > 10 * np.median(degree)


def test_homophilies_by_networkx():
    g = nx.gnp_random_graph(60, 0.15, seed=4)
    y = np.random.default_rng(0).integers(3, size=60)
    nx.set_node_attributes(g, dict(enumerate(y.tolist())), "c")
    adj = csr_array(nx.to_scipy_sparse_array(g, dtype=float))
    assert generators.adjusted_homophily(adj, torch.as_tensor(y)) == pytest.approx(nx.attribute_assortativity_coefficient(g, "c"))
    assert generators.edge_homophily(adj, torch.as_tensor(y)) == np.mean([y[u] == y[v] for u, v in g.edges])
    own = [np.mean([y[b] == k for a in g if y[a] == k for b in g[a]]) - np.mean(y == k) for k in range(3)]
    assert generators.class_insensitive_homophily(adj, torch.as_tensor(y)) == pytest.approx(sum(max(0, e) for e in own) / 2)
    masked = torch.as_tensor(np.where(np.arange(60) < 30, y, -1))
    assert generators.edge_homophily(adj, masked) == np.mean([y[u] == y[v] for u, v in g.edges if u < 30 and v < 30])


@pytest.mark.parametrize("call,word", [
    (lambda: generators.csbm(10, 1, 2, 2.0, 0.5, 1.0), "c:"), (lambda: generators.csbm(10, 2, 2, 2.0, 1.5, 1.0), "homophily:"), (lambda: generators.csbm(10, 2, 2, 20.0, 0.9, 1.0), "mean_degree:"),
    (lambda: generators.csbm(10, 2, 2, 2.0, 0.5, 1.0, degree_exponent=2), "degree_exponent:"), (lambda: generators.csbm(10, 2, 2, 2.0, 0.5, 1.0, torch.Generator()), "generator:"),
    (lambda: generators.planted_partition(0, 3, 0.5, 0.1), "blocks:"), (lambda: generators.planted_partition(2, 3, 1.5, 0.1), "p_in:"),
    (lambda: generators.edge_homophily(ring(), torch.full((12,), -1)), "adj:"), (lambda: generators.anisotropic(torch.ones(3)), "x:")])
def test_bad_generator_input(call, word):
    with pytest.raises(ValueError) as e: call()
    assert str(e.value).startswith(word)


# models and training

@pytest.mark.parametrize("layers", [1, 3])
def test_models_agree_with_the_field_library(layers):
    from torch_geometric.nn import GCNConv, SAGEConv
    adj = generators.csbm(50, 2, 4, 4.0, 0.5, 1.0, np.random.default_rng(0)).adj
    edges, x = torch.as_tensor(np.stack(adj.nonzero()).astype(np.int64)), torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    sizes = list(zip([4] + [6] * (layers - 1), [6] * (layers - 1) + [3]))
    gcn, sage = GCN(4, 6, 3, layers).eval(), SAGE(4, 6, 3, layers).eval()
    h = k = x
    for i, size in enumerate(sizes):
        a, b = GCNConv(*size), SAGEConv(*size)
        a.lin.weight.data, a.bias.data = gcn.maps[i].weight.data, gcn.bias[i].data
        b.lin_l.load_state_dict(sage.near[i].state_dict()); b.lin_r.load_state_dict(sage.own[i].state_dict())
        h, k = a(h.relu() if i else h, edges), b(k.relu() if i else k, edges)
    assert torch.allclose(gcn(x, to_torch_csr(GCN.propagation(adj))), h, atol=1e-5)
    assert torch.allclose(sage(x, to_torch_csr(SAGE.propagation(adj))), k, atol=1e-5)


def test_appnp_solves_for_personalised_pagerank():
    adj = ring(9)
    model = APPNP(3, 4, 2, steps=300, alpha=0.2).double().eval()
    x = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    n = torch.as_tensor(APPNP.propagation(adj).toarray())
    exact = 0.2 * torch.linalg.solve(torch.eye(9, dtype=torch.float64) - 0.8 * n, model.predict(x))
    assert torch.allclose(model(x, to_torch_csr(APPNP.propagation(adj), torch.float64)), exact, atol=1e-10)


@pytest.mark.parametrize("nodes", [[], [3], [0, 7, 3]])
def test_sampled_blocks_with_all_neighbours_are_the_graph(nodes):
    graph = generators.csbm(40, 2, 4, 3.0, 0.5, 1.0, np.random.default_rng(1))
    model = SAGE(4, 6, 3, 3).eval()
    batch = NeighborSampler(graph.adj, [-1, -1, -1]).sample(torch.tensor(nodes, dtype=torch.int64))
    full = model(graph.x, to_torch_csr(SAGE.propagation(graph.adj)))
    assert batch.nodes[:len(nodes)].tolist() == nodes and torch.allclose(model(graph.x[batch.nodes], batch.blocks), full[nodes], atol=1e-5)


def test_sampler_keeps_the_fanout_and_real_edges():
    graph = generators.csbm(200, 2, 4, 12.0, 0.5, 1.0, np.random.default_rng(1))
    batch = NeighborSampler(graph.adj, [3, 5], torch.Generator().manual_seed(0)).sample(torch.arange(20))
    degree = operators.degrees(graph.adj)
    sources = batch.nodes.numpy()
    for block, fanout in zip(batch.blocks, (3, 5)):
        dense = block.to_dense().numpy()
        for row in range(dense.shape[0]):
            near = np.flatnonzero(dense[row])
            assert len(near) == min(fanout, degree[sources[row]]) and graph.adj[[sources[row]]].toarray().ravel()[sources[near]].all()
            assert len(near) == 0 or dense[row].sum() == pytest.approx(1)


@pytest.mark.parametrize("call,word", [
    (lambda: NeighborSampler(ring(), [0]), "fanouts:"), (lambda: NeighborSampler(ring(), []), "fanouts:"), (lambda: NeighborSampler(ring(), [2]).sample(torch.tensor([12])), "nodes:"),
    (lambda: NeighborSampler(ring(), [2]).sample(torch.tensor([1, 1])), "nodes:"), (lambda: MLP(0, 3, 2), "d_in:"), (lambda: GCN(4, 3, 2)(torch.ones(12, 3), None), "x:"),
    (lambda: SAGE(4, 3, 2)(torch.ones(12, 4), [to_torch_csr(ring())]), "a:"), (lambda: APPNP(4, 3, 2, alpha=0), "alpha:")])
def test_bad_model_input(call, word):
    with pytest.raises(ValueError) as e: call()
    assert str(e.value).startswith(word)


def _world():
    graph = generators.csbm(300, 3, 16, 6.0, 0.8, 0.5, np.random.default_rng(0))
    return graph, fraction_split(graph.y, generator=torch.Generator().manual_seed(0))


def test_the_best_validation_step_is_restored_and_the_test_set_decides_nothing():
    graph, split = _world()
    adam = lambda p: torch.optim.Adam(p, 0.05)
    torch.manual_seed(0); model = GCN(16, 16, 3)
    history = fit_node_classifier(model, graph, split, adam, 60, 5, 4)
    assert history.best_val == max(m["val"] for m in history.metrics)
    best = next(m for m in history.metrics if m["val"] == history.best_val)
    assert (best["step"], best["test"]) == (history.best_step, history.test_at_best)
    with torch.no_grad(): logits = model.eval()(graph.x, to_torch_csr(GCN.propagation(graph.adj)))
    assert float((logits.argmax(1) == graph.y)[split.test].float().mean()) == history.test_at_best
    wrong = graph.y.clone(); wrong[split.test] = (wrong[split.test] + 1) % 3  # other test labels, same training
    torch.manual_seed(0)
    other = fit_node_classifier(GCN(16, 16, 3), GraphData(graph.adj, graph.x, wrong, classes=graph.classes), split, adam, 60, 5, 4)
    assert [m["val"] for m in other.metrics] == [m["val"] for m in history.metrics] and other.loss == history.loss
    assert len(history.wall) == len(history.cpu) == len(history.loss)


def test_training_stops_by_patience_and_on_bad_numbers():
    graph, split = _world()
    history = fit_node_classifier(MLP(16, 8, 3), graph, split, lambda p: torch.optim.SGD(p, 0.0), 100, 1, 3)
    assert len(history.loss) == 4  # the first evaluation is the best one, then three without progress
    with pytest.raises(FloatingPointError, match="step"): fit_node_classifier(MLP(16, 8, 3), graph, split, lambda p: torch.optim.SGD(p, 1e30), 100, 1, 100)
    broken = GraphData(graph.adj, graph.x * math.nan, graph.y)
    for bad in (dict(graph=broken), dict(masks=Masks(split.train[:5], split.val, split.test)), dict(masks=Masks(split.train & False, split.val, split.test)), dict(steps=0)):
        with pytest.raises(ValueError): fit_node_classifier(**(dict(model=MLP(16, 8, 3), graph=graph, masks=split, optimizer=torch.optim.Adam) | bad))
