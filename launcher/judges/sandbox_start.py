"""Script that sandboxes its own process and then executes a command in it, which runs a judge's untrusted code.

Usage: `python -I -S sandbox_start.py MEMORY_MIB (namespaces|here) COMMAND...`.

It runs between fork and exec as a program of its own, because the launcher has threads. It imports nothing of this
package. Every mechanism that the kernel lacks is skipped; `launcher.judges.sandbox` probes what is left.

- A user namespace: no capabilities, no access to the memory or environment of other processes.
- A network namespace without interfaces, and a namespace for System V IPC.
- Landlock: no path can be written, and no process outside can be signalled, traced or read.
- seccomp: no sockets, no signals to others, no new processes, no files opened for writing, no io_uring, no ptrace.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000
_CLONE_THREAD = 0x00010000
CPU_SECONDS = 3600  # of a whole process: one that was left alone ends by itself
_OPEN_FILES = 512
_OPEN_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # type into a terminal
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT, _CAPSET = 444, 446, {"x86_64": 126, "aarch64": 91}
# Rights by version of Landlock. None is granted, so that all of them are lost: to write, remove and make files; (2) to
# link and rename; (3) to truncate; (4) TCP; (6) abstract sockets and signals.
_LANDLOCK_FILES = {1: 0x1FF2, 2: 0x3FF2, 3: 0x7FF2}

# Number of each system call that is refused, on x86_64 and on aarch64; None: it does not exist there.
_REFUSED = {
    "socket": (41, 198),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    "fork": (57, None), "vfork": (58, None), "setsid": (112, 157), "setpgid": (109, 154),
    "creat": (85, None), "truncate": (76, 45), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "mknod": (133, None), "mknodat": (259, 33), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88), "futimesat": (261, None),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "open_by_handle_at": (304, 265),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142),
    "swapon": (167, 224), "fanotify_init": (300, 262), "quotactl": (179, 60), "acct": (163, 89), "syslog": (103, 116),
}  # fmt: skip
# The filter cannot see the arguments of these, or they pass by it: they seem not to exist, and callers use others.
_ABSENT = {"clone3": (435, 435), "openat2": (437, 437), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426)}
# Allowed for the process itself.
_OWN_PROCESS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
_PRLIMIT, _CLONE, _IOCTL, _OPEN, _OPENAT = (302, 261), (56, 220), (16, 29), (2, None), (257, 56)
_AUDIT_ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables above

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # BPF instructions
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS


def make_filter(machine: str, pid: int) -> bytes | None:
    """Return the seccomp filter for the process `pid` on a CPU architecture; None for an unsupported architecture.

    It compares the lower 32 bits of system-call arguments: the kernel reads no more of process ids and flags.
    """
    if machine not in _AUDIT_ARCH or sys.maxsize < 2**32:
        return None
    column, arch = _AUDIT_ARCH[machine]
    code: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL)]
    code += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]  # the x32 ABI of x86_64

    def on(number: int | None, then: Iterable[tuple[int, int, int, int]]) -> None:
        block = list(then)
        if number is not None:
            code.extend([(_EQUAL, 0, len(block), number), *block])

    def load(argument: int) -> tuple[int, int, int, int]:
        return (_LOAD, 0, 0, 16 + 8 * argument)

    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)
    for numbers in _REFUSED.values():
        on(numbers[column], [refuse])
    for numbers in _ABSENT.values():
        on(numbers[column], [(_RETURN, 0, 0, _ENOSYS)])
    for numbers in _OWN_PROCESS.values():
        on(numbers[column], [load(0), (_EQUAL, 0, 1, pid), allow, refuse])
    on(_PRLIMIT[column], [load(0), (_EQUAL, 1, 0, 0), (_EQUAL, 0, 1, pid), allow, refuse])
    on(_CLONE[column], [load(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), allow, refuse])
    on(_IOCTL[column], [load(1), (_EQUAL, 1, 0, _TIOCSTI), (_EQUAL, 0, 1, _TIOCLINUX), refuse, allow])
    for numbers, flags in ((_OPEN, 1), (_OPENAT, 2)):
        on(numbers[column], [load(flags), (_ANY_BIT, 0, 1, _OPEN_TO_WRITE), refuse, allow])
    code.append(allow)
    return b"".join(struct.pack("HBBI", *one) for one in code)


def main(arguments: list[str]) -> None:
    """Confine this process and execute the command."""
    memory_mib, namespaces, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    os.closerange(3, 4096)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CPU, CPU_SECONDS)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    if sys.platform == "linux":
        machine = os.uname().machine
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if namespaces == "namespaces":
            _leave_namespaces(libc, machine)
        _use_landlock(libc)
        program = make_filter(machine, os.getpid())
        if program is not None:
            buffer = ctypes.create_string_buffer(program, len(program))
            filter_program = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
            libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_program, 0, 0)
    if int(memory_mib):
        _limit(resource.RLIMIT_DATA, int(memory_mib) * 2**20)
    os.execv(command[0], command)


def _limit(kind: int, value: int) -> None:
    with suppress(ValueError, OSError):  # the limit is lower already
        resource.setrlimit(kind, (value, value))


def _leave_namespaces(libc: ctypes.CDLL, machine: str) -> None:
    """Move this process to new user, network and IPC namespaces if permitted, and drop all capabilities."""
    for flags in (_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET | _CLONE_NEWIPC):
        if libc.unshare(flags) == 0:
            break
    if machine in _CAPSET:
        libc.syscall(_CAPSET[machine], struct.pack("Ii", 0x20080522, 0), bytes(24))


def _use_landlock(libc: ctypes.CDLL) -> None:
    version = libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    rights = struct.pack("QQQ", _LANDLOCK_FILES[min(version, 3)], 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = libc.syscall(_LANDLOCK_CREATE, rights, ctypes.c_size_t(size), 0)
    if rules >= 0:
        libc.syscall(_LANDLOCK_RESTRICT, rules, 0)
        os.close(rules)


if __name__ == "__main__":
    main(sys.argv[1:])
