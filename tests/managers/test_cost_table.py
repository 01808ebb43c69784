"""Cost tables: the formula, the shipped numbers against what was measured, the analytic fallback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora_sgl.core import row_pairs
from vlora_sgl.errors import ConfigError
from vlora_sgl.managers.policies.cost_table import (
    CostTable,
    ModelShape,
    PhaseCosts,
    analytic,
    load_tables,
    lora_work,
    save_tables,
    shipped,
    table_for,
)

EIGHT = {f"a{i}": 4 for i in range(8)}
COMBINED = ['{"a": 0.5, "b": 0.5}', '{"a": 1.0, "c": 2.0, "d": -1.0}']
HALF = {None: 16, **{f"a{i}": 2 for i in range(8)}}


@pytest.mark.parametrize(
    ("merged", "expected"),
    [
        (None, 1 + 10 * 2 + 100 * 3),  # a and b: two slots, three pairs
        ("a", 1 + 10 * 2 + 100 * (2 * 2 + 3) + 1000 * 2),  # b twice per row, base once, slots of b and a, two undo
    ],
)
def test_lora_seconds_count_slots_pairs_and_undone(merged: str | None, expected: float) -> None:
    costs = PhaseCosts(0, 0, lora_fixed=1, lora_per_slot=10, lora_per_pair=100, lora_per_undo=1000)
    assert costs.lora_seconds({"a": 1, "b": 2, None: 3}, merged) == expected


def test_a_merged_batch_pays_for_no_adapter() -> None:
    decode = shipped()["atmm"].decode
    assert decode.lora_seconds({"a": 32}, "a") == 0
    assert decode.lora_seconds({None: 32}, None) == 0
    assert decode.lora_seconds({None: 32}, "a") > 0


@pytest.mark.parametrize(
    ("groups", "measured_ms"), [({None: 32}, 7.74), ({"a": 32}, 10.12), (EIGHT, 11.53), (HALF, 11.41)]
)
def test_the_stock_table_gives_back_what_was_measured(groups: dict[str | None, int], measured_ms: float) -> None:
    table = shipped()["csgmv"]
    assert 1e3 * table.decode.seconds(groups, 32 * 290, None) == pytest.approx(measured_ms, rel=0.01)


@pytest.mark.parametrize(("groups", "measured_ms"), [({None: 8192}, 192.6), ({"a": 8192}, 379.2)])
def test_the_stock_table_gives_back_the_prefill(groups: dict[str | None, int], measured_ms: float) -> None:
    assert 1e3 * shipped()["csgmv"].prefill.seconds(groups, 0, None) == pytest.approx(measured_ms, rel=0.01)


def test_analytic_table_is_near_the_measured_base_model() -> None:
    shape = ModelShape(3584, 28, 28, 4, 18944, 152064, rank=64)
    assert 2 * shape.adapter_parameters == pytest.approx(323e6, rel=0.01), "the adapter's size in bytes"
    table = analytic(shape, "H100", bandwidth=3.0e12, flops=6.5e14)
    assert table.decode.seconds({None: 32}, 32 * 290, None) == pytest.approx(6.49e-3, rel=0.15)
    assert table.prefill.seconds({None: 8192}, 0, None) == pytest.approx(179.4e-3, rel=0.15)
    assert table.merge == pytest.approx(9.55e-3, rel=0.15)


def test_tables_survive_a_file(tmp_path: Path) -> None:
    tables = shipped()
    save_tables(tmp_path / "t.json", tables)
    assert load_tables(tmp_path / "t.json") == tables


def test_a_broken_table_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="per_token"):
        PhaseCosts(fixed=1.0, per_token=-1.0)
    row = shipped()["atmm"].to_json()
    del row["decode"]
    with pytest.raises(ConfigError, match="decode"):
        CostTable.from_json(row)
    (tmp_path / "t.json").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"t\.json"):
        load_tables(tmp_path / "t.json")


def test_the_table_is_the_measured_one_where_there_is_one(tmp_path: Path) -> None:
    seven = ModelShape(3584, 28, 28, 4, 18944, 152064, rank=64)
    assert table_for("NVIDIA H100 80GB HBM3", seven) == shipped()["atmm"]
    tiny = ModelShape(64, 2, 4, 2, 128, 512, rank=16)
    assert table_for("NVIDIA H100 80GB HBM3", tiny).provenance.startswith("analytic")
    assert table_for("cpu", tiny).decode.fixed > table_for("NVIDIA A100", tiny).decode.per_token
    save_tables(tmp_path / "t.json", {"csgmv": shipped()["csgmv"]})
    with pytest.raises(ConfigError, match="csgmv; expected one of operator atmm"):
        table_for("cpu", tiny, str(tmp_path / "t.json"))


@given(
    groups=st.dictionaries(st.sampled_from([None, "a", "b", *COMBINED]), st.integers(0, 9)),
    merged=st.sampled_from([None, "a", "b", "c"]),
)
def test_work_is_what_the_rows_apply(groups: dict[str | None, int], merged: str | None) -> None:
    rows = [(adapter, dict(row_pairs(adapter, merged)), tokens) for adapter, tokens in groups.items() if tokens]
    pairs = sum(tokens * len(applied) for _, applied, tokens in rows)
    slots = {one for _, applied, _ in rows for one in applied}
    undone = sum(merged in applied for _, applied, _ in rows)
    assert lora_work(groups, merged) == (pairs, len(slots), undone)
