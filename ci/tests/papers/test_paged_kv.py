"""The head-major paged cache, driven by random append/read sequences against a plain tensor."""
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from neurips26_lit.efficient_inference.paged_kv import PagedKV


class Cache(RuleBasedStateMachine):
    "The model is a pair of growing dense tensors; the cache must agree with it after every step, and never move a page."

    @initialize(B=st.integers(1, 3), H=st.integers(1, 3), D=st.sampled_from([1, 4]), page=st.sampled_from([1, 2, 3, 4, 16]),
                T=st.integers(1, 20), shuffle=st.booleans(), seed=st.integers(0, 10**6))
    def start(self, B, H, D, page, T, shuffle, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.k, self.v = self.tokens(B, H, T, D), self.tokens(B, H, T, D)
        self.cache = PagedKV.from_dense(self.k, self.v, page, generator=torch.Generator().manual_seed(seed) if shuffle else None, capacity=400)
        self.remember()

    def tokens(self, *shape): return torch.randn(*shape, generator=self.g)

    def remember(self):
        "Address, table entry and contents of every page that is full now."
        c, full = self.cache, self.k.shape[2] // self.cache.page
        self.kept = [(key, int(c.block_table[key]), c.k_pages[c.block_table[key]].data_ptr(), c.v_pages[c.block_table[key]].data_ptr(), c.k_pages[c.block_table[key]].clone())
                     for key in [(b, h, j) for b in range(self.k.shape[0]) for h in range(self.k.shape[1]) for j in range(full)]]

    @rule(T=st.integers(0, 17))
    def append(self, T):
        self.remember()
        B, H, _, D = self.k.shape
        k, v = self.tokens(B, H, T, D), self.tokens(B, H, T, D)
        self.cache.append(k, v)
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)

    @rule(seed=st.integers(0, 10**6))
    def gather(self, seed):
        c, g = self.cache, torch.Generator().manual_seed(seed)
        B, H, N = c.block_table.shape
        blocks = -(-self.k.shape[2] // c.page)
        chosen = [[torch.randperm(blocks, generator=g)[: int(torch.randint(1, blocks + 1, (1,), generator=g))] for _ in range(H)] for _ in range(B)]
        n = max(len(x) for row in chosen for x in row)
        ids = torch.tensor([[[*x.tolist(), *[-1] * (n - len(x))] for x in row] for row in chosen], dtype=torch.int32)
        counts = torch.tensor([[len(x) for x in row] for row in chosen], dtype=torch.int32)
        before = c.bytes_copied
        k, v, valid = c.gather(ids, counts)
        for b in range(B):
            for h in range(H):
                at = [t for j in chosen[b][h].tolist() for t in range(j * c.page, min((j + 1) * c.page, self.k.shape[2]))]
                assert torch.equal(k[b, h, valid[b, h]], self.k[b, h, at]) and torch.equal(v[b, h, valid[b, h]], self.v[b, h, at])
        assert c.bytes_copied - before == 2 * 4 * c.page * self.k.shape[3] * int(counts.sum())

    @invariant()
    def same_as_dense(self):
        if hasattr(self, "cache"):
            k, v = self.cache.to_dense()
            assert torch.equal(k, self.k) and torch.equal(v, self.v) and (self.cache.seq_lens == self.k.shape[2]).all()

    @invariant()
    def full_pages_stay(self):
        if hasattr(self, "cache"):
            c = self.cache
            for key, phys, k_at, v_at, contents in self.kept:
                assert int(c.block_table[key]) == phys and c.k_pages[phys].data_ptr() == k_at and c.v_pages[phys].data_ptr() == v_at
                assert torch.equal(c.k_pages[phys], contents)

    @invariant()
    def every_page_has_one_owner(self):
        if hasattr(self, "cache"):
            used = self.cache.block_table[self.cache.block_table >= 0]
            assert len(used.unique()) == len(used) == len(self.cache.k_pages)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)


def make(T=10, **kw):
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 3, T, 4, generator=g) for _ in range(2))
    return k, v, PagedKV.from_dense(k, v, 4, **kw)


