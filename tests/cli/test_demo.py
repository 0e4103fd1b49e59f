from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

import omnigemm
from omnigemm.cli.charts import Row, _apart, _ticks, error_dots, speedup_bars
from omnigemm.cli.report import page, verdict
from omnigemm.core.problem import OPS

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def check_self_contained(text: str) -> Page:
    parsed = Page(text)
    assert parsed.open == []
    assert parsed.loads == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert not {"script", "link", "iframe", "img"} & set(parsed.seen)
    return parsed


def test_demo(run, tmp_path):
    result = run("demo", "--quick", "--json", "--out", "deep/report.html")
    found = result.json
    assert result.code == 0
    assert found["ok"]
    assert found["report"] == "deep/report.html"
    assert {one["op"] for one in found["results"]} == set(OPS)
    precisions = {one["title"] for one in found["results"] if one["op"] == "grouped_gemm_contiguous"}
    assert {title.split()[0] for title in precisions} == {"bf16", "fp8", "int8"}
    assert "bf16 x int4" in precisions
    assert len([one for one in found["results"] if one["op"] == "fp8_gemm"]) == 4
    for one in found["results"]:
        assert one["error"] <= one["tolerance"] < 1e-2
        assert one["us"] > 0
        assert one["peers"]["torch fp32"] > 0
        assert one["kernel"].startswith("cpu/")
    lossy = {one["title"]: one["quantisation"] for one in found["results"] if one["op"] == "int4_gemm"}
    assert all(0.05 < error < 0.2 for error in lossy.values())

    text = (tmp_path / "deep" / "report.html").read_text()
    parsed = check_self_contained(text)
    assert parsed.seen.count("svg") == 3
    assert "prefers-color-scheme: dark" in text
    words = " ".join(parsed.words)
    for one in found["results"]:
        assert one["title"] in words
        assert one["kernel"] in words
    assert found["method"] in words
    assert found["machine"]["processor"] in words
    assert "microseconds per call" in words


@pytest.mark.usefixtures("break_int8")
def test_wrong_result_fails_the_demo(run, tmp_path):
    result = run("demo", "--quick")
    assert result.code == 1
    assert "FAIL" in result.out
    assert "2 of 19 results are wrong: int8_gemm" in result.out
    text = (tmp_path / "omnigemm-report.html").read_text()
    assert "<p class='verdict bad'>2 of 19 results are wrong" in text
    check_self_contained(text)


def test_nan_is_wrong_and_json_stays_json(run, monkeypatch):
    right = omnigemm.grouped_gemm
    monkeypatch.setattr(omnigemm, "grouped_gemm", lambda *args: [one * float("nan") for one in right(*args)])
    result = run("demo", "--quick", "--json")
    assert result.code == 1
    assert "NaN" not in result.out
    (failed,) = [one for one in result.json["results"] if not one["ok"]]
    assert (failed["op"], failed["error"]) == ("grouped_gemm", None)


def test_refusal_fails_the_demo(run, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise omnigemm.UnsupportedError("not <today>")

    monkeypatch.setattr(omnigemm, "grouped_gemm_masked", refuse)
    result = run("demo", "--quick", "--json")
    assert result.code == 1
    failed = [one for one in result.json["results"] if not one["ok"]]
    assert {(one["op"], one["note"], one["us"]) for one in failed} == {("grouped_gemm_masked", "not <today>", None)}
    with open("omnigemm-report.html") as file:
        text = file.read()
    assert "not &lt;today&gt;" in text
    check_self_contained(text)


@pytest.mark.parametrize("out", [".", "file/below.html"])
def test_target_is_checked_before_the_work(run, tmp_path, monkeypatch, out):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("omnigemm.cli.demo.collect", lambda *_: pytest.fail("worked in vain"))
    result = run("demo", "--out", out)
    assert (result.code, result.out) == (2, "")
    assert "cannot be" in result.err
    assert run("bench", "--record", out).code == 2


def result_of(**changes):
    usual = {"op": "int4_gemm", "title": "t", "shape": "1x2x3", "kernel": "cpu/k", "ok": True, "note": ""}
    figures = {"error": 1e-3, "worst": 1e-2, "quantisation": 0.1, "tolerance": 4e-3, "us": 10.0}
    return {**usual, **figures, "peers": {"torch fp32": 25.0}, **changes}


def found_of(*results):
    machine = {"processor": "P", "threads": 2, "versions": {"torch": "2"}}
    decode = {"n": 8, "k": 8, "rows": [1], "us": {"int4": [3.0]}}
    ok = all(one["ok"] for one in results)
    return {"machine": machine, "method": "m", "seconds": 1.0, "ok": ok, "results": list(results), "decode": decode}


def test_verdict_line():
    slow = result_of(peers={"torch fp32": 10.0})
    assert "int4_gemm is 1.6 times as fast as torch fp32" in verdict(found_of(result_of(), slow))
    assert verdict(found_of(result_of(ok=False), slow)).startswith("1 of 2 results are wrong: int4_gemm (t)")


def test_page_survives_gaps():
    nothing = dict.fromkeys(("error", "worst", "quantisation", "tolerance", "us"))
    gap = result_of(ok=False, kernel=None, peers={}, **nothing)
    check_self_contained(page(found_of(gap)))
    check_self_contained(page(found_of(gap, result_of(quantisation=0.0, error=float("nan")))))


def test_bars_leave_one_to_the_side_that_is_true():
    svg = speedup_bars([Row("a", "b", [4.0, 0.5])], ["x", "y"], "axis")
    boxes = {j: float(x) for j, x in re.findall(r'<rect class="s(\d)" x="([\d.]+)"', svg)}
    widths = {j: float(w) for j, w in re.findall(r'<rect class="s(\d)"[^>]*width="([\d.]+)"', svg)}
    base = float(re.findall(r'class="base" x1="([\d.]+)"', svg)[0])
    assert boxes["0"] == pytest.approx(base, abs=0.2)
    assert boxes["1"] + widths["1"] == pytest.approx(base, abs=0.2)
    assert widths["0"] == pytest.approx(2 * widths["1"], rel=0.01)


def test_dots_are_placed_by_their_logarithm():
    svg = error_dots([Row("a", "b", [1e-3, 1e-1, 1e-2])], ["x", "y", "limit"], "axis")
    dot = float(re.findall(r'<circle class="s0" cx="([\d.]+)"', svg)[0])
    diamond = float(re.findall(r'<path class="s1" d="M([\d.]+)', svg)[0])
    limit = float(re.findall(r'<rect class="limit" x="([\d.]+)"', svg)[0]) + 1
    assert limit == pytest.approx((dot + diamond) / 2, abs=0.3)
    assert dot < limit < diamond


def test_ticks_and_labels():
    assert _ticks(0.9, 60) == [1, 2, 5, 10, 20, 50]
    assert _apart([10.0, 0.0, 12.0], 16.0) == [16.0, 0.0, 32.0]
    assert _apart([0.0, 100.0], 16.0) == [0.0, 100.0]
