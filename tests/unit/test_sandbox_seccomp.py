"""The system-call filter, decided by a small interpreter of BPF for both machines; test_sandbox_local asks the kernel's."""

import errno
import struct

import pytest

from asp.errors import UsageError
from asp_sandboxes.seccomp import ARCHITECTURES, sandbox_filter

ALLOW = 0x7FFF0000
KILL = 0x80000000
OTHER_AUDIT = 0x40000003  # AUDIT_ARCH_I386


def refuse(number: int) -> int:
    return 0x00050000 | number


def decide(program: bytes, number: int, arguments: tuple[int, ...] = (), audit: int = 0) -> int:
    data = struct.pack("<IIQ6Q", number, audit, 0, *(arguments + (0,) * 6)[:6])
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator = at = 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x06:
            return int(operand)
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[operation]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_each_rule(machine: str) -> None:
    architecture = ARCHITECTURES[machine]
    program = sandbox_filter(machine)
    assert len(program) // 8 < 4096  # BPF_MAXINSNS

    def decided(number: int, *arguments: int) -> int:
        return decide(program, number, arguments, architecture.audit)

    for number in architecture.refused:
        assert decided(number) == refuse(errno.EPERM)
    assert decided(architecture.clone3) == refuse(errno.ENOSYS)
    for family in range(64):
        expected = ALLOW if family in {1, 2, 10, 16} else refuse(errno.EAFNOSUPPORT)
        assert decided(architecture.socket, family, 1, 0) == expected
        assert decided(architecture.socketpair, family, 1, 0) == expected
    # The kernel takes an int: what is above its 32 bits must not hide what is in them.
    assert decided(architecture.socket, (7 << 32) | 40) == refuse(errno.EAFNOSUPPORT)
    assert decided(architecture.clone, 0x11) == ALLOW
    assert decided(architecture.clone, 0x003D0F00) == ALLOW  # what pthread_create asks for
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert decided(architecture.clone, 0x11 | 1 << bit) == refuse(errno.EPERM)
    assert decided(architecture.ioctl, 0, 0x5412) == refuse(errno.EPERM)
    assert decided(architecture.ioctl, 0, (1 << 32) | 0x541C) == refuse(errno.EPERM)
    assert decided(architecture.ioctl, 0, 0x5401) == ALLOW
    assert decide(program, 0, (), OTHER_AUDIT) == KILL
    special = {
        architecture.socket,
        architecture.socketpair,
        architecture.clone,
        architecture.clone3,
        architecture.ioctl,
    }
    for number in set(range(500)) - set(architecture.refused) - special:
        assert decided(number) == ALLOW


def test_the_second_abi_of_x86_is_refused() -> None:
    architecture = ARCHITECTURES["x86_64"]
    program = sandbox_filter("x86_64")
    assert decide(program, 0x40000000 | architecture.socket, (1,), architecture.audit) == refuse(errno.ENOSYS)


def test_no_filter_no_sandbox() -> None:
    with pytest.raises(UsageError, match="riscv64"):
        sandbox_filter("riscv64")