def test_shuffling_permutes_pages_only():
    k, v, plain = make()
    shuffled = PagedKV.from_dense(k, v, 4, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(plain.block_table, shuffled.block_table)
    assert all(torch.equal(a, b) for a, b in zip(plain.to_dense(), shuffled.to_dense()))


def test_head_major_heads_choose_apart():
    k, v, cache = make()
    ids, counts = torch.tensor([[[0], [1], [2]]] * 2, dtype=torch.int32), torch.ones(2, 3, dtype=torch.int32)
    got, _, valid = cache.gather(ids, counts)
    assert torch.equal(got[1, 0, valid[1, 0]], k[1, 0, :4]) and torch.equal(got[1, 2, valid[1, 2]], k[1, 2, 8:10])
    assert valid.sum(-1).tolist() == [[4, 4, 2]] * 2


def test_several_rows_per_head_share_its_pages():
    k, v, cache = make()
    ids = torch.tensor([[[0], [2], [1], [1], [2], [0]]] * 2, dtype=torch.int32)
    pages = cache.physical(ids, torch.ones(2, 6, dtype=torch.int32))
    assert torch.equal(pages[0, :, 0], torch.stack([cache.block_table[0, r // 2, int(ids[0, r, 0])] for r in range(6)]))


def test_absent_pages_are_never_used():
    _, _, cache = make()
    cache.k_pages[cache.block_table[0, 0, 2]] = float("nan")
    k, _, valid = cache.gather(torch.zeros(2, 3, 1, dtype=torch.int32), torch.ones(2, 3, dtype=torch.int32))
    assert torch.isfinite(k).all() and valid.all()
    k, _, _ = cache.gather(torch.tensor([[[0, 2]] * 3] * 2, dtype=torch.int32), torch.ones(2, 3, dtype=torch.int32))     # entry 1 isn't counted
    assert torch.isfinite(k).all()


def test_appending_in_pieces_equals_at_once_bit_for_bit():
    g = torch.Generator().manual_seed(3)
    k, v = torch.randn(1, 2, 33, 4, generator=g), torch.randn(1, 2, 33, 4, generator=g)
    whole, parts = PagedKV.from_dense(k, v, 8), PagedKV.from_dense(k[:, :, :1], v[:, :, :1], 8)
    for a, b in ((1, 8), (8, 9), (9, 33)): parts.append(k[:, :, a:b], v[:, :, a:b])
    assert all(torch.equal(a, b) for a, b in zip(whole.to_dense(), parts.to_dense())) and parts.bytes_copied == 0


def test_sequences_of_different_length():
    k, v, cache = make(8)
    cache.seq_lens = torch.tensor([8, 5], dtype=torch.int32)          # the second sequence was cut back
    cache.append(torch.ones(2, 3, 2, 4), torch.ones(2, 3, 2, 4))
    dense = cache.to_dense()[0]
    assert torch.equal(dense[0, :, :8], k[0]) and (dense[0, :, 8:10] == 1).all()
    assert torch.equal(dense[1, :, :5], k[1, :, :5]) and (dense[1, :, 5:7] == 1).all() and (dense[1, :, 7:] == 0).all()


@pytest.mark.parametrize("bad, words", [
    (lambda c, k: c.append(k[:, :2], k[:, :2]), "[2, 2], the cache [2, 3]"), (lambda c, k: c.append(k, k[:, :, :1]), "values"),
    (lambda c, k: c.physical(torch.full((2, 3, 1), 3, dtype=torch.int32), torch.ones(2, 3, dtype=torch.int32)), "block 3"),
    (lambda c, k: c.physical(torch.full((2, 3, 1), -1, dtype=torch.int32), torch.ones(2, 3, dtype=torch.int32)), "block -1"),
    (lambda c, k: c.physical(torch.zeros(2, 4, 1, dtype=torch.int32), torch.ones(2, 4, dtype=torch.int32)), "multiples of 3"),
    (lambda c, k: PagedKV.from_dense(k, k, 0), "`page`"), (lambda c, k: PagedKV.from_dense(k, k, 4, capacity=12).append(k, k), "capacity")])
def test_errors(bad, words):
    k, _, cache = make()
    with pytest.raises(ValueError) as error: bad(cache, k)
    assert words in str(error.value)


def test_a_full_pool_is_left_as_it_was():
    k, v, cache = make(capacity=12)
    before = cache.block_table.clone(), cache.seq_lens.clone()
    with pytest.raises(ValueError, match="full"): cache.append(k, v)
    assert torch.equal(cache.block_table, before[0]) and torch.equal(cache.seq_lens, before[1]) and torch.equal(cache.to_dense()[0], k)
