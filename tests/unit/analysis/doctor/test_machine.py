"""Checks of the host and its disks, on given facts, a simulated machine and this one."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launcher.analysis.doctor.disk_checks import (
    DiskFacts,
    check_disks,
    list_folders,
    measure_write_speed,
    probe_disks,
)
from launcher.analysis.doctor.findings import Finding, make_report, make_skipped
from launcher.analysis.doctor.host import HostFacts, check_host, check_judges, probe_host
from launcher.core.units import GIB, MIB
from launcher.core.worker import call_with_timeout
from launcher.corpus.storage_kind import Storage
from tests.unit.analysis.doctor.builders import list_issues, only

HEALTHY = HostFacts(
    cores=16,
    machine_cores=16,
    load=0.5,
    ram_bytes=100 * GIB,
    swap_bytes=0,
    swap_used_bytes=0,
    shm_bytes=64 * GIB,
    shm_free_bytes=64 * GIB,
    open_files=65536,
    locked_bytes=8 * MIB,
    file_bytes=None,
    address_bytes=None,
    has_infiniband=False,
    is_wsl=False,
)


def test_healthy_machine_has_no_findings() -> None:
    assert list_issues(check_host(HEALTHY, 8)) == []
    assert list_issues(check_host(replace(HEALTHY, cores=2, machine_cores=2), 0)) == []


def with_shm(num_bytes: int | None, free_bytes: int) -> HostFacts:
    return replace(HEALTHY, shm_bytes=num_bytes, shm_free_bytes=free_bytes)


TINY = 64 * 1024
FEW_CORES = "3 cores of 16 (affinity or control group) for 2 GPUs"


@pytest.mark.parametrize(
    ("facts", "gpus", "subject", "found", "next_step"),
    [
        (with_shm(TINY, TINY), 0, "shared memory", "64 KiB of 64 KiB free; 64 MiB are needed", "--shm-size=8g"),
        (with_shm(64 * MIB, 64 * MIB), 4, "shared memory", "1.0 GiB are needed by 4 ranks", "--ipc=host"),
        (with_shm(64 * GIB, 3 * MIB), 1, "shared memory", "3 MiB of 64.0 GiB free", "ls -lS /dev/shm"),
        (with_shm(None, 0), 1, "shared memory", "there is no /dev/shm", "dataloader_num_workers=0"),
        (replace(HEALTHY, cores=3), 2, "CPU cores", FEW_CORES, "at least 4 cores"),
        (replace(HEALTHY, ram_bytes=GIB), 1, "CPU memory", "1.0 GiB available", "memory limit"),
        (replace(HEALTHY, open_files=256), 1, "limits", "256 open files", "ulimit -n 65536"),
        (replace(HEALTHY, file_bytes=GIB), 1, "limits", "files of at most 1.0 GiB", "ulimit -f unlimited"),
        (replace(HEALTHY, address_bytes=8 * GIB), 1, "limits", "8.0 GiB of address space", "ulimit -v unlimited"),
        (replace(HEALTHY, has_infiniband=True), 1, "limits", "8 MiB of locked memory", "ulimit -l unlimited"),
    ],
)
def test_host_fault_is_a_problem(facts: HostFacts, gpus: int, subject: str, found: str, next_step: str) -> None:
    finding = only(check_host(facts, gpus))
    assert (finding.family, finding.subject, finding.status) == ("machine", subject, "problem")
    assert found in finding.found
    assert next_step in finding.next_step
    assert finding.matters


@pytest.mark.parametrize(
    "facts",
    [
        replace(HEALTHY, load=40.0),
        replace(HEALTHY, shm_free_bytes=5 * GIB),
        replace(HEALTHY, swap_bytes=200 * GIB, swap_used_bytes=150 * GIB),
    ],
)
def test_minor_host_fault_is_a_note(facts: HostFacts) -> None:
    assert only(check_host(facts, 1)).status == "note"


def test_used_swap_is_fine_when_small() -> None:
    """With much free memory, swapped pages are long unused; and a small swap fills quickly."""
    for used in (3 * GIB, GIB // 2):
        assert list_issues(check_host(replace(HEALTHY, swap_bytes=4 * GIB, swap_used_bytes=used), 1)) == []
    poor = replace(HEALTHY, ram_bytes=3 * GIB, swap_bytes=4 * GIB, swap_used_bytes=GIB // 2)
    assert list_issues(check_host(poor, 1)) == []


def test_host_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * GIB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=4 * MIB, used=3 * MIB))
    monkeypatch.setattr(psutil, "getloadavg", lambda: (3.25, 2.0, 1.0))
    monkeypatch.setattr("platform.release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    facts = probe_host(tmp_path, shm=tmp_path / "none")
    assert (facts.ram_bytes, facts.swap_bytes, facts.swap_used_bytes) == (2 * GIB, 4 * MIB, 3 * MIB)
    assert (facts.load, facts.is_wsl, facts.has_infiniband, facts.shm_bytes) == (3.25, True, True, None)


def test_real_host_can_be_probed() -> None:
    facts = probe_host()
    assert facts.open_files == _soft_limit(resource.RLIMIT_NOFILE)
    assert facts.address_bytes == _soft_limit(resource.RLIMIT_AS)
    assert facts.shm_bytes is None or facts.shm_bytes >= facts.shm_free_bytes
    assert {finding.subject for finding in check_host(facts, 0)} >= {"CPU cores", "CPU memory", "shared memory"}


def _soft_limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return soft if soft != resource.RLIM_INFINITY else None


RUNS, DATA, CACHE = "runs", "prepared data", "HF cache"
NVME = Storage(mount="/", filesystem="ext4", kind="nvme", free_bytes=500 * GIB)


def make_disk(name: str = RUNS, storage: Storage = NVME, **facts: object) -> DiskFacts:
    values: dict[str, object] = {"write_mb_per_second": 900.0, **facts}
    return DiskFacts(name=name, folder=Path(name), storage=storage, **values)  # type: ignore[arg-type]


def test_healthy_disks_have_no_issues() -> None:
    findings = list(check_disks([make_disk(), make_disk(DATA), make_disk(CACHE)]))
    assert list_issues(findings) == []
    assert findings[0].found == "runs: 500.0 GiB free on / (nvme, ext4), writes 900 MB/s"


NFS = replace(NVME, mount="/mnt/nfs", filesystem="nfs4", kind="network")
SPINNING = replace(NVME, kind="hard disk")


@pytest.mark.parametrize(
    ("facts", "status", "found", "next_step"),
    [
        (make_disk(storage=replace(NVME, free_bytes=0)), "problem", "the disk is full: 0 MiB free", "--runs-dir"),
        (make_disk(DATA, replace(NVME, free_bytes=0)), "problem", "the disk is full", "launcher data --prune"),
        (make_disk(storage=replace(NVME, free_bytes=5 * GIB)), "note", "5.0 GiB free", "--runs-dir"),
        (make_disk(is_writable=False), "problem", "it is not writable", "--runs-dir"),
        (make_disk(CACHE, is_writable=False), "note", "it is not writable", "HF_HOME"),
        (make_disk(has_inodes=False), "problem", "no inodes left", "--runs-dir"),
        (make_disk(write_mb_per_second=8.0), "problem", "slow: 500.0 GiB free", "--runs-dir"),
        (make_disk(write_mb_per_second=60.0), "note", "writes 60 MB/s", "--runs-dir"),
        (make_disk(CACHE, NFS), "note", "slow storage: 500.0 GiB free on /mnt/nfs (network, nfs4)", "HF_HOME"),
        (make_disk(DATA, NFS), "note", "slow storage", "launcher data --move-to DIR"),
        (
            make_disk(DATA, SPINNING, write_mb_per_second=140.0),
            "note",
            "(hard disk, ext4)",
            "launcher data --move-to DIR",
        ),
        (
            DiskFacts(name=RUNS, folder=Path(RUNS), error="no answer within 3 s", is_dead=True),
            "problem",
            "runs: no answer within 3 s",
            "mount it again",
        ),
        (
            DiskFacts(name=RUNS, folder=Path(RUNS), error="Permission denied"),
            "note",
            "not checked: Permission denied",
            "",
        ),
    ],
)
def test_disk_fault_is_reported(facts: DiskFacts, status: str, found: str, next_step: str) -> None:
    finding = only(check_disks([facts]))
    assert finding.status == status
    assert found in finding.found
    assert next_step in finding.next_step


def test_fast_virtual_hard_disk_is_fine() -> None:
    assert list_issues(check_disks([make_disk(DATA, SPINNING, write_mb_per_second=900.0)])) == []


def test_disk_probe_leaves_no_files(tmp_path: Path) -> None:
    found = probe_disks({name: tmp_path / "not/yet" / name for name in list_folders(tmp_path)})
    assert [facts.name for facts in found] == ["runs", "prepared data", "HF cache"]
    assert all(facts.storage is not None and facts.storage.free_bytes > 0 for facts in found)
    assert len({facts.write_mb_per_second for facts in found}) == 1, "one disk is measured once"
    assert list(tmp_path.iterdir()) == []
    assert measure_write_speed(tmp_path) > 0


def test_a_file_where_a_folder_should_be_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    finding = only(check_disks(probe_disks({RUNS: tmp_path / "runs"}, measures_speed=False)))
    assert finding.status == "problem"
    assert "it is not writable" in finding.found


def test_call_that_takes_too_long_raises() -> None:
    def fail() -> None:
        raise PermissionError(13, "Permission denied")

    assert call_with_timeout(lambda: 7, 5) == 7
    with pytest.raises(PermissionError):
        call_with_timeout(fail, 5)
    with pytest.raises(TimeoutError, match=r"timed out after 0\.1 s"):
        call_with_timeout(lambda: time.sleep(3), 0.1)


def test_disk_that_does_not_respond_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_arguments: object) -> Storage:
        time.sleep(3)
        return NVME

    monkeypatch.setattr("launcher.analysis.doctor.disk_checks.probe_storage", hang)
    monkeypatch.setattr("launcher.analysis.doctor.disk_checks._SECONDS", 0.1)
    finding = only(check_disks(probe_disks({RUNS: tmp_path})))
    assert (finding.status, finding.found) == ("problem", f"{tmp_path}: timed out after 0.1 s")


def finding(family: str, status: str) -> Finding:
    return Finding.model_validate({"family": family, "subject": "s", "status": status, "found": "f"})


def test_report_is_ordered_and_exits_with_7_on_problems() -> None:
    findings = [
        finding("machine", "ok"),
        finding("machine", "problem"),
        finding("run", "note"),
        finding("machine", "note"),
    ]
    report = make_report(findings)
    assert [(one.family, one.status) for one in report.findings] == [
        ("run", "note"),
        ("machine", "problem"),
        ("machine", "note"),
        ("machine", "ok"),
    ]
    assert (report.num_problems, report.num_notes, int(report.exit_code)) == (1, 2, 7)
    assert int(make_report([finding("run", "note"), make_skipped("GPU", "GPU", "why")]).exit_code) == 0


def test_whether_judges_are_confined_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.analysis.doctor.host.describe_boundary", lambda: "it could create files")
    (finding,) = check_judges()
    assert (finding.status, finding.found) == ("note", "it could create files")
    monkeypatch.setattr("launcher.analysis.doctor.host.describe_boundary", lambda: "")
    assert next(check_judges()).status == "ok"
