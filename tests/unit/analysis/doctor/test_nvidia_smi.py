"""GPU checks: the parsers of nvidia-smi's output, and complete machines with a fake nvidia-smi on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.analysis.doctor.findings import Finding
from launcher.analysis.doctor.gpu_checks import check_gpus
from launcher.analysis.doctor.nvidia_smi import (
    GpuFacts,
    GpuProcess,
    GpuState,
    parse_matrix,
    parse_processes,
    parse_states,
    probe_gpus,
)
from tests.unit.analysis.doctor import nvidia
from tests.unit.analysis.doctor.builders import install_program, list_issues, only


def judge(facts: GpuFacts, *, is_wsl: bool = False) -> list[Finding]:
    return list(check_gpus(facts, is_wsl=is_wsl))


def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **outputs: str) -> GpuFacts:
    nvidia.install_nvidia_smi(tmp_path, monkeypatch, **outputs)
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
        facts = probe(
            tmp_path,
            monkeypatch,
            more="0, 00000000:4F:00.0, 41500, 97, 64, 16, 16, 0\n",
            processes=nvidia.SOMEBODY.format(pid=child.pid),
        )
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
    assert finding.next_step == f"ps -fp {child.pid},999999991 shows their owners; the doctor stops no process"


@pytest.mark.process
def test_training_run_of_this_launcher_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "LAUNCHER_PID": "1"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    processes = nvidia.ONE.format(pid=child.pid)
    try:
        facts = probe(
            tmp_path, monkeypatch, more="0, 00000000:4F:00.0, 41500, 97, 64, 16, 16, 0\n", processes=processes
        )
    finally:
        child.kill()
        child.wait()
    assert list_issues(judge(facts)) == []
    assert any("a training run of this launcher" in finding.found for finding in judge(facts))


def test_memory_of_invisible_processes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, more="0, 00000000:4F:00.0, 70000, 0, 40, 16, 16, 0\n")))
    assert "by no visible process" in finding.found
    assert finding.next_step == "look on the host, outside the container"


def test_desktop_on_the_gpu_is_a_note() -> None:
    state = GpuState(index=0, used_mib=900, holders=(GpuProcess(pid=7, name="Xorg", memory_mib=300),))
    facts = replace(_h200(), states=(state,))
    finding = only(judge(facts))
    assert (finding.status, finding.matters) == ("note", "a plan uses free memory only")
    assert "Xorg (process 7, 0.3 GiB)" in finding.found


def _h200() -> GpuFacts:
    from launcher.hardware.gpu_catalogue import lookup_gpu
    from launcher.hardware.probe import parse_nvidia_smi

    return GpuFacts(
        driver="570.133.20",
        cuda="12.8",
        num_on_machine=1,
        readings=parse_nvidia_smi(nvidia.H200),
        gpu=lookup_gpu("h200"),
        states=(GpuState(index=0, used_mib=1),),
    )


def test_throttling_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, slowed="0, Active, Active\n")))
    assert (finding.status, finding.subject) == ("problem", "GPU 0")
    assert finding.found == "throttled by the hardware, because of heat and power"


def test_field_names_of_newer_drivers_are_queried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = nvidia.SLOWED.replace("throttle", "event")
    monkeypatch.setattr(nvidia, "SLOWED", newer)
    assert probe(tmp_path, monkeypatch, slowed="0, Active, Not Active\n").states[0].slowed_by == ("heat",)


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ("0, 00000000:4F:00.0, 1, 0, 91, 16, 16, 0\n", "note", "91 °C"),
        ("0, 00000000:4F:00.0, 1, 0, 31, 16, 16, 12\n", "problem", "12 uncorrectable memory"),
        ("0, 00000000:4F:00.0, 1, 0, 31, 4, 16, 0\n", "note", "4 of 16 PCIe lanes"),
        ("0, 00000000:4F:00.0, [N/A], 0, 31, 16, 16, 0\n", "note", "not checked: the driver does not report"),
    ],
)
def test_unhealthy_gpu_is_reported(
    more: str, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, more=more)))
    assert finding.status == status
    assert words in finding.found


def test_unreported_values_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = "0, 00000000:4F:00.0, 1, [N/A], [Unknown Error], [N/A], [N/A], [Insufficient Permissions]\n"
    facts = probe(tmp_path, monkeypatch, more=more, slowed="0, [N/A], [N/A]\n", head="")
    assert list_issues(judge(facts)) == []
    assert facts.cuda is None
    assert facts.states == (GpuState(index=0, used_mib=1),)


def test_only_the_main_query_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = probe(tmp_path, monkeypatch, more="", slowed="", processes="", head="")
    assert [finding.subject for finding in judge(facts)] == ["driver", "GPU", "links"]


@given(st.text(), st.text(), st.text())
def test_parsers_accept_any_text(more: str, slowed: str, processes: str) -> None:
    assert isinstance(parse_states(more, slowed, processes), tuple)
    assert isinstance(parse_processes(processes), dict)
    assert isinstance(parse_matrix(more, range(8)), tuple)


def test_malformed_rows_are_skipped() -> None:
    assert parse_states("0, a, b\nx, 00000000:4F:00.0, 1, 0, 31, 16, 16, 0\n\n", "0\n", "Process ID : 4\n") == ()


def test_pci_addresses_match_with_short_and_long_domains() -> None:
    found = parse_processes(nvidia.SOMEBODY.format(pid=4).replace("00000000:4F", "0000:4f"))
    (state,) = parse_states(nvidia.H200_MORE, "", nvidia.SOMEBODY.format(pid=4).replace("00000000:4F", "0000:4f"))
    assert [holder.memory_mib for holder in state.holders] == [40960, None]
    assert len(found) == 1


def test_missing_nvidia_smi_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = only(judge(probe_gpus(tmp_path)))
    assert (finding.status, finding.found) == ("note", "none (nvidia-smi is not installed)")
    assert finding.next_step == "launcher plan EXPERT --gpu rtx4090"


def test_driver_library_mismatch_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"
    install_program(tmp_path / "bin", "nvidia-smi", body, monkeypatch)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    finding = only(judge(probe_gpus(tmp_path)))
    assert finding.status == "problem"
    assert finding.found.endswith("Failed to initialize NVML: Driver/library version mismatch")
    assert "reboot" in finding.next_step


def test_hanging_nvidia_smi_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_program(tmp_path / "bin", "nvidia-smi", "exec sleep 60", monkeypatch)
    monkeypatch.setattr("launcher.analysis.doctor.nvidia_smi._SECONDS", 0.3)
    assert "timed out after 0.3 s" in only(judge(probe_gpus(tmp_path))).found


def test_hidden_gpus_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.install_nvidia_smi(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = only(judge(probe_gpus(tmp_path)))
    assert (finding.status, finding.next_step) == ("note", "unset CUDA_VISIBLE_DEVICES")


def test_gpu_not_in_the_catalogue_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, main=nvidia.H200.replace("NVIDIA H200", "NVIDIA X9000"))))
    assert (finding.status, finding.found) == ("note", "NVIDIA X9000, 140.4 GiB: not in the catalogue")


def test_mig_instances_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, main=nvidia.H200.replace("Disabled", "Enabled"))))
    assert finding.status == "problem"
    assert "is split into MIG instances" in finding.found
    assert "--gpu rtx4090" in finding.next_step


def check_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, peer: str, name: str = "") -> list[Finding]:
    main = nvidia.PAIR.replace("NVIDIA H100 80GB HBM3, 81559, 81000, 9.0", name) if name else nvidia.PAIR
    topology, peers = nvidia.TOPOLOGY.format(link=link), nvidia.PEERS.format(peer=peer)
    return judge(probe(tmp_path, monkeypatch, main=main, more=nvidia.PAIR_MORE, topology=topology, peers=peers))


def test_two_gpus_with_p2p_have_no_issues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = check_pair(tmp_path, monkeypatch, "NV18", "OK")
    assert list_issues(findings) == []
    assert findings[-1].found == "1 x NV18, direct access (P2P) between all pairs"


def test_missing_p2p_or_nvlink_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = only(check_pair(tmp_path, monkeypatch, "NV18", "CNS"))
    assert (broken.subject, broken.status) == ("links", "problem")
    assert "no direct access (P2P): 1 pairs the chipset does not support it" in broken.found
    assert "NCCL_P2P_DISABLE=1" in broken.next_step
    slow = only(check_pair(tmp_path, monkeypatch, "SYS", "OK"))
    assert slow.found == "1 x SYS: not all pairs have NVLink"


def test_links_of_hidden_gpus_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = nvidia.TOPOLOGY.format(link="SYS")
    assert parse_matrix(topology, {0, 1}) == ("SYS",)
    assert parse_matrix(topology, {1}) == ()
    nvidia.install_nvidia_smi(
        tmp_path, monkeypatch, main=nvidia.PAIR, more=nvidia.PAIR_MORE, topology=topology, peers=topology
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    findings = judge(probe_gpus(tmp_path))
    assert list_issues(findings) == []
    assert "1 more are hidden by CUDA_VISIBLE_DEVICES" in next(one.found for one in findings if one.subject == "GPU")


@pytest.mark.process
def test_secrets_of_other_processes_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["x", "--api-key", "verysecret1", "--password=verysecret2", "hf_" + "a" * 30]
    child = subprocess.Popen(["sh", "-c", "sleep 60; true", *words])
    try:
        facts = probe(tmp_path, monkeypatch, processes=nvidia.ONE.format(pid=child.pid))
    finally:
        child.kill()
        child.wait()
    states = str(facts.states)
    assert "--api-key *** --password=*** ***" in states
    assert "verysecret" not in states


def test_missing_p2p_is_fine_on_consumer_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = "NVIDIA GeForce RTX 4090, 24564, 24000, 8.9"
    findings = check_pair(tmp_path, monkeypatch, "PHB", "CNS", name=gpu)
    assert list_issues(findings) == []
    assert "as in the catalogue" in findings[-1].found


def test_possible_spill_under_wsl_is_a_note() -> None:
    finding = only(judge(_h200(), is_wsl=True))
    assert (finding.subject, finding.status) == ("spill", "note")
    assert "Sysmem Fallback Policy" in finding.next_step
