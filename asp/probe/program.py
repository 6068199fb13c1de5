"""A program for the sandbox that makes the system calls it is sent, and sends back what the kernel said.

``sh`` alone cannot open a socket, and no tool may be asked for: an image without ``nc`` must not look safe. So a static ELF
file of some 400 bytes is written by ``printf``, run and removed. It maps 1 MiB at a fixed address, reads an image from stdin
to its start, makes the calls listed there one after another, and writes the first bytes of that memory to stdout.

The image: one word, how many bytes to write at the end; the calls; a word -1; data; space for what the kernel writes. A call
is eleven words of 8 bytes: number, six arguments, mask (bit 0 or 1: that argument is an address, take the int there), how many
bytes of calls to skip if the result is negative, where to store the result besides (an int; 0: nowhere), and the result.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

_BASE: Final = 0x10000000
_MEMORY: Final = 1 << 20
_CALL: Final = struct.Struct("<11q")
_RESULT_OFFSET: Final = 80
_NOT_MADE: Final = -(1 << 40)
_MAY_BE_INDIRECT: Final = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """One architecture: the ELF machine number, our code, and the numbers of the system calls."""

    name: str
    elf: int
    code: bytes
    numbers: dict[str, int]


_SAME_EVERYWHERE = {"io_uring_setup": 425, "pidfd_open": 434, "pidfd_getfd": 438}

# Each is the loop of the docstring above; assembled once, and run by the tests (aarch64 by an emulator, where there is one).
X86_64: Final = Machine(
    "x86_64", 62,
    bytes.fromhex(
        "b809000000bf00000010be00001000ba0300000041ba3200000049c7c0ffffffff4531c90f05"  # mmap
        "41bc000000104489e3"  # r12: the memory; rbx: where to read to
        "31c031ff4889deba0000101029da0f054885c07e054801c3ebe6"  # read(0) to the end
        "4d8d742408"  # r14: the first call
        "498b064885c0784e418b6e38498b7e0840f6c501740348633f498b761040f6c5027403486336"  # number < 0: end; two arguments
        "498b56184d8b56204d8b46284d8b4e300f0549894650"  # four more; the call; its result
        "498b4e484885c9740289014885c079044d0376404983c658ebaa"  # store, skip, next
        "4c89e3498b2c24b801000000bf010000004889de4889ea0f054885c07e084801c34829c575e1"  # write(1) all
        "b83c00000031ff0f05",  # exit(0)
    ),
    _SAME_EVERYWHERE | {
        "read": 0, "close": 3, "getpid": 39, "socket": 41, "connect": 42, "sendto": 44, "recvfrom": 45, "bind": 49,
        "listen": 50, "getsockname": 51, "getpeername": 52,
        "getsockopt": 55, "openat": 257, "unlinkat": 263, "ppoll": 271, "unshare": 272,
        "accept4": 288, "setns": 308,
    },
)  # fmt: skip
AARCH64: Final = Machine(
    "aarch64", 183,
    bytes.fromhex(
        "c81b80d20000a2d20102a0d2620080d2430680d204008092050080d2010000d4"  # the same pieces
        "1300a2d2f40313aa150282d2b5be70d3"
        "e80780d2000080d2e10314aaa20214cb010000d41f0000f16d0000549402008bf8ffff17"
        "76220091"
        "c80240f9c802f8b7d71e40f9c00640f957000036000080b9c10a40f957000836210080b9"
        "c20e40f9c31240f9c41640f9c51a40f9010000d4c02a00f9"
        "c92640f9490000b4200100b96000f8b6c92240f9d602098bd6620191eaffff17"
        "f40313aa780240f9080880d2200080d2e10314aae20318aa010000d41f0000f18d0000549402008b180300ebe1feff54"
        "a80b80d2000080d2010000d4",
    ),
    _SAME_EVERYWHERE | {
        "unlinkat": 35, "openat": 56, "close": 57, "read": 63, "ppoll": 73, "unshare": 97, "getpid": 172, "socket": 198,
        "bind": 200, "listen": 201, "connect": 203, "getsockname": 204, "getpeername": 205,
        "sendto": 206, "recvfrom": 207, "getsockopt": 209,
        "accept4": 242, "setns": 268,
    },
)  # fmt: skip
MACHINES: Final = (X86_64, AARCH64)


def elf(machine: Machine) -> bytes:
    """Return the program as a file: one ELF header, one segment that is read and executed, the code."""
    address, headers = 0x400000, 64 + 56
    size = headers + len(machine.code)
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 2, machine.elf, 1, address + headers, 64, 0, 0, 64, 56, 1, 64, 0, 0,
    )  # fmt: skip
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, address, address, size, size, 0x10000)
    return header + segment + machine.code


@dataclass(frozen=True, slots=True)
class Cell:
    """A place in the program's memory: ``at`` counts from the start of the data."""

    at: int
    size: int


@dataclass(frozen=True, slots=True)
class Returned:
    """What an earlier call returned, as an argument: a descriptor, mostly. Only as one of the first two arguments."""

    call: int


Argument: TypeAlias = int | Cell | Returned


@dataclass(slots=True)
class _Call:
    number: int
    arguments: tuple[Argument, ...]
    store: Cell | None
    skip: int = 0


