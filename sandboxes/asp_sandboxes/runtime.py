"""Stage what runs the SSH server inside a local sandbox: an interpreter, the libraries, the server's one file.

A sandbox sees ``/usr`` of the host and nothing of a home directory, so what lies in a virtual environment is copied once
to our state directory and bound read-only at ``/run/rt``. A staged tree is named by the digest of what went into it, made
beside its place and renamed, so it is whole or absent.

No staged file holds a path of this machine: what build tools wrote into scripts and binaries is replaced by as many bytes
of a neutral path. (``/proc/self/mountinfo`` in the sandbox does show where a bind comes from; nothing can hide that.)
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import py_compile
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from asp.errors import AspError
from asp.state import state_dir

MOUNT = PurePosixPath("/run/rt")
"""Where a sandbox sees the staged tree."""

SERVER = MOUNT / "server.py"
LIBRARIES = MOUNT / "lib"
INTERPRETER_PREFIX = MOUNT / "python"

_LAYOUT = "4"
"""Changes with every change of this module that stages other bytes from the same sources."""

_PACKAGES = ("asyncssh", "cryptography", "typing_extensions", "_cffi_backend")
_DISTRIBUTIONS = ("asyncssh", "cryptography", "typing_extensions", "cffi")
_RECORD = "runtime.json"
_SYSTEM_PYTHON = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
_SHORTEST = 5
_LEFT_OUT_OF_THE_STANDARD_LIBRARY = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "turtledemo",
        "ensurepip",
        "lib2to3",
        "__pycache__",
    }
)
_PROBE_TIMEOUT_S = 60

# Imports all that the server imports; prints which Python files and which mapped binaries that took.
_PROBE = """\
import sys
sys.path.insert(0, sys.argv[1])
import asyncio, contextlib, ctypes, dataclasses, json, resource, select, signal, socket, subprocess
import asyncssh, asyncssh.stream
files = sorted({m.__file__ for m in list(sys.modules.values()) if (getattr(m, "__file__", None) or "").endswith(".py")})
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split(None, 5)[5].strip() for line in maps if line.count("/")})
print(json.dumps({"files": files, "mapped": mapped}))
"""


Replacements: TypeAlias = list[tuple[re.Pattern[bytes], bytes]]


class StagingFailed(AspError):
    """The runtime cannot be staged; nothing was left behind."""


@dataclass(frozen=True)
class Runtime:
    """A staged tree. ``tree`` is bound at :data:`MOUNT`; ``python`` and ``library_path`` are as the sandbox sees them."""

    folder: Path
    python: str
    library_path: str | None

    @property
    def tree(self) -> Path:
        """What is bound into the sandbox."""
        return self.folder / "rt"


def machine_paths() -> list[str]:
    """Return the paths of this machine that no file in a sandbox may hold, longest first.

    The system's own directories (``/usr``, ``/root``) are no secret, and neither are names as short as words.
    """
    candidates = {
        sys.prefix,
        sys.base_prefix,
        str(_server_source().parent.parent),
        str(state_dir()),
        os.path.expanduser("~"),  # noqa: PTH111 - Path's raises where there is none
    }
    candidates |= {os.path.realpath(path) for path in candidates}
    found = {path for path in candidates - {"/root"} if len(path) >= _SHORTEST and not path.startswith(("/usr", "~"))}
    return sorted(found, key=lambda path: (-len(path), path))  # the same each time: the name of the runtime depends on it


def is_staged() -> bool:
    """Whether :func:`stage` has nothing to do."""
    return any((_folder(own_interpreter=own) / _RECORD).is_file() for own in (False, True))


def stage(*, own_interpreter: bool = False) -> Runtime:
    """Return the runtime for this installation, staged now if it is not there yet (a few seconds, once).

    The system's interpreter is used if it has the version for which the libraries were built and can load them, else the
    running one is copied (``own_interpreter`` asks for that). Raises StagingFailed.
    """
    own_interpreter = own_interpreter or not _SYSTEM_PYTHON.is_file() or bool(sys.abiflags)
    folder = _folder(own_interpreter=own_interpreter)
    try:
        if not (folder / _RECORD).is_file():
            try:
                _stage_at(folder, None if own_interpreter else _SYSTEM_PYTHON)
            except StagingFailed:
                if own_interpreter:
                    raise
                return stage(own_interpreter=True)
        kept = json.loads((folder / _RECORD).read_bytes())
    except OSError as error:
        msg = f"{error.filename or folder}: cannot stage the sandbox's runtime ({error.strerror})"
        raise StagingFailed(msg) from error
    return Runtime(folder, kept["python"], kept["library_path"])


def discard_unused(in_use: set[str]) -> None:
    """Remove staged trees whose folder name is not in ``in_use`` (they belong to versions that are gone)."""
    for folder in state_dir("runtime").iterdir():
        if folder.name not in in_use:
            shutil.rmtree(folder, ignore_errors=True)


def _server_source() -> Path:
    spec = importlib.util.find_spec("asp.server")
    if spec is None or spec.origin is None:
        msg = "asp.server is not installed; reinstall asp-agent"
        raise StagingFailed(msg)
    return Path(spec.origin)


def _folder(*, own_interpreter: bool) -> Path:
    parts = [
        _LAYOUT, sys.version, os.uname().machine, sys.base_prefix, str(own_interpreter),
        *(f"{name} {importlib.metadata.version(name)}" for name in _DISTRIBUTIONS),
        *machine_paths(),
    ]  # fmt: skip
    digest = hashlib.sha256("\0".join(parts).encode() + _server_source().read_bytes()).hexdigest()
    return state_dir("runtime") / digest[:32]


def _stage_at(folder: Path, system_python: Path | None) -> None:
    """Fill ``folder`` by way of a temporary one beside it."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    tree = temporary / "rt"
    try:
        temporary.mkdir()
        tree.mkdir()
        tree.chmod(0o755)  # read by the sandbox's user; the folders above it are 0700
        neutral = _neutral_paths()
        _copy_file(_server_source(), tree / SERVER.name, neutral)
        for name in _PACKAGES:
            _copy_package(name, tree / LIBRARIES.name, neutral)
        if system_python is not None:
            python, library_path = str(system_python), None
            loaded = _probe([python], tree / LIBRARIES.name, {})
        else:
            python, library_path = _copy_interpreter(tree, neutral)
            staged = str(tree / PurePosixPath(python).relative_to(MOUNT))
            staged_libraries = {"LD_LIBRARY_PATH": str(tree / INTERPRETER_PREFIX.name / "lib")}
            loaded = _probe([staged], tree / LIBRARIES.name, staged_libraries)
        _compile(loaded["files"], tree)
        (temporary / _RECORD).write_text(json.dumps({"python": python, "library_path": library_path}))
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / _RECORD).is_file():  # else somebody staged the same bytes first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _neutral_paths() -> Replacements:
    """Return pairs of equal length: a path of this machine as a pattern, and what stands in its place (slashes pad).

    The last name of the interpreter's prefix stays (``3.11.7``): linkers keep one copy of strings with a common end, and
    in a Python built by pyenv the version that ``sys.version`` begins with *is* the end of the prefix [ran].
    """
    pairs: Replacements = []
    for path in map(os.fsencode, machine_paths()):
        end = b"/" + path.rpartition(b"/")[2] if path == os.fsencode(sys.base_prefix) else b""
        start = next(place for place in (bytes(MOUNT), b"/tmp", b"") if len(place) + len(end) <= len(path))
        # Whole names only: /src/app is not in /src/apple. What is before it tells nothing (-L/src/app), except that
        # a path of one name, /app, would be found in every other path with that name in it.
        before = rb"(?<![\w.-])" if path.count(b"/") == 1 else b""
        pattern = re.compile(before + re.escape(path) + rb"(?![\w.-])")
        pairs.append((pattern, start.ljust(len(path) - len(end), b"/") + end))
    return pairs


