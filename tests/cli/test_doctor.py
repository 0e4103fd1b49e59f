from __future__ import annotations

import pytest

import omnigemm
from omnigemm.backends.cpu import isa
from omnigemm.backends.cuda import CudaBackend
from omnigemm.backends.cuda.gpu import KNOWN
from omnigemm.bench.workloads import CASES
from omnigemm.cli.doctor import self_check
from omnigemm.core.dispatch import Support
from omnigemm.core.problem import OPS
from omnigemm.core.settings import BACKEND_NAMES, ENVIRONMENT


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
    assert [one["name"] for one in found["backends"]] == list(BACKEND_NAMES)
    assert found["backends"][-1]["available"]
    assert found["backends"][0]["available"] or "torch" in found["backends"][0]["reason"]
    assert {one["device"] for one in found["checks"]} <= {"cpu", "cuda"}
    assert found["cache"] == {"path": str(tmp_path / "cache"), "exists": False, "writable": True, "reason": ""}
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


@pytest.mark.parametrize("ok", [False, True])
def test_backend_row(run, monkeypatch, ok):
    gpu = "NVIDIA H200 (sm_90, 132 multiprocessors); NVRTC 13.9.1"
    # With brackets, which a table must not take for markup.
    reason = gpu if ok else "cuda-core is not installed: pip install 'omnigemm[cuda]'"
    monkeypatch.setattr(CudaBackend, "available", lambda _: Support(ok, reason))
    monkeypatch.setattr("omnigemm.cli.doctor.self_check", list)
    row = next(line for line in run("doctor").out.splitlines() if "backend cuda" in line)
    assert ("yes: " if ok else "no: ") + reason in row
    assert run("doctor", "--json").json["backends"][0] == {"name": "cuda", "available": ok, "reason": reason}


def test_gpu_is_checked_where_it_is_supported(monkeypatch):
    gpu = KNOWN["h200"]
    monkeypatch.setattr(CudaBackend, "available", lambda _: Support(True, str(gpu)))
    monkeypatch.setattr(CudaBackend, "supports", lambda self, problem, _: self.supports_on(problem, gpu))
    monkeypatch.setattr("omnigemm.cli.doctor._check", lambda one, device: (one, device))
    checks = self_check()
    assert [one for one, device in checks if device == "cpu"] == list(CASES)
    # As many as the backend takes, so that a new kernel is checked by itself.
    on_gpu = [one for one, device in checks if device == "cuda"]
    assert {one.words["granularity"] for one in on_gpu if one.op == "fp8_gemm"} == {
        "tensor",
        "token",
        "128x128",
        "1x128",
    }


def test_gpu_is_left_alone_without_a_backend(monkeypatch):
    monkeypatch.setattr(CudaBackend, "available", lambda _: Support(False, "none"))
    monkeypatch.setattr("omnigemm.cli.doctor._check", lambda one, device: device)
    assert set(self_check()) == {"cpu"}


@pytest.mark.parametrize("as_json", [False, True])
def test_variable_that_means_nothing_is_reported(run, monkeypatch, as_json):
    monkeypatch.setattr("omnigemm.cli.doctor.self_check", list)
    monkeypatch.setenv("OMNIGEMM_CACHE_DIR", "~no-such-user/kernels")
    result = run("doctor", *["--json"] * as_json)
    assert result.code == 0
    reason = "OMNIGEMM_CACHE_DIR is '~no-such-user/kernels', expected a folder: there is no such user"
    if as_json:
        assert result.json["cache"] == {"path": None, "exists": False, "writable": False, "reason": reason}
    else:
        assert f"none (not writable: {reason})" in result.out


def test_folder_that_others_can_write_is_reported(run, monkeypatch, tmp_path):
    monkeypatch.setattr("omnigemm.cli.doctor.self_check", list)
    kernels = tmp_path / "cache" / "kernels"
    kernels.mkdir(parents=True)
    kernels.chmod(0o770)
    found = run("doctor", "--json").json["cache"]
    assert not found["writable"]
    assert found["reason"] == f"{kernels} can be written by others (mode 0770)"
    shown = " ".join(run("doctor").out.split())
    assert "not writable" in shown
    assert "(mode 0770)" in shown