class Program:
    """A list of system calls to be made in the sandbox, for one architecture."""

    def __init__(self, machine: Machine) -> None:
        """Begin with no calls."""
        self.machine = machine
        self._calls: list[_Call] = []
        self._data = bytearray()

    def data(self, content: bytes) -> Cell:
        """Put bytes into the memory; the kernel may overwrite them."""
        cell = Cell(len(self._data), len(content))
        self._data += content + bytes(-len(content) % 8)
        return cell

    def space(self, size: int) -> Cell:
        """Return ``size`` zero bytes."""
        return self.data(bytes(size))

    def part(self, cell: Cell, offset: int) -> Cell:
        """Return the rest of a cell from ``offset``."""
        return Cell(cell.at + offset, cell.size - offset)

    def call(self, name: str, *arguments: Argument, store: Cell | None = None) -> int:
        """Add a call; return its index. ``store``: put the result there too, as an int."""
        if any(isinstance(argument, Returned) for argument in arguments[_MAY_BE_INDIRECT:]):
            raise ValueError(name)
        self._calls.append(_Call(self.machine.numbers[name], arguments, store))
        return len(self._calls) - 1

    @contextmanager
    def only_after(self, call: int) -> Iterator[None]:
        """What is added inside is made only if the last call before it, ``call``, did not fail."""
        if call != len(self._calls) - 1:
            raise ValueError(call)
        yield
        self._calls[call].skip = len(self._calls) - 1 - call

    def image(self) -> bytes:
        """Return what the program reads. Raises ValueError if it does not fit."""
        start = 8 + len(self._calls) * _CALL.size + 8
        size = start + len(self._data)
        if size > _MEMORY // 2:
            raise ValueError(size)
        image = bytearray(struct.pack("<q", size))
        for call in self._calls:
            words = [0] * 6
            mask = 0
            for index, argument in enumerate(call.arguments):
                match argument:
                    case Cell(at=at):
                        words[index] = _BASE + start + at
                    case Returned(call=earlier):
                        words[index] = _BASE + 8 + earlier * _CALL.size + _RESULT_OFFSET
                        mask |= 1 << index
                    case _:
                        words[index] = argument
            store = 0 if call.store is None else _BASE + start + call.store.at
            image += _CALL.pack(call.number, *words, mask, call.skip * _CALL.size, store, _NOT_MADE)
        return bytes(image + struct.pack("<q", -1) + self._data).rstrip(b"\0")  # the memory is zero to begin with

    def answer(self, output: bytes) -> "Answer | None":
        """Return what the program wrote, or None if that is not from our program."""
        start = 8 + len(self._calls) * _CALL.size + 8
        size = start + len(self._data)
        if len(output) != size or output[:8] != struct.pack("<q", size):
            return None
        results = [_CALL.unpack_from(output, 8 + index * _CALL.size)[10] for index in range(len(self._calls))]
        return Answer(results, output[start:])


class Answer:
    """What the kernel said to each call, and the memory afterwards."""

    def __init__(self, results: list[int], memory: bytes) -> None:
        """Take the results in the order of the calls."""
        self._results = results
        self._memory = memory

    def result(self, call: int) -> int | None:
        """Return what a call returned (negative: minus the error number), or None if it was not made."""
        result = self._results[call]
        return None if result == _NOT_MADE else result

    def ok(self, call: int) -> bool:
        """Whether a call was made and did not fail."""
        return self._results[call] >= 0

    def memory(self, cell: Cell) -> bytes:
        """Return what a cell holds."""
        return self._memory[cell.at : cell.at + cell.size]

    def read_into(self, cell: Cell, call: int) -> bytes:
        """Return what a read or recvfrom put into a cell."""
        return self.memory(cell)[: max(0, self._results[call])]

    def integer(self, cell: Cell) -> int:
        """Return a cell as an int."""
        return int.from_bytes(self.memory(cell)[:4], "little", signed=True)


def script(machine: Machine) -> bytes:
    """Return the lines for sh that write the program to the first folder that may hold and run one, run it and remove it.

    Needs printf (in the shell, but for a few) and chmod (a tool, or a busybox that is the shell itself). Ends with the
    program's status; 125 if there is no such folder, 126 if no file of this architecture runs.
    """
    octal = "".join(f"\\{byte:03o}" for byte in elf(machine))
    return (
        "set -C; umask 077; s=125\n"
        'for d in /tmp /var/tmp /dev/shm /run "$HOME" "$PWD"; do\n'
        '[ -d "$d" ] && [ -w "$d" ] || continue\n'
        "f=$d/.probe-$$\n"
        f"(printf '{octal}' >\"$f\") 2>/dev/null || continue\n"
        '{ chmod 700 "$f" || busybox chmod 700 "$f" || (exec -a busybox "/proc/$$/exe" chmod 700 "$f"); } 2>/dev/null\n'
        '(cd "$d" && exec "$f") 2>/dev/null; s=$?\n'
        '{ rm -f "$f" || busybox rm -f "$f" || (exec -a busybox "/proc/$$/exe" rm -f "$f"); } 2>/dev/null\n'
        'case $s in 126|127) s=126;; *) exit "$s";; esac\n'
        "done\n"
        'exit "$s"\n'
    ).encode()
