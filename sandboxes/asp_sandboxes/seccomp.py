"""The system calls that a local sandbox may not make: a seccomp filter as raw BPF, for ``bwrap --seccomp FD`` (S3).

bubblewrap sets no filter of its own [ran: ``Seccomp: 0``]. A network namespace does not hold what is not in one: AF_VSOCK
sockets reach the hypervisor, io_uring makes sockets without ``socket(2)``, kernel keyrings are per user, not per sandbox.
The rest takes away attack surface that an unprivileged build or test has no use for.

A refused call fails with EPERM, so a program can carry on without it; two exceptions: ``clone3`` fails with ENOSYS (its
flags lie behind a pointer that a filter cannot read; libc then falls back to ``clone``, whose flags are checked), and a
socket of another family fails with EAFNOSUPPORT, as on a kernel without it. A call in a foreign architecture (32-bit on
x86-64) kills the process: its numbers mean other calls. ptrace stays: debuggers are tools of the trade, and it reaches
only the sandbox's own processes.
"""

import errno
import struct
from dataclasses import dataclass

from asp.errors import UsageError

# <linux/bpf_common.h>, <linux/seccomp.h>, <linux/audit.h>
_LOAD_WORD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_GREATER_OR_EQUAL = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_ALLOW = 0x7FFF0000
_X32_BIT = 0x40000000

# struct seccomp_data: int nr; __u32 arch; __u64 instruction_pointer; __u64 args[6]. Both architectures are little-endian.
_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
_FIRST_ARGUMENT_OFFSET = 16

ALLOWED_SOCKET_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. The last three see only the sandbox's own, empty network namespace."""

NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. (CLONE_NEWTIME exists for unshare and clone3 only.)"""

REFUSED_IOCTLS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: they type into the terminal that one is connected to."""


@dataclass(frozen=True)
class Architecture:
    """The numbers of one architecture (``audit``: AUDIT_ARCH_*). ``x32``: has a second ABI behind bit 30."""

    audit: int
    x32: bool
    socket: int
    socketpair: int
    clone: int
    clone3: int
    ioctl: int
    refused: tuple[int, ...]


# Numbers from <asm/unistd_64.h> and <asm-generic/unistd.h>; from 424 on they are the same on both.
_REFUSED_EVERYWHERE = (
    425, 426, 427,  # io_uring_setup, io_uring_enter, io_uring_register
    428, 429, 430, 431, 432, 433,  # open_tree, move_mount, fsopen, fsconfig, fsmount, fspick
    442, 467,  # mount_setattr, open_tree_attr
)  # fmt: skip

ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E, x32=True, socket=41, socketpair=53, clone=56, clone3=435, ioctl=16,
        refused=(
            *_REFUSED_EVERYWHERE,
            248, 249, 250,  # add_key, request_key, keyctl
            321, 298, 323,  # bpf, perf_event_open, userfaultfd
            165, 166, 155, 161,  # mount, umount2, pivot_root, chroot
            272, 308,  # unshare, setns
            304, 103, 163,  # open_by_handle_at, syslog (the kernel's log), acct
            246, 320, 175, 313, 176,  # kexec_load, kexec_file_load, init_module, finit_module, delete_module
            167, 168, 169, 172, 173,  # swapon, swapoff, reboot, iopl, ioperm
            179, 443, 180, 212,  # quotactl, quotactl_fd, nfsservctl, lookup_dcookie
        ),
    ),
    "aarch64": Architecture(
        audit=0xC00000B7, x32=False, socket=198, socketpair=199, clone=220, clone3=435, ioctl=29,
        refused=(
            *_REFUSED_EVERYWHERE,
            217, 218, 219,  # add_key, request_key, keyctl
            280, 241, 282,  # bpf, perf_event_open, userfaultfd
            40, 39, 41, 51,  # mount, umount2, pivot_root, chroot
            97, 268,  # unshare, setns
            265, 116, 89,  # open_by_handle_at, syslog, acct
            104, 294, 105, 273, 106,  # kexec_load, kexec_file_load, init_module, finit_module, delete_module
            224, 225, 142,  # swapon, swapoff, reboot
            60, 443, 42, 18,  # quotactl, quotactl_fd, nfsservctl, lookup_dcookie
        ),
    ),
}  # fmt: skip


def _instruction(code: int, operand: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, operand)


def _refuse(number: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | number)


def _argument(index: int) -> bytes:
    """Load the low half of an argument: socket family, ioctl request and clone flags are 32 bits wide in the kernel too."""
    return _instruction(_LOAD_WORD, _FIRST_ARGUMENT_OFFSET + 8 * index)


def sandbox_filter(machine: str) -> bytes:
    """Return the filter for ``machine`` (``os.uname().machine``) as an array of ``struct sock_filter``.

    Raises UsageError if there is no table for that machine: a sandbox without a filter is not started.
    """
    try:
        architecture = ARCHITECTURES[machine]
    except KeyError:
        msg = f"local sandboxes know the system calls of {' and '.join(ARCHITECTURES)}, not of {machine}"
        raise UsageError(msg) from None
    allow = _instruction(_RETURN, _ALLOW)
    rules = [
        _instruction(_LOAD_WORD, _ARCHITECTURE_OFFSET),
        _instruction(_JUMP_EQUAL, architecture.audit, if_true=1),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD_WORD, _NUMBER_OFFSET),
    ]
    if architecture.x32:
        rules += [_instruction(_JUMP_GREATER_OR_EQUAL, _X32_BIT, if_false=1), _refuse(errno.ENOSYS)]
    for number in architecture.refused:
        rules += [_instruction(_JUMP_EQUAL, number, if_false=1), _refuse(errno.EPERM)]
    rules += [_instruction(_JUMP_EQUAL, architecture.clone3, if_false=1), _refuse(errno.ENOSYS)]

    # From here on each block is skipped as a whole by every other call; inside it the number is not needed any more.
    families = [_argument(0)]
    for family in ALLOWED_SOCKET_FAMILIES:
        families += [_instruction(_JUMP_EQUAL, family, if_false=1), allow]
    families.append(_refuse(errno.EAFNOSUPPORT))
    for number in (architecture.socket, architecture.socketpair):
        rules += [_instruction(_JUMP_EQUAL, number, if_false=len(families)), *families]
    flags = [_argument(0), _instruction(_JUMP_ANY_BIT, NAMESPACE_FLAGS, if_false=1), _refuse(errno.EPERM), allow]
    rules += [_instruction(_JUMP_EQUAL, architecture.clone, if_false=len(flags)), *flags]
    requests = [_argument(1)]
    for request in REFUSED_IOCTLS:
        requests += [_instruction(_JUMP_EQUAL, request, if_false=1), _refuse(errno.EPERM)]
    requests.append(allow)
    rules += [_instruction(_JUMP_EQUAL, architecture.ioctl, if_false=len(requests)), *requests]
    rules.append(allow)
    return b"".join(rules)
