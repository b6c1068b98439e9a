"""Paged grouped-query attention, block-sparse attention and union tables: the Triton code in the interpreter, against float64."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path

import paged
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from neurips26_lit.kernels import paged_gqa

from neurips26_lit.core import kernels

F32, F16 = torch.float32, torch.float16
HYPOTHESIS = {"deadline": None, "derandomize": True, "database": None, "phases": (Phase.generate, Phase.shrink), "suppress_health_check": list(HealthCheck)}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    "Every output begins as NaN, so that a row that the kernel forgets to write is seen."
    fill = lambda shape, dtype, device: torch.full(shape, paged.NAN if dtype.is_floating_point else -12345, dtype=dtype, device=device)
    monkeypatch.setattr(paged_gqa, "_empty", fill)


def run(p: paged.Problem, *, splits: int = 1, module=paged_gqa) -> tuple[torch.Tensor, torch.Tensor]:
    "Through the public function that fits the tables."
    if p.ids.shape[2] == 1 and p.q_block == p.q.shape[2]:
        ids, pages, counts = (x.squeeze(2) for x in p.tables)
        return module.paged_gqa_prefill(p.q, p.k_pages, p.v_pages, ids, pages, counts, p.seq_lens, p.q_start, splits=splits, return_lse=True)
    return module.block_sparse_prefill(p.q, p.k_pages, p.v_pages, *p.tables, p.seq_lens, p.q_start, q_block=p.q_block, splits=splits, return_lse=True)


def reference(p: paged.Problem) -> tuple[torch.Tensor, torch.Tensor]:
    "The PyTorch path that the operator takes on a CPU."
    return paged_gqa.prefill_reference(p.q, p.k_pages, p.v_pages, *p.tables, p.seq_lens, p.q_start, p.q_block, 1 / math.sqrt(p.q.shape[-1]))


# --- attention ---------------------------------------------------------------------------------------------------------
CASES = {  # B, R, G, Tq, past, D, page, options
    "one query, one key": (1, 1, 1, 1, 0, 64, 16, {}),
    "one query late in a block": (1, 1, 3, 1, 30, 64, 16, {}),
    "block - 1": (1, 2, 3, 15, 16, 64, 16, {}),
    "block": (1, 1, 8, 16, 32, 64, 16, {}),
    "block + 1": (1, 1, 4, 17, 15, 64, 16, {}),
    "prime lengths": (1, 2, 7, 37, 64, 64, 32, {}),
    "a page of 128": (1, 1, 4, 31, 200, 64, 128, {"dtype": F16}),
    "a page of 64, D 128": (1, 1, 7, 19, 130, 128, 64, {"dtype": F16}),
    "D 80, strided q": (2, 1, 3, 21, 40, 80, 16, {"strided": True}),
    "D 8": (1, 1, 1, 9, 20, 8, 16, {"strided": True}),
    "one head, many tiles": (1, 1, 1, 130, 33, 64, 64, {"dtype": F16}),
    "full table": (1, 1, 3, 20, 44, 64, 16, {"density": 1.0}),
    "one entry": (2, 2, 3, 18, 70, 64, 32, {"density": 0.0}),
    "large scores": (1, 1, 4, 17, 47, 64, 16, {"scale": 100.0}),
    "large scores, fp16": (1, 1, 3, 17, 47, 64, 16, {"scale": 30.0, "dtype": F16}),
    "ragged lengths": (3, 1, 3, 18, 30, 64, 16, {"ragged": True, "dtype": F16}),
    "permuted entries": (1, 2, 3, 18, 62, 64, 16, {"shuffle": True, "density": 0.7}),
    "block-sparse, 16 a block": (1, 3, 1, 33, 32, 64, 16, {"q_block": 16, "dtype": F16}),
    "block-sparse, odd blocks": (2, 2, 1, 23, 17, 64, 16, {"q_block": 7, "dtype": F16}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernel_cases(case):
    *shape, options = case
    p = paged.make(*shape, **options)
    assert paged.verdict(p, *run(p)) == ""


@st.composite
def problems(draw, most: int = 3):
    "Shapes that divide nothing in particular, small enough for the interpreter."
    page = draw(st.sampled_from([16, 32, 64, 128]))
    Tq = draw(st.sampled_from([1, 2, 13, 15, 16, 17, 29, 33]))
    group = draw(st.sampled_from([1, 3, 4, 7, 8]))
    rows = draw(st.integers(1, 2)) if page == 16 else 1
    q_block = draw(st.sampled_from([None, None, 5, 16])) if group == 1 else None
    return paged.make(
        draw(st.integers(1, 2)), rows, group, Tq, draw(st.integers(0, most * page)), draw(st.sampled_from([8, 24, 64, 80, 128])), page,
        dtype=draw(st.sampled_from([F32, F16])), density=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])), seed=draw(st.integers(0, 2**31)), q_block=q_block,
        scale=draw(st.sampled_from([0.1, 1.0, 20.0])), shuffle=draw(st.booleans()), strided=draw(st.booleans()), ragged=draw(st.booleans()),
    )


@settings(max_examples=40, **HYPOTHESIS)
@given(p=problems(), splits=st.integers(1, 3))
def test_kernel_is_exact_attention(p, splits):
    assert paged.verdict(p, *run(p, splits=splits)) == ""


@settings(max_examples=150, **HYPOTHESIS)
@given(p=problems(most=6))
def test_reference_is_exact_attention(p):
    assert paged.verdict(p, *reference(p)) == ""


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_splits_agree(splits):
    p = paged.make(1, 2, 3, 9, 60, 64, 16, density=0.8)
    (one, one_lse), (many, many_lse) = run(p), run(p, splits=splits)
    assert (one - many).abs().max() <= 1e-6 and (one_lse - many_lse).abs().max() <= 1e-5


def test_order_of_entries_and_place_of_pages_do_not_matter():
    p = paged.make(1, 2, 3, 18, 62, 64, 16, density=0.8)
    order = torch.randperm(len(p.k_pages))
    moved = paged.Problem(**{**vars(p), "k_pages": p.k_pages[order], "v_pages": p.v_pages[order], "pages": torch.where(p.ids < 0, -1, order.argsort()[p.pages.long()].int())})
    assert torch.equal(run(p)[0], run(moved)[0])
    ids, pages = p.ids.clone(), p.pages.clone()
    for b, r in itertools.product(range(1), range(2)):
        c = int(p.counts[b, r, 0])
        ids[b, r, 0, :c], pages[b, r, 0, :c] = ids[b, r, 0, :c].flip(0), pages[b, r, 0, :c].flip(0)
    turned = paged.Problem(**{**vars(p), "ids": ids, "pages": pages})
    assert (run(p)[0] - run(turned)[0]).abs().max() <= 1e-6


def test_a_row_that_sees_nothing_is_zero():
    p = paged.make(1, 1, 3, 20, 10, 64, 16, density=1.0)
    p.ids[..., 0], p.pages[..., 0], p.counts[:] = 1, p.pages[..., 1].clone(), 1              # only the block of tokens 16 to 29
    p.see[..., :16] = False
    p.k_pages[:], p.v_pages[:] = paged.NAN, paged.NAN
    p.k_pages[p.pages[0, 0, 0, 0], :14], p.v_pages[p.pages[0, 0, 0, 0], :14] = p.k[0, 0, 16:30], p.v[0, 0, 16:30]
    out, lse = run(p)
    assert (out[:, :, :6] == 0).all() and (lse[:, :, :6] == -math.inf).all() and (out[:, :, 6:] != 0).any()
    assert paged.verdict(p, out, lse) == "" and paged.verdict(p, *reference(p)) == ""


def test_subgroups_are_tables_of_fewer_heads():
    "Two table rows for one KV head: the same pages listed twice give what one row of twice the heads gives."
    p = paged.make(1, 1, 4, 9, 40, 64, 16)
    ids, pages, counts = (x.squeeze(2).repeat_interleave(2, 1) for x in p.tables)
    two = paged_gqa.paged_gqa_prefill(p.q, p.k_pages, p.v_pages, ids, pages, counts, p.seq_lens, p.q_start)
    assert (two - run(p)[0]).abs().max() <= 1e-6


def test_float64_on_the_cpu_path():
    p = paged.make(1, 2, 3, 17, 50, 64, 16, dtype=torch.float64)
    out, lse = reference(p)
    want, want_lse = p.answer()
    assert lse.dtype == torch.float64 and (out - want).abs().max() <= 1e-12 and (lse - want_lse).abs().max() <= 1e-12


# --- tables ------------------------------------------------------------------------------------------------------------
def brute_union(mask: torch.Tensor, subgroup: int, keep_recent: int, current: int) -> list[list[list[int]]]:
    "Tables as Python sets."
    B, Hq, nq, nk = mask.shape
    forced = set(range(max(nk - keep_recent - current, 0), nk))
    rows = mask.tolist()
    pick = lambda b, r: {j for h in range(r * subgroup, (r + 1) * subgroup) for i in range(nq) for j in range(nk) if rows[b][h][i][j]}
    return [[sorted(pick(b, r) | forced) for r in range(Hq // subgroup)] for b in range(B)]


def same_tables(ids: torch.Tensor, counts: torch.Tensor, want: list[list[list[int]]]) -> bool:
    return all(
        ids[b, r].tolist() == row + [-1] * (ids.shape[-1] - len(row)) and int(counts[b, r]) == len(row) for b, rows in enumerate(want) for r, row in enumerate(rows)
    )


@settings(max_examples=30, **HYPOTHESIS)
@given(
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 2, 31, 127, 128, 129, 150]), st.integers(0, 3), st.integers(0, 3),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]), st.booleans(), st.integers(0, 2**31),
)
def test_union_tables(B, R, subgroup, nq, nk, keep_recent, current, density, strided, seed):
    mask = torch.rand(B, nq, R * subgroup, nk, generator=torch.Generator().manual_seed(seed)) < density
    mask = mask.transpose(1, 2) if strided else mask.transpose(1, 2).contiguous()
    want = brute_union(mask, subgroup, keep_recent, current)
    assert same_tables(*paged_gqa.union_tables(mask, subgroup, keep_recent=keep_recent, current=current), want)
    assert same_tables(*paged_gqa.union_reference(mask, subgroup, keep_recent, current), want)


def test_physical_pages():
    table = torch.randperm(24).view(2, 3, 4).int()
    ids = torch.tensor([[0, 3, -1], [2, -1, -1]], dtype=torch.int32)[:, None].expand(2, 6, 3)
    pages = paged_gqa.physical_pages(ids, table)
    for b, r, i in itertools.product(range(2), range(6), range(3)):
        assert pages[b, r, i] == (-1 if ids[b, r, i] < 0 else table[b, r // 2, ids[b, r, i]])


# --- the boundary --------------------------------------------------------------------------------------------------------
def good() -> dict:
    p = paged.make(2, 2, 3, 9, 40, 64, 16, density=0.9)
    ids, pages, counts = (x.squeeze(2) for x in p.tables)
    return {"q": p.q, "k_pages": p.k_pages, "v_pages": p.v_pages, "ids": ids, "pages": pages, "counts": counts, "seq_lens": p.seq_lens, "q_start": p.q_start}


def with_entry(x: torch.Tensor, value: int) -> torch.Tensor:
    "x with its first number replaced."
    x = x.clone()
    x.view(-1)[0] = value
    return x


BAD = {
    "q: expected a non-empty": lambda a: {"q": a["q"][0]},
    "q: the kernel takes float16": lambda a: {x: a[x].double() for x in ("q", "k_pages", "v_pages")},
    "q: the kernel takes head sizes": lambda a: {x: a[x][..., :20] for x in ("q", "k_pages", "v_pages")},
    "k_pages: expected": lambda a: {"k_pages": a["k_pages"][None]},
    "k_pages: head size 32": lambda a: {x: a[x][..., :32] for x in ("k_pages", "v_pages")},
    "k_pages: the kernel takes pages": lambda a: {x: a[x][:, :8] for x in ("k_pages", "v_pages")},
    "k_pages: torch.float16 differs": lambda a: {"k_pages": a["k_pages"].half()},
    "k_pages: the kernel reads pages in place": lambda a: {"k_pages": a["k_pages"].transpose(1, 2).contiguous().transpose(1, 2)},
    "v_pages: expected the shape": lambda a: {"v_pages": a["v_pages"][1:]},
    "ids: expected int32": lambda a: {"ids": a["ids"].long()},
    "ids: expected [B, R, n]": lambda a: {"ids": a["ids"][0]},
    "ids: 1 sequences": lambda a: {x: a[x][:1] for x in ("ids", "pages", "counts")},
    "ids: 4 table rows don't divide": lambda a: {x: a[x].repeat_interleave(2, 1) for x in ("ids", "pages", "counts")},
    "ids: a table id lies outside [0, 4)": lambda a: {"ids": with_entry(a["ids"], 4)},
    "ids: a block occurs twice": lambda a: {"ids": with_entry(a["ids"], int(a["ids"][0, 0, 1]))},
    "pages: expected the shape": lambda a: {"pages": a["pages"][..., 1:]},
    "pages: a page lies outside": lambda a: {"pages": with_entry(a["pages"], 1000)},
    "counts: expected [2, 2": lambda a: {"counts": a["counts"][:, :1]},
    "counts: empty table row at (0, 0": lambda a: {"counts": with_entry(a["counts"], 0)},
    "counts: more entries than": lambda a: {"counts": with_entry(a["counts"], 99)},
    "seq_lens: expected [2]": lambda a: {"seq_lens": a["seq_lens"][:1]},
    "seq_lens: expected at least 1": lambda a: {"seq_lens": with_entry(a["seq_lens"], 0)},
    "q_start: expected": lambda a: {"q_start": -1},
    "splits: expected": lambda a: {"splits": 0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_names_the_argument(message):
    arguments = good()
    with pytest.raises(ValueError) as error:
        paged_gqa.paged_gqa_prefill(**{**arguments, **BAD[message](arguments)})
    assert str(error.value).startswith(message)


def test_bad_block_sparse_and_union_input():
    a = good()
    ids, pages, counts = (a.pop(x).unsqueeze(2) for x in ("ids", "pages", "counts"))
    with pytest.raises(ValueError, match="ids: 1 query blocks, but 9 queries in blocks of 4 make 3"):
        paged_gqa.block_sparse_prefill(**a, ids=ids, pages=pages, counts=counts, q_block=4)
    with pytest.raises(ValueError, match="q_block: "):
        paged_gqa.block_sparse_prefill(**a, ids=ids, pages=pages, counts=counts, q_block=0)
    mask = torch.zeros(1, 4, 2, 8, dtype=torch.bool)
    for message, arguments, options in [("mask: ", (mask.int(), 2), {}), ("subgroup: 3 doesn't divide 4 heads", (mask, 3), {}), ("keep_recent: ", (mask, 2), {"keep_recent": -1})]:
        with pytest.raises(ValueError, match=message):
            paged_gqa.union_tables(*arguments, **options)


# --- operators, import, cost -----------------------------------------------------------------------------------------------
def test_cost_counts_what_is_read():
    p = paged.make(1, 2, 3, 16, 48, 64, 16, density=0.6)
    full = p.see.any(-2).any(1, keepdim=True)                                              # every selected key, for some row
    pairs = sum(3 * 16 * int(p.see[0, 3 * r : 3 * r + 3].any(0).any(0).sum()) for r in range(2))
    assert paged_gqa.prefill_flops(p.counts, 3, 16, 16, 64) == 4 * 64 * pairs and full.any()
    least, most = paged_gqa.prefill_bytes(p.counts, tuple(p.q.shape), 16, 2, tiles=2)
    rows, pages = 2 * p.q.numel() * 2, int((~p.k_pages[..., 0].isnan()).sum() + (~p.v_pages[..., 0].isnan()).sum()) * 64 * 2
    assert (least, most) == (rows + pages, rows + 2 * pages)


# --- the compiled record -----------------------------------------------------------------------------------------------------
def test_record_is_what_the_compiler_gives():
    "A spot check: three of the configurations, compiled now."
    recorded = {(r["kernel"], r["config"], r["arch"]): r for r in kernels.resources("paged_gqa").to_dict("records")}
    rows, failed = kernels.compile_all("paged_gqa", (90,), jobs=1, every=19)
    assert failed == [] and len(rows) == 3
    assert [vars(r) for r in rows] == [recorded[r.kernel, r.config, r.arch] for r in rows]


def test_launcher_chooses_only_recorded_configurations():
    for arch in kernels.ARCHS:
        compiled = [(s.constexprs, s.options) for s in paged_gqa.specs(arch) if s.name == "prefill_kernel"]
        for dtype, page, D, rows in itertools.product(paged_gqa.TYPES, paged_gqa.PAGES, range(8, 129, 8), (1, 16, 64, 65, 4096)):
            assert paged_gqa.config(arch, dtype, page, D, rows) in compiled


# --- mutations: each changes one thing in the kernels, and the tests above must notice -----------------------------------------
def probes(module) -> bool:
    "Whether a module passes a few of the cases above; they lie on the edges that the mutations move."
    shapes = [
        (paged.make(1, 1, 3, 18, 30, 64, 16, density=1.0), 1), (paged.make(1, 1, 3, 4, 14, 64, 16, density=1.0), 1), (paged.make(1, 1, 3, 2, 15, 64, 16, density=1.0), 1),
        (paged.make(1, 1, 3, 5, 27, 64, 16, density=1.0), 2), (paged.make(2, 1, 1, 18, 30, 64, 16, density=1.0, q_block=8, ragged=True), 1),
    ]
    if any(paged.verdict(p, *run(p, splits=splits, module=module)) for p, splits in shapes): return False
    mask = torch.zeros(1, 6, 3, 140, dtype=torch.bool)
    for h in range(6): mask[0, h, h % 3, [h, 130 + h]] = True
    return same_tables(*module.union_tables(mask, 3, keep_recent=1, current=1), brute_union(mask, 3, 1, 1))


MUTATIONS = {
    "scale off by 1 %": ("scale * LOG2E,", "1.01 * scale * LOG2E,"),
    "causal mask off by one": ("start + key[None, :] <= q_start", "start + key[None, :] < q_start"),
    "unmasked region one key too long": ("full = tl.minimum(q_start + begin + 1", "full = tl.minimum(q_start + begin + 2"),
    "last visible block dropped": ("visible = tl.minimum(q_start + end,", "visible = tl.minimum(q_start + end - 1,"),
    "end of the sequence off by one": ("key_ok = key < seq_len - start", "key_ok = key < seq_len - start - 1"),
    "a head of the group read twice": ("head = r * G + row % G", "head = r * G + (row % G) // 2 * 2"),
    "no rescaling when the maximum grows": ("values, acc * keep[:, None]", "values, acc"),
    "a split one entry short": ("high = tl.minimum(low + share, used)", "high = tl.minimum(low + share - (S > 1), used)"),
    "merge without rescaling": ("acc = acc * keep[:, None] + part", "acc = acc + part"),
    "union drops a head": ("row_ok = row < subgroup * nq", "row_ok = row < (subgroup - 1) * nq"),
    "union forgets the forced blocks": ("(block >= forced)", "(block > forced)"),
    "union counts from one": ("tl.cumsum(keep, 0) - 1", "tl.cumsum(keep, 0)"),
}


def changed(name: str, edits: list[tuple[str, str]], tmp_path: Path):
    "The kernel file with text replaced, as a module of its own."
    text = Path(paged_gqa.__file__).read_text().replace('NAMESPACE = "neurips26"', f'NAMESPACE = "{name}"')
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unchanged_copy_passes(tmp_path):
    assert probes(changed("copy", [], tmp_path))


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutation_is_noticed(what, tmp_path):
    name = f"mutant_{list(MUTATIONS).index(what)}"
    assert not probes(changed(name, [MUTATIONS[what]], tmp_path))
