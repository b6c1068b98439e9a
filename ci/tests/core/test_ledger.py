import json
import math
import os

import pytest
from hypothesis import given, strategies as st

from neurips26_lit.core.catalog import CatalogError, Check, Claim, Paper
from neurips26_lit.core.ledger import Ledger, differences_table, claims_table, hyperparameter_table, merge_claims, read_claims, verdict, write_atomic, write_json

TOY = Paper(slug="toy", area="toys", title="A toy", summary="A toy.", status="built", claims=[
    Claim(id="exactly", says="the sum <b>is</b> kept", kind="exact", check={"smoke": "value == 0", "small": "value == 0"}),
    Claim(id="faster", says="faster", paper_value=2.7, unit="×", at="one GPU", kind="direction", check={"small": "low > 1", "paper": {"needs": "gpu"}})])
finite = st.floats(-1e6, 1e6)


@given(bound=finite, ends=st.tuples(finite, finite).map(sorted), op=st.sampled_from(["<", "<=", ">", ">="]))
def test_a_verdict_is_what_the_interval_says(bound, ends, op):
    low, high = ends
    # an independent route: is the statement true of all, of none, or of some points of the interval?
    true = {"<": lambda x: x < bound, "<=": lambda x: x <= bound, ">": lambda x: x > bound, ">=": lambda x: x >= bound}[op]
    points = [min(high, low + (high - low) * i / 50) for i in range(51)] + [high]
    expected = "holds" if all(map(true, points)) else "fails" if not any(map(true, points)) else "inconclusive"
    side = "high" if op in ("<", "<=") else "low"
    assert verdict(Check(side=side, op=op, bound=bound), (low + high) / 2, low, high) == expected


def test_what_is_not_judged():
    assert verdict(None, 1.0) == "not judged"
    assert verdict(Check.parse("value > 1"), None) == "not run"
    assert verdict(Check.parse({"needs": "model X"}), 1.0) == "needs model X"


@pytest.mark.parametrize("record, message", [
    (("other", 1), "unknown claim 'other'"), (("exactly", math.nan), "finite"), (("exactly", math.inf), "finite"), (("exactly", "many"), "expected a number"),
    (("exactly", None), "got None"), (("faster", 1.2), "interval is missing"), (("faster", 1.2, 1.3, 1.6, 5), "low <= value <= high"),
    (("faster", 1.2, 0.9, None, 5), "both ends"), (("faster", 1.2, 0.9, 1.6), "how many units"), (("faster", 1.2, 0.9, 1.6, 0), "how many units")])
def test_what_would_make_the_table_wrong_is_refused(tmp_path, record, message):
    with pytest.raises((ValueError, CatalogError), match=message): Ledger("toy", "small", 0, source=TOY, folder=tmp_path).record(*record)
    assert not list(tmp_path.iterdir())


def test_unknown_scale():
    with pytest.raises(ValueError, match="unknown scale 'huge'"): Ledger("toy", "huge", 0, source=TOY)


def test_parts_merge_and_verdicts_are_recomputed(tmp_path, monkeypatch):
    for name, row in {"90_a": ("exactly", 0), "91_b": ("faster", 1.5, 1.2, 1.9, 5)}.items():
        monkeypatch.setenv("NEURIPS26_NOTEBOOK", name)
        Ledger("toy", "small", 3, source=TOY, folder=tmp_path).record(*row)
    forged = json.loads((tmp_path / "claims.d" / "90_a.json").read_text())
    forged["claims"][0] |= {"value": 4.0, "verdict": "holds"}
    write_json(tmp_path / "claims.d" / "90_a.json", forged)
    merged = merge_claims(tmp_path, ["90_a", "91_b"], source=TOY)
    assert [r["verdict"] for r in merged["claims"]] == ["fails", "holds"] and merged["seed"] == 3
    assert [r["verdict"] for r in merge_claims(tmp_path, ["91_b"], source=TOY)["claims"]] == ["not run", "holds"]


def test_parts_that_disagree_are_refused(tmp_path, monkeypatch):
    for name, seed, claim in (("90_a", 0, "exactly"), ("91_b", 1, "exactly")):
        monkeypatch.setenv("NEURIPS26_NOTEBOOK", name)
        Ledger("toy", "small", seed, source=TOY, folder=tmp_path).record(claim, 0)
    with pytest.raises(ValueError, match="disagree on seed"): merge_claims(tmp_path, ["90_a", "91_b"], source=TOY)
    Ledger("toy", "small", 0, source=TOY, folder=tmp_path).record("exactly", 0)
    with pytest.raises(ValueError, match="recorded by two notebooks"): merge_claims(tmp_path, ["90_a", "91_b"], source=TOY)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "claims.json"
    write_json(target, {"a": 1})
    with pytest.raises(ValueError): write_json(target, {"a": math.nan})
    with pytest.raises(TypeError): write_atomic(target, 3)
    assert json.loads(target.read_text()) == {"a": 1} and os.listdir(tmp_path) == ["claims.json"]


def test_a_truncated_file_is_named(tmp_path):
    (tmp_path / "claims.json").write_text('{"paper": "toy",')
    with pytest.raises(ValueError, match="claims.json:1: not valid JSON"): read_claims(tmp_path / "claims.json")
    (tmp_path / "claims.json").write_text("{}")
    with pytest.raises(ValueError, match="is missing"): read_claims(tmp_path / "claims.json")


def test_tables_escape_and_carry_everything(tmp_path):
    ledger = Ledger("toy", "small", 0, source=TOY, folder=tmp_path)
    ledger.record("exactly", 0)
    ledger.record("faster", 1.5, 0.9, 1.9, 5, note="two cores")
    page = ledger.table()._repr_html_()
    assert "&lt;b&gt;is&lt;/b&gt;" in page and "1.5 [0.9, 1.9]" in page and "inconclusive" in page and "two cores" in page
    assert "needs gpu" in repr(claims_table(TOY)) and "2.7 × (one GPU)" in repr(claims_table(TOY))
    assert len(hyperparameter_table(TOY).rows) == len(differences_table(TOY).rows) == 0
