"""The machine beside its GPUs: facts planted and judged; probes on files of a made-up machine, and on this one."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.corpus.disks import Storage
from launcher.doctor.asking import Answer, NoAnswerError, ask_program, in_time
from launcher.doctor.findings import Finding, could_not_look, make_report
from launcher.doctor.folders import Place, PlaceFacts, judge_places, list_places, measure_writing, probe_places
from launcher.doctor.host import HostFacts, Limits, judge_host, probe_host
from launcher.units import GIB, MIB
from tests.unit.doctor.made import named, only

WELL = HostFacts(
    cores=16,
    machine_cores=16,
    load=0.5,
    ram_bytes=100 * GIB,
    swap_bytes=0,
    swap_used_bytes=0,
    shm_bytes=64 * GIB,
    shm_free_bytes=64 * GIB,
    limits=Limits(open_files=65536, locked_bytes=8 * MIB, file_bytes=None, address_bytes=None),
    has_infiniband=False,
    is_wsl=False,
)


def test_a_machine_that_is_well() -> None:
    assert named(judge_host(WELL, 8)) == []
    assert named(judge_host(replace(WELL, cores=2, machine_cores=2), 0)) == []


def limits(**changes: int | None) -> HostFacts:
    return replace(WELL, limits=replace(WELL.limits, **changes))


def shared(num_bytes: int | None, free_bytes: int) -> HostFacts:
    return replace(WELL, shm_bytes=num_bytes, shm_free_bytes=free_bytes)


TINY = 64 * 1024
FEW_CORES = "3 cores of 16 (affinity or control group) for 2 GPUs"


@pytest.mark.parametrize(
    ("facts", "gpus", "subject", "found", "next_step"),
    [
        (shared(TINY, TINY), 0, "shared memory", "64 KiB of 64 KiB free; 64 MiB are needed", "--shm-size=8g"),
        (shared(64 * MIB, 64 * MIB), 4, "shared memory", "1.0 GiB are needed by 4 ranks", "--ipc=host"),
        (shared(64 * GIB, 3 * MIB), 1, "shared memory", "3 MiB of 64.0 GiB free", "ls -lS /dev/shm"),
        (shared(None, 0), 1, "shared memory", "there is no /dev/shm", "dataloader_num_workers=0"),
        (replace(WELL, cores=3), 2, "CPU cores", FEW_CORES, "at least 4 cores"),
        (replace(WELL, ram_bytes=GIB), 1, "CPU memory", "1.0 GiB can be had", "memory limit"),
        (limits(open_files=256), 1, "limits", "256 open files", "ulimit -n 65536"),
        (limits(file_bytes=GIB), 1, "limits", "files of at most 1.0 GiB", "ulimit -f unlimited"),
        (limits(address_bytes=8 * GIB), 1, "limits", "8.0 GiB of address space", "ulimit -v unlimited"),
        (replace(WELL, has_infiniband=True), 1, "limits", "8 MiB of locked memory", "ulimit -l unlimited"),
    ],
)
def test_faults_of_a_machine(facts: HostFacts, gpus: int, subject: str, found: str, next_step: str) -> None:
    finding = only(judge_host(facts, gpus))
    assert (finding.family, finding.subject, finding.status) == ("machine", subject, "problem")
    assert found in finding.found
    assert next_step in finding.next_step
    assert finding.matters


@pytest.mark.parametrize(
    "facts",
    [
        replace(WELL, load=40.0),
        replace(WELL, shm_free_bytes=5 * GIB),
        replace(WELL, swap_bytes=200 * GIB, swap_used_bytes=150 * GIB),
    ],
)
def test_what_is_only_worth_a_note(facts: HostFacts) -> None:
    assert only(judge_host(facts, 1)).status == "note"


def test_a_little_in_swap_is_no_trouble() -> None:
    """Beside much free memory it is what nobody has used for long; and a small swap is soon full."""
    for used in (3 * GIB, GIB // 2):
        assert named(judge_host(replace(WELL, swap_bytes=4 * GIB, swap_used_bytes=used), 1)) == []
    poor = replace(WELL, ram_bytes=3 * GIB, swap_bytes=4 * GIB, swap_used_bytes=GIB // 2)
    assert named(judge_host(poor, 1)) == []


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machines_files_are_read(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 2097152 kB\nSwapTotal: 4096 kB\nSwapFree: 1024 kB\n",
        "proc/loadavg": "3.25 2.0 1.0 2/345 678\n",
        "proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2\n",
        "sys/class/infiniband/mlx5_0": "",
    }
    facts = probe_host(write(tmp_path, files), shm=tmp_path / "none")
    assert (facts.ram_bytes, facts.swap_bytes, facts.swap_used_bytes) == (2 * GIB, 4 * MIB, 3 * MIB)
    assert (facts.load, facts.is_wsl, facts.has_infiniband, facts.shm_bytes) == (3.25, True, True, None)


def test_this_machine_is_looked_at() -> None:
    facts = probe_host()
    assert facts.limits.open_files == _soft_limit(resource.RLIMIT_NOFILE)
    assert facts.limits.address_bytes == _soft_limit(resource.RLIMIT_AS)
    assert facts.shm_bytes is None or facts.shm_bytes >= facts.shm_free_bytes
    assert {finding.subject for finding in judge_host(facts, 0)} >= {"CPU cores", "CPU memory", "shared memory"}


def _soft_limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return soft if soft != resource.RLIM_INFINITY else None


RUNS = Place(name="runs", folder=Path("runs"), is_written=True)
DATA = Place(name="prepared data", folder=Path("data"), is_written=True)
CACHE = Place(name="HF cache", folder=Path("cache"), is_written=False)
NVME = Storage(mount="/", filesystem="ext4", kind="nvme", free_bytes=500 * GIB)


def place(where: Place = RUNS, storage: Storage = NVME, **facts: object) -> PlaceFacts:
    given: dict[str, object] = {"write_mb_per_second": 900.0, **facts}
    return PlaceFacts(place=where, storage=storage, **given)  # type: ignore[arg-type]


def test_disks_that_are_well() -> None:
    findings = list(judge_places([place(), place(DATA), place(CACHE)]))
    assert named(findings) == []
    assert findings[0].found == "runs: 500.0 GiB free on / (nvme, ext4), writes 900 MB/s"


NFS = replace(NVME, mount="/mnt/nfs", filesystem="nfs4", kind="network")
SPINNING = replace(NVME, kind="hard disk")


@pytest.mark.parametrize(
    ("facts", "status", "found", "next_step"),
    [
        (place(storage=replace(NVME, free_bytes=0)), "problem", "the disk is full: 0 MiB free", "--runs-dir"),
        (place(DATA, replace(NVME, free_bytes=0)), "problem", "the disk is full", "launcher data --prune"),
        (place(storage=replace(NVME, free_bytes=5 * GIB)), "note", "5.0 GiB free", "--runs-dir"),
        (place(is_writable=False), "problem", "it cannot be written", "--runs-dir"),
        (place(CACHE, is_writable=False), "note", "it cannot be written", "HF_HOME"),
        (place(has_inodes=False), "problem", "no inodes left", "--runs-dir"),
        (place(write_mb_per_second=8.0), "problem", "slow: 500.0 GiB free", "--runs-dir"),
        (place(write_mb_per_second=60.0), "note", "writes 60 MB/s", "--runs-dir"),
        (place(CACHE, NFS), "note", "slow storage: 500.0 GiB free on /mnt/nfs (network, nfs4)", "HF_HOME"),
        (place(DATA, NFS), "note", "slow storage", "launcher data --move-to DIR"),
        (place(DATA, SPINNING, write_mb_per_second=140.0), "note", "(hard disk, ext4)", "launcher data --move-to DIR"),
        (
            PlaceFacts(place=RUNS, trouble="no answer within 3 s", is_dead=True),
            "problem",
            "runs: no answer within 3 s",
            "mount it again",
        ),
        (PlaceFacts(place=RUNS, trouble="Permission denied"), "note", "could not look: Permission denied", ""),
    ],
)
def test_faults_of_disks(facts: PlaceFacts, status: str, found: str, next_step: str) -> None:
    finding = only(judge_places([facts]))
    assert finding.status == status
    assert found in finding.found
    assert next_step in finding.next_step


def test_a_virtual_disk_that_says_it_spins_is_judged_by_its_speed() -> None:
    assert named(judge_places([place(DATA, SPINNING, write_mb_per_second=900.0)])) == []


def test_places_are_looked_at_and_nothing_is_left_behind(tmp_path: Path) -> None:
    places = [replace(one, folder=tmp_path / "not/yet" / one.name) for one in list_places(tmp_path)]
    found = probe_places(places)
    assert [facts.place.name for facts in found] == ["runs", "prepared data", "HF cache"]
    assert all(facts.storage is not None and facts.storage.free_bytes > 0 for facts in found)
    assert len({facts.write_mb_per_second for facts in found}) == 1, "one disk is measured once"
    assert list(tmp_path.iterdir()) == []
    assert measure_writing(tmp_path) > 0


def test_a_program_is_asked() -> None:
    assert ask_program(("sh", "-c", "echo yes"), 5) == Answer(text="yes\n")
    assert ask_program(("sh", "-c", "echo first; echo second; exit 3"), 5).trouble == "first"
    assert ask_program(("sh", "-c", "echo wrong >&2; exit 3"), 5).trouble == "wrong"
    assert ask_program(("sh", "-c", "exit 3"), 5).trouble == "sh ended with code 3"
    assert ask_program(("no-such-program",), 5).trouble == "no-such-program is not installed"
    began = time.monotonic()
    assert ask_program(("sleep", "60"), 0.2).trouble == "sleep did not answer within 0.2 s"
    assert time.monotonic() - began < 10


def test_what_takes_too_long_is_left_behind() -> None:
    def fail() -> None:
        raise PermissionError(13, "Permission denied")

    assert in_time(lambda: 7, 5) == 7
    with pytest.raises(PermissionError):
        in_time(fail, 5)
    with pytest.raises(NoAnswerError, match=r"no answer within 0\.1 s"):
        in_time(lambda: time.sleep(3), 0.1)


def test_a_disk_that_does_not_answer_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_arguments: object) -> Storage:
        time.sleep(3)
        return NVME

    monkeypatch.setattr("launcher.doctor.folders.probe_storage", hang)
    monkeypatch.setattr("launcher.doctor.folders._SECONDS", 0.1)
    finding = only(judge_places(probe_places([replace(RUNS, folder=tmp_path)])))
    assert (finding.status, finding.found) == ("problem", f"{tmp_path}: no answer within 0.1 s")


def finding(family: str, status: str) -> Finding:
    return Finding.model_validate({"family": family, "subject": "s", "status": status, "found": "f"})


def test_a_report_is_ordered_and_its_exit_code_says_whether_something_is_wrong() -> None:
    told = [finding("machine", "ok"), finding("machine", "problem"), finding("run", "note"), finding("machine", "note")]
    report = make_report(told)
    assert [(one.family, one.status) for one in report.findings] == [
        ("run", "note"),
        ("machine", "problem"),
        ("machine", "note"),
        ("machine", "ok"),
    ]
    assert (report.num_problems, report.num_notes, int(report.exit_code)) == (1, 2, 7)
    assert int(make_report([finding("run", "note"), could_not_look("GPU", "GPU", "why")]).exit_code) == 0