def _copy_file(source: Path, target: Path, neutral: Replacements) -> None:
    data = source.read_bytes()
    for pattern, replacement in neutral:
        data = pattern.sub(replacement, data)
    target.write_bytes(data)
    target.chmod(0o755 if source.stat().st_mode & 0o111 else 0o644)


def _copy_tree(source: Path, target: Path, neutral: Replacements, left_out: frozenset[str]) -> None:
    _make_folder(target)
    for entry in sorted(source.iterdir()):
        if entry.name in left_out or entry.name.startswith("config-"):
            continue
        if entry.is_dir():
            _copy_tree(entry, target / entry.name, neutral, left_out)
        elif entry.is_file() and entry.suffix in {".py", ".so"}:
            _copy_file(entry, target / entry.name, neutral)


def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)


def _copy_package(name: str, libraries: Path, neutral: Replacements) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        msg = f"the Python package {name} is not installed; reinstall asp-agent"
        raise StagingFailed(msg)
    _make_folder(libraries)
    origin = Path(spec.origin)
    if spec.submodule_search_locations:
        _copy_tree(origin.parent, libraries / name, neutral, frozenset({"__pycache__"}))
    else:
        _copy_file(origin, libraries / origin.name, neutral)


def _copy_interpreter(tree: Path, neutral: Replacements) -> tuple[str, str]:
    """Copy the running interpreter, its standard library and the shared libraries it loads from outside the system.

    Returns its path and its library path, both as the sandbox sees them.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}"
    prefix = tree / INTERPRETER_PREFIX.name
    for folder in (prefix, prefix / "bin", prefix / "lib"):
        _make_folder(folder)
    executable = Path(sys.executable).resolve()
    standard_library = Path(os.__file__).resolve().parent
    _copy_file(executable, prefix / "bin" / version, neutral)
    _copy_tree(standard_library, prefix / "lib" / standard_library.name, neutral, _LEFT_OUT_OF_THE_STANDARD_LIBRARY)
    for mapped in _probe([str(executable)], tree / LIBRARIES.name, {})["mapped"]:
        path = Path(mapped)
        system = mapped.startswith(("/usr/", "/lib", "/bin/")) and not mapped.startswith("/usr/local/")
        inside = path.is_relative_to(tree) or path.is_relative_to(standard_library) or path == executable
        if not system and not inside and ".so" in path.name and path.is_file():
            _copy_file(path, prefix / "lib" / path.name, neutral)
    return str(INTERPRETER_PREFIX / "bin" / version), str(INTERPRETER_PREFIX / "lib")


def _probe(python: list[str], libraries: Path, environment: dict[str, str]) -> dict[str, list[str]]:
    """Load what the server loads, with nothing of our environment. Raises StagingFailed if that is not possible."""
    try:
        done = subprocess.run(  # noqa: S603 - an interpreter that we chose
            [*python, "-I", "-S", "-B", "-c", _PROBE, str(libraries)],
            env=environment, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"{python[0]}: cannot be started for the sandbox ({error})"
        raise StagingFailed(msg) from error
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        msg = f"{python[0]}: cannot load the SSH server's libraries ({last})"
        raise StagingFailed(msg)
    loaded: dict[str, list[str]] = json.loads(done.stdout)
    return loaded


def _compile(files: list[str], tree: Path) -> None:
    """Compile the modules that a start loads: that halves it. The name kept in the code is the sandbox's, not ours."""
    for source in _below(files, tree):
        inside = MOUNT / source.relative_to(tree)
        try:
            made = py_compile.compile(
                str(source),
                dfile=str(inside),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
        except py_compile.PyCompileError as error:
            msg = f"{inside}: {error.msg}"
            raise StagingFailed(msg) from error
        if made:
            Path(made).chmod(0o644)
            Path(made).parent.chmod(0o755)


def _below(files: list[str], tree: Path) -> Iterator[Path]:
    for name in files:
        source = Path(name)
        if source.is_relative_to(tree):
            yield source
