from __future__ import annotations

import pytest

import omnigemm
from omnigemm.backends.cpu import isa
from omnigemm.cli.doctor import _writable
from omnigemm.core.dispatch import Support
from omnigemm.core.problem import OPS
from omnigemm.core.settings import ENVIRONMENT


def test_json(run, monkeypatch, tmp_path):
    monkeypatch.setenv("OMNIGEMM_LOG", "off")
    result = run("doctor", "--json")
    found = result.json
    assert result.code == 0
    assert found["ok"]
    assert {one["op"] for one in found["checks"]} == set(OPS)
    assert all(one["ok"] and 0 <= one["error"] <= one["tolerance"] for one in found["checks"])
    assert found["versions"]["omnigemm"] == omnigemm.__version__
    assert {"python", "torch", "numpy"} <= set(found["versions"])
    assert found["processor"]["name"] == isa.processor()
    assert [one["name"] for one in found["backends"]] == ["cpu"]
    assert found["backends"][0]["available"]
    assert found["cache"] == {"path": str(tmp_path / "cache"), "exists": False, "writable": True}
    assert set(found["environment"]) == set(ENVIRONMENT)
    assert found["environment"]["OMNIGEMM_LOG"]["value"] == "off"


@pytest.mark.usefixtures("break_int8")
def test_wrong_result_is_found(run):
    result = run("doctor", "--json")
    assert result.code == 1
    assert not result.json["ok"]
    failed = [one for one in result.json["checks"] if not one["ok"]]
    assert {one["op"] for one in failed} == {"int8_gemm"}
    assert "worst element" in failed[0]["note"]


def test_crash_is_found_and_the_rest_still_checked(run, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise omnigemm.UnsupportedError("not [today]")

    monkeypatch.setattr(omnigemm, "grouped_gemm", refuse)
    result = run("doctor")
    assert result.code == 1
    assert "not [today]" in result.out
    assert "1 of" in result.out
    assert result.out.count("pass") > 10


@pytest.mark.parametrize("faults", [False, True])
def test_amx_advice(run, monkeypatch, faults):
    monkeypatch.setattr(isa, "amx_faults", lambda: faults)
    monkeypatch.setattr("omnigemm.cli.doctor.self_check", list)
    result = run("doctor")
    assert ("ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in result.out) == faults
    for name in ENVIRONMENT:
        assert name in result.out


@pytest.mark.parametrize("ok", [False, True])
def test_nvrtc_line(run, monkeypatch, ok):
    reason = "NVRTC 13.9.1" if ok else "cuda-core is not installed: pip install 'omnigemm[cuda]'"
    monkeypatch.setattr("omnigemm.backends.cuda.jit.available", lambda: Support(ok, reason))
    monkeypatch.setattr("omnigemm.cli.doctor.self_check", list)
    assert (reason if ok else f"no: {reason}") in run("doctor").out
    assert run("doctor", "--json").json["nvrtc"] == {"available": ok, "reason": reason}


def test_writable_looks_at_the_nearest_folder(tmp_path):
    assert _writable(tmp_path / "not" / "there")
    (tmp_path / "file").write_text("")
    assert not _writable(tmp_path / "file")
    assert not _writable(tmp_path / "file" / "below")
