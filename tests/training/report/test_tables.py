"""Cells that come from other people's pages are harmless; numbers stay numbers."""

import csv
import io
import math

import pytest

from training.report.tables import Table, csv_cell


@pytest.mark.parametrize("text", ["=1+2", "+1", "-1", "@cmd", "\t=1", "\r=1", " =1", "\n@x"])
def test_text_that_a_spreadsheet_would_run_is_quoted(text: str) -> None:
    assert csv_cell(text).startswith("'")


def test_numbers_stay_numbers_and_a_missing_one_is_empty() -> None:
    assert [csv_cell(v) for v in (-0.25, 3, -7, 0, None, math.nan, math.inf)] == ["-0.25", "3", "-7", "0", "", "", ""]
    assert csv_cell("https://a.example/-x") == "https://a.example/-x"


def test_a_table_reads_back_whatever_its_text_holds() -> None:
    text = 'a "quoted", cell\nwith a break'
    table = Table("t", ("url", "score"), [(text, 0.1), ("=HYPERLINK()", None)])
    rows = list(csv.reader(io.StringIO(table.csv())))
    assert rows == [["url", "score"], ['a "quoted", cell with a break', "0.1"], ["'=HYPERLINK()", ""]]
