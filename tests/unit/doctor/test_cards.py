"""GPUs: nvidia-smi's own forms, read; what they mean, judged; and whole machines by a stand-in nvidia-smi on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.doctor.card_health import judge_cards
from launcher.doctor.cards import CardFacts, CardState, Holder, parse_matrix, parse_processes, parse_states, probe_cards
from launcher.doctor.findings import Finding
from tests.unit.doctor import nvidia
from tests.unit.doctor.made import install_program, named, only


def judge(facts: CardFacts, *, is_wsl: bool = False) -> list[Finding]:
    return list(judge_cards(facts, is_wsl=is_wsl))


def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **answers: str) -> CardFacts:
    nvidia.install_nvidia_smi(tmp_path, monkeypatch, **answers)
    return probe_cards(tmp_path)


def test_a_free_h200_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = judge(probe(tmp_path, monkeypatch))
    assert named(findings) == []
    told = {finding.subject: finding.found for finding in findings}
    assert told == {
        "driver": "570.133.20, CUDA up to 12.8",
        "GPU": "NVIDIA H200, 140.4 GiB",
        "memory of GPU 0": "1 MiB of 140.4 GiB in use",
        "links": "one GPU needs none",
    }


def test_processes_that_hold_memory_are_named_and_none_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert str(sys.executable)[:40] in finding.found, "cut where it is long"
    assert "a process that cannot be seen from here (process 999999991, memory not told)" in finding.found
    assert finding.found.endswith("and keeps the GPU 97 % busy")
    assert finding.next_step == f"ps -fp {child.pid},999999991 shows whose they are; doctor ends none"


def test_a_training_of_ours_is_not_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert named(judge(facts)) == []
    assert any("a training of this launcher" in finding.found for finding in judge(facts))


def test_memory_that_nobody_visible_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, more="0, 00000000:4F:00.0, 70000, 0, 40, 16, 16, 0\n")))
    assert "no process that can be seen from here holds it" in finding.found
    assert finding.next_step == "look on the host, outside the container"


def test_a_desktop_on_the_card_is_a_note() -> None:
    state = CardState(index=0, used_mib=900, holders=(Holder(pid=7, name="Xorg", memory_mib=300),))
    facts = replace(_h200(), states=(state,))
    finding = only(judge(facts))
    assert (finding.status, finding.matters) == ("note", "a plan counts only on what is free")
    assert "Xorg (process 7, 0.3 GiB)" in finding.found


def _h200() -> CardFacts:
    from launcher.gpus import find_gpu
    from launcher.probe import parse_nvidia_smi

    return CardFacts(
        driver="570.133.20",
        cuda="12.8",
        num_on_machine=1,
        readings=parse_nvidia_smi(nvidia.H200),
        gpu=find_gpu("h200"),
        states=(CardState(index=0, used_mib=1),),
    )


def test_what_slows_a_card_down_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, slowed="0, Active, Active\n")))
    assert (finding.status, finding.subject) == ("problem", "GPU 0")
    assert finding.found == "slowed down by the hardware right now, because of heat and power"


def test_a_newer_drivers_names_are_asked_for_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = nvidia.SLOWED.replace("throttle", "event")
    monkeypatch.setattr(nvidia, "SLOWED", newer)
    assert probe(tmp_path, monkeypatch, slowed="0, Active, Not Active\n").states[0].slowed_by == ("heat",)


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ("0, 00000000:4F:00.0, 1, 0, 91, 16, 16, 0\n", "note", "91 °C"),
        ("0, 00000000:4F:00.0, 1, 0, 31, 16, 16, 12\n", "problem", "12 errors of its memory"),
        ("0, 00000000:4F:00.0, 1, 0, 31, 4, 16, 0\n", "note", "4 of 16 PCIe lanes"),
        ("0, 00000000:4F:00.0, [N/A], 0, 31, 16, 16, 0\n", "note", "could not look: the driver does not tell"),
    ],
)
def test_the_health_of_a_card(
    more: str, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, more=more)))
    assert finding.status == status
    assert words in finding.found


def test_what_the_driver_does_not_tell_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = "0, 00000000:4F:00.0, 1, [N/A], [Unknown Error], [N/A], [N/A], [Insufficient Permissions]\n"
    facts = probe(tmp_path, monkeypatch, more=more, slowed="0, [N/A], [N/A]\n", head="")
    assert named(judge(facts)) == []
    assert facts.cuda is None
    assert facts.states == (CardState(index=0, used_mib=1),)


def test_only_the_main_question_must_be_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = probe(tmp_path, monkeypatch, more="", slowed="", processes="", head="")
    assert [finding.subject for finding in judge(facts)] == ["driver", "GPU", "links"]


@given(st.text(), st.text(), st.text())
def test_any_answer_is_read(more: str, slowed: str, processes: str) -> None:
    assert isinstance(parse_states(more, slowed, processes), tuple)
    assert isinstance(parse_processes(processes), dict)
    assert isinstance(parse_matrix(more, range(8)), tuple)


def test_rows_of_another_form_are_passed_over() -> None:
    assert parse_states("0, a, b\nx, 00000000:4F:00.0, 1, 0, 31, 16, 16, 0\n\n", "0\n", "Process ID : 4\n") == ()


def test_slots_are_matched_whatever_the_length_of_their_domain() -> None:
    found = parse_processes(nvidia.SOMEBODY.format(pid=4).replace("00000000:4F", "0000:4f"))
    (state,) = parse_states(nvidia.H200_MORE, "", nvidia.SOMEBODY.format(pid=4).replace("00000000:4F", "0000:4f"))
    assert [holder.memory_mib for holder in state.holders] == [40960, None]
    assert len(found) == 1


def test_no_gpu_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = only(judge(probe_cards(tmp_path)))
    assert (finding.status, finding.found) == ("note", "none (nvidia-smi is not installed)")
    assert finding.next_step == "launcher plan EXPERT --gpu rtx4090"


def test_a_driver_that_does_not_match_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"
    install_program(tmp_path / "bin", "nvidia-smi", body, monkeypatch)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    finding = only(judge(probe_cards(tmp_path)))
    assert finding.status == "problem"
    assert finding.found.endswith("Failed to initialize NVML: Driver/library version mismatch")
    assert "reboot" in finding.next_step


def test_an_nvidia_smi_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_program(tmp_path / "bin", "nvidia-smi", "exec sleep 60", monkeypatch)
    monkeypatch.setattr("launcher.doctor.cards._SECONDS", 0.3)
    assert "did not answer within 0.3 s" in only(judge(probe_cards(tmp_path))).found


def test_hidden_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.install_nvidia_smi(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = only(judge(probe_cards(tmp_path)))
    assert (finding.status, finding.next_step) == ("note", "unset CUDA_VISIBLE_DEVICES")


def test_a_card_that_the_catalogue_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, main=nvidia.H200.replace("NVIDIA H200", "NVIDIA X9000"))))
    assert (finding.status, finding.found) == ("note", "NVIDIA X9000, 140.4 GiB: not in the catalogue")


def test_slices_of_a_gpu_cannot_be_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = only(judge(probe(tmp_path, monkeypatch, main=nvidia.H200.replace("Disabled", "Enabled"))))
    assert finding.status == "problem"
    assert "is cut into MIG slices" in finding.found
    assert "--gpu rtx4090" in finding.next_step


def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, peer: str, name: str = "") -> list[Finding]:
    main = nvidia.PAIR.replace("NVIDIA H100 80GB HBM3, 81559, 81000, 9.0", name) if name else nvidia.PAIR
    topology, peers = nvidia.TOPOLOGY.format(link=link), nvidia.PEERS.format(peer=peer)
    return judge(probe(tmp_path, monkeypatch, main=main, more=nvidia.PAIR_MORE, topology=topology, peers=peers))


def test_two_gpus_that_reach_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = pair(tmp_path, monkeypatch, "NV18", "OK")
    assert named(findings) == []
    assert findings[-1].found == "1 x NV18, direct access (P2P) between all pairs"


def test_links_that_are_not_what_the_plan_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = only(pair(tmp_path, monkeypatch, "NV18", "CNS"))
    assert (broken.subject, broken.status) == ("links", "problem")
    assert "no direct access (P2P): 1 pairs the chipset does not support it" in broken.found
    assert "NCCL_P2P_DISABLE=1" in broken.next_step
    slow = only(pair(tmp_path, monkeypatch, "SYS", "OK"))
    assert slow.found == "1 x SYS: not all pairs have NVLink"


def test_only_links_between_gpus_that_may_be_used_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = nvidia.TOPOLOGY.format(link="SYS")
    assert parse_matrix(topology, {0, 1}) == ("SYS",)
    assert parse_matrix(topology, {1}) == ()
    nvidia.install_nvidia_smi(
        tmp_path, monkeypatch, main=nvidia.PAIR, more=nvidia.PAIR_MORE, topology=topology, peers=topology
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    findings = judge(probe_cards(tmp_path))
    assert named(findings) == []
    assert "1 more are hidden by CUDA_VISIBLE_DEVICES" in next(one.found for one in findings if one.subject == "GPU")


def test_secrets_of_other_processes_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["x", "--api-key", "verysecret1", "--password=verysecret2", "hf_" + "a" * 30]
    child = subprocess.Popen(["sh", "-c", "sleep 60; true", *words])
    try:
        facts = probe(tmp_path, monkeypatch, processes=nvidia.ONE.format(pid=child.pid))
    finally:
        child.kill()
        child.wait()
    told = str(facts.states)
    assert "--api-key *** --password=*** ***" in told
    assert "verysecret" not in told


def test_consumer_cards_have_no_p2p_and_plans_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = "NVIDIA GeForce RTX 4090, 24564, 24000, 8.9"
    findings = pair(tmp_path, monkeypatch, "PHB", "CNS", name=card)
    assert named(findings) == []
    assert "as the catalogue has it" in findings[-1].found


def test_wsl_may_spill() -> None:
    finding = only(judge(_h200(), is_wsl=True))
    assert (finding.subject, finding.status) == ("spill", "note")
    assert "Sysmem Fallback Policy" in finding.next_step
