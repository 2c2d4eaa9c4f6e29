"""GPU checks of machines with a fake NVML."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.analysis.doctor.findings import Finding
from launcher.analysis.doctor.gpu_checks import GpuFacts, GpuProcess, GpuState, check_gpus, probe_gpus
from tests.fake_nvml import MIB, FakeGpu, install_nvml
from tests.unit.analysis.doctor.builders import list_issues, only, probe_h200


def judge(facts: GpuFacts, *, is_wsl: bool = False) -> list[Finding]:
    return list(check_gpus(facts, is_wsl=is_wsl))


def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, **machine: object) -> GpuFacts:
    install_nvml(monkeypatch, *gpus, **machine)
    return probe_gpus(tmp_path)


def test_free_h200_has_no_issues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = judge(probe(tmp_path, monkeypatch))
    assert list_issues(findings) == []
    found = {finding.subject: finding.found for finding in findings}
    assert found == {
        "driver": "570.133.20, CUDA up to 12.8",
        "GPU": "NVIDIA H200, 140.4 GiB",
        "memory of GPU 0": "1 MiB of 140.4 GiB in use",
        "links": "not needed for one GPU",
    }


@pytest.mark.process
def test_processes_that_use_gpu_memory_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        processes = {child.pid: 40960 * MIB, 999999991: None}
        facts = probe(tmp_path, monkeypatch, FakeGpu(used_mib=41500, utilization=97, processes=processes))
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    finding = only(judge(facts))
    assert (finding.subject, finding.status) == ("memory of GPU 0", "problem")
    assert f" (process {child.pid}, 40.0 GiB)" in finding.found
    assert str(sys.executable)[:40] in finding.found, "a long command is truncated"
    assert "a process outside this container (process 999999991, memory unknown)" in finding.found
    assert finding.found.endswith("GPU utilization 97 %")
    assert (
        finding.next_step == f"ps -fp {child.pid},999999991 shows their owners; launcher doctor --free asks them to end"
    )


@pytest.mark.process
def test_training_run_of_this_launcher_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "LAUNCHER_PID": "1"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    try:
        facts = probe(tmp_path, monkeypatch, FakeGpu(used_mib=41500, processes={child.pid: 40960 * MIB}))
    finally:
        child.kill()
        child.wait()
    assert list_issues(judge(facts)) == []
    assert any("a training run of this launcher" in finding.found for finding in judge(facts))


def test_memory_of_invisible_processes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, FakeGpu(used_mib=70000))))
    assert "by no visible process" in finding.found
    assert finding.next_step == "look on the host, outside the container"


def test_desktop_on_the_gpu_is_a_note() -> None:
    state = GpuState(index=0, used_mib=900, holders=(GpuProcess(pid=7, name="Xorg", memory_mib=300),))
    facts = replace(_h200(), states=(state,))
    finding = only(judge(facts))
    assert (finding.status, finding.matters) == ("note", "a plan uses free memory only")
    assert "Xorg (process 7, 0.3 GiB)" in finding.found


def _h200() -> GpuFacts:
    return replace(probe_h200(), driver="570.133.20", states=(GpuState(index=0, used_mib=1),))


def test_throttling_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, FakeGpu(slowdowns=0x40 | 0x80))))
    assert (finding.status, finding.subject) == ("problem", "GPU 0")
    assert finding.found == "throttled by the hardware, because of heat and power"


@pytest.mark.parametrize(
    ("gpu", "status", "words"),
    [
        (FakeGpu(temperature=91), "note", "91 °C"),
        (FakeGpu(errors=12), "problem", "12 uncorrectable memory"),
        (FakeGpu(lanes=4), "note", "4 of 16 PCIe lanes"),
    ],
)
def test_unhealthy_gpu_is_reported(
    gpu: FakeGpu, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, gpu)))
    assert finding.status == status
    assert words in finding.found


def test_unreported_values_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = FakeGpu(utilization=None, temperature=None, lanes=None, most_lanes=None, errors=None, slowdowns=None)
    facts = probe(tmp_path, monkeypatch, silent, cuda=None)
    assert list_issues(judge(facts)) == []
    assert facts.cuda is None
    assert facts.states == (GpuState(index=0, used_mib=1),)


def test_unreported_memory_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issues = list_issues(judge(probe(tmp_path, monkeypatch, FakeGpu(total_mib=None))))
    assert [(one.subject, one.status) for one in issues] == [("GPU", "problem"), ("memory of GPU 0", "note")]
    assert "does not report its memory" in issues[0].found


def test_missing_driver_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, failure="NVML Shared Library Not Found")))
    assert (finding.status, finding.found) == ("note", "none (NVML Shared Library Not Found)")
    assert finding.next_step == "launcher plan EXPERT --gpu rtx4090"


def test_driver_library_mismatch_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    finding = only(judge(probe(tmp_path, monkeypatch, failure="RM has detected an NVML/RM version mismatch.")))
    assert finding.status == "problem"
    assert finding.found.endswith("RM has detected an NVML/RM version mismatch.")
    assert "reboot" in finding.next_step


def test_hanging_driver_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.analysis.doctor.gpu_checks._SECONDS", 0.3)
    assert "timed out after 0.3 s" in only(judge(probe(tmp_path, monkeypatch, hangs=True))).found


def test_hidden_gpus_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = only(judge(probe_gpus(tmp_path)))
    assert (finding.status, finding.next_step) == ("note", "unset CUDA_VISIBLE_DEVICES")


def test_gpu_not_in_the_catalogue_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, FakeGpu("NVIDIA X9000"))))
    assert (finding.status, finding.found) == ("note", "NVIDIA X9000, 140.4 GiB: not in the catalogue")


def test_mig_instances_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, FakeGpu(mig=True))))
    assert finding.status == "problem"
    assert "is split into MIG instances" in finding.found
    assert "--gpu rtx4090" in finding.next_step


H100 = FakeGpu("NVIDIA H100 80GB HBM3", 81559, 81000, uuid="GPU-aaaa")


def check_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu = H100, **links: object) -> list[Finding]:
    return judge(probe(tmp_path, monkeypatch, gpu, replace(gpu, uuid="GPU-bbbb"), **links))


def test_two_gpus_with_p2p_have_no_issues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = check_pair(tmp_path, monkeypatch)
    assert list_issues(findings) == []
    assert findings[-1].found == "1 x NVLink, direct access (P2P) between all pairs"


def test_missing_p2p_or_nvlink_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = only(check_pair(tmp_path, monkeypatch, peer_status=1))
    assert (broken.subject, broken.status) == ("links", "problem")
    assert "no direct access (P2P): 1 pairs, the chipset does not support it" in broken.found
    assert "NCCL_P2P_DISABLE=1" in broken.next_step
    slow = only(check_pair(tmp_path, monkeypatch, has_nvlink=False))
    assert slow.found == "1 x SYS: not all pairs have NVLink"
    unknown = only(check_pair(tmp_path, monkeypatch, has_nvlink=False, ancestor=None, peer_status=None))
    assert unknown.found == "not checked: the driver reports no topology"


def test_links_of_hidden_gpus_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, H100, replace(H100, uuid="GPU-bbbb"), has_nvlink=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    findings = judge(probe_gpus(tmp_path))
    assert list_issues(findings) == []
    assert "1 more are hidden by CUDA_VISIBLE_DEVICES" in next(one.found for one in findings if one.subject == "GPU")


@pytest.mark.process
def test_secrets_of_other_processes_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["x", "--api-key", "verysecret1", "--password=verysecret2", "hf_" + "a" * 30]
    child = subprocess.Popen(["sh", "-c", "sleep 60; true", *words])
    try:
        facts = probe(tmp_path, monkeypatch, FakeGpu(processes={child.pid: MIB}))
    finally:
        child.kill()
        child.wait()
    states = str(facts.states)
    assert "--api-key *** --password=*** ***" in states
    assert "verysecret" not in states


def test_missing_p2p_is_fine_on_consumer_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu("NVIDIA GeForce RTX 4090", 24564, 24000, capability=(8, 9))
    findings = check_pair(tmp_path, monkeypatch, gpu, has_nvlink=False, ancestor=30, peer_status=1)
    assert list_issues(findings) == []
    assert "plans already account for this" in findings[-1].found


def test_possible_spill_under_wsl_is_a_note() -> None:
    finding = only(judge(_h200(), is_wsl=True))
    assert (finding.subject, finding.status) == ("spill", "note")
    assert "Sysmem Fallback Policy" in finding.next_step
