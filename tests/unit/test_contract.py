"""The contract: where it is found, which files are refused and why, and the vectors of schema/cases."""

import hashlib
import json
import os
import pwd
import re
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from asp.contract import (
    CONTRACT_NAME,
    MAX_CONTRACT_BYTES,
    Contract,
    Identity,
    effective_user,
    find,
    is_plain_account,
    load,
    local_user,
)
from asp.errors import ContractError, ContractInvalid, ContractMissing, ContractUnsafe, UsageError

ROOT = Path(__file__).parents[2]
CASES = ROOT / "schema" / "cases"
SCHEMA = json.loads((ROOT / "schema" / "asp.schema.json").read_text())
DOCUMENTS = json.loads((CASES / "documents.json").read_text())
RAW = json.loads((CASES / "raw.json").read_text())
DIFFERENCES = {entry["name"]: entry["kind"] for entry in json.loads((CASES / "differences.json").read_text())}
MINIMAL = b'{"version":"0","transport":"ssh","connection":{"host":"h"}}'
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ3w2nq0m2mYpPq6yV1s9G1dQbqY3nK6k1p9l1m1d8Qz"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a contract from bytes, text or fields of ``connection``."""

    def make(content: bytes | str | None = None, /, **connection: object) -> Path:
        path = tmp_path / CONTRACT_NAME
        if content is None:
            content = json.dumps({"version": "0", "transport": "ssh", "connection": {"host": "h", **connection}})
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(0o600)
        return path

    return make


def findings(path: Path) -> list[str]:
    """Return the findings of an invalid contract without the file's name in front."""
    with pytest.raises(ContractInvalid) as caught:
        load(path)
    assert str(caught.value).splitlines() == list(caught.value.findings)
    assert all(line.startswith(f"{path}: ") for line in caught.value.findings)
    return [line.removeprefix(f"{path}: ") for line in caught.value.findings]


def accepts(path: Path) -> bool:
    try:
        load(path)
    except ContractInvalid:
        return False
    return True


# --- vectors ---


@pytest.mark.parametrize("case", DOCUMENTS, ids=lambda case: case["name"])
def test_document_vector(case: dict[str, Any], write: Write) -> None:
    assert accepts(write(json.dumps(case["document"]))) is case["asp"], case["why"]


@pytest.mark.parametrize("case", RAW, ids=lambda case: case["name"])
def test_raw_vector(case: dict[str, Any], write: Write) -> None:
    assert accepts(write(case["text"])) is case["asp"], case["why"]


@pytest.mark.parametrize("case", DOCUMENTS, ids=lambda case: case["name"])
def test_the_schema_alone_gives_harbors_verdict(case: dict[str, Any]) -> None:
    """C1. The one exception cannot be said in JSON Schema: 22.0 is an integer there."""
    verdict = Draft202012Validator(SCHEMA).is_valid(case["document"])
    assert verdict is (case["harbor"] or case["name"] == "port-float-integral")


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$id"] == "urn:asp:schema:0"
    link = ROOT / "asp" / "asp.schema.json"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "schema" / "asp.schema.json"


def test_every_difference_has_a_name_and_every_name_a_case() -> None:
    used = set()
    for case in DOCUMENTS + RAW:
        name = case.get("difference")
        kind = DIFFERENCES[name] if name else None
        assert (case["harbor"] != case["asp"]) == (kind == "verdict"), case["name"]
        assert (case["asp"] and case.get("harbor_connect") is False) == (kind == "connect"), case["name"]
        assert kind in {None, "verdict", "connect", "meaning"}
        used.add(name)
    assert used - {None} == DIFFERENCES.keys()


def test_no_vector_is_lost() -> None:
    assert (len(DOCUMENTS), len(RAW)) == (93, 19)
    names = [case["name"] for case in DOCUMENTS + RAW]
    assert len(set(names)) == len(names)
    assert all(case["why"] for case in DOCUMENTS + RAW)


# --- what a contract means ---


def test_every_field(write: Write) -> None:
    path = write(
        json.dumps(
            {
                "version": "0",
                "transport": "ssh",
                "connection": {
                    "host": "Sandbox.Example",
                    "port": 2222,
                    "user": "root",
                    "identity": {"file": "k"},
                    "host_key": KEY,
                },
                "workspace": "/a//b/../c d",
            },
        ),
    )
    contract = load(path)
    assert contract == Contract(
        path=path,
        digest=contract.digest,
        host="Sandbox.Example",
        port=2222,
        user="root",
        identity=Identity(file="k"),
        host_key=KEY,
        workspace=PurePosixPath("/a/b/../c d"),
    )
    assert contract.endpoint == "Sandbox.Example:2222"
    assert contract.pinned is not None
    assert contract.pinned.line() == KEY


def test_defaults(write: Write) -> None:
    contract = load(write())
    assert (contract.port, contract.user, contract.identity, contract.host_key) == (22, None, None, None)
    assert contract.workspace == PurePosixPath("/")
    assert contract.pinned is None


@pytest.mark.parametrize(
    ("written", "host", "endpoint"),
    [("::1", "::1", "[::1]:22"), ("[::1]", "::1", "[::1]:22"), ("fe80::1%eth0", "fe80::1%eth0", "[fe80::1%eth0]:22")],
)
def test_ipv6_brackets_are_dropped(written: str, host: str, endpoint: str, write: Write) -> None:
    contract = load(write(host=written))
    assert (contract.host, contract.endpoint) == (host, endpoint)


@pytest.mark.parametrize(
    "host",
    ["[h]", "[]", "[", "::1]", "1.2.3.4%eth0", "fe80::1%", "fe80::1%a/b", "a" * 64, "a..b", "ä", "h:22", "a." * 130],
)
def test_hosts_that_are_none(host: str, write: Write) -> None:
    (line,) = findings(write(host=host))
    assert line.startswith("connection.host: is neither")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "h.", "a" * 63, "1.2.3.4", "my_host.local", "0"])
def test_hosts_that_are_some(host: str, write: Write) -> None:
    assert load(write(host=host)).host == host


def test_digest_is_that_of_the_exact_bytes(write: Write) -> None:
    for data in (MINIMAL, MINIMAL + b"\n"):
        assert load(write(data)).digest == hashlib.sha256(data).hexdigest()


def test_user_and_identity_are_not_in_the_repr(write: Write) -> None:
    contract = load(write(user="tok_SECRET123", identity={"env": "SECRET_VAR"}))
    assert "SECRET" not in repr(contract)
    assert "SECRET" not in repr(contract.identity)


def test_local_user_is_asked_of_the_user_database(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "somebody-else")
    monkeypatch.setenv("LOGNAME", "somebody-else")
    assert local_user() == pwd.getpwuid(os.getuid()).pw_name
    assert effective_user(load(write())) == local_user()
    assert effective_user(load(write(user="tok"))) == "tok"


def test_local_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_294_967_000)
    with pytest.raises(UsageError, match=r"write connection\.user"):
        local_user()


@pytest.mark.parametrize(
    ("name", "plain"),
    [("root", True), ("_x-1", True), ("Root", False), ("a b", False), ("", False), ("a" * 32, True), ("a" * 33, False)],
)
def test_plain_account(name: str, plain: bool) -> None:
    assert is_plain_account(name) is plain
    assert not is_plain_account(name + "\n")


# --- findings ---


def test_every_fault_is_found_at_once(write: Write) -> None:
    connection = {"port": "22", "proxyCommand": "nc", "user": 7}
    document = {"version": "1", "transport": None, "connection": connection, "workspace": "w"}
    assert findings(write(json.dumps(document))) == [
        'version: is "1", and this program knows only "0"; write "version": "0"',
        'transport: is null, and this program knows only "ssh"; write "transport": "ssh"',
        "connection.host: is missing; write a host name or an IP address alone, without user and port",
        (
            "connection.port: is a text, not a whole number; "
            "write a whole number from 1 to 65535, without quotes, or leave it out for 22"
        ),
        "connection.user: is a number, not a text; write the login name, or leave it out for the name of your local account",
        (
            'workspace: is not an absolute path; write an absolute path in the sandbox, such as "/workspace", '
            'or leave it out for "/"'
        ),
        "connection.proxyCommand: is not a field of version 0; remove it",
    ]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("hostKey", "did you mean connection.host_key?"),
        ("host-key", "did you mean connection.host_key?"),
        ("workDir", "did you mean workspace?"),
        ("identity_file", "did you mean connection.identity?"),
        ("workspace", "did you mean workspace?"),
        ("", "remove it"),
        ("command", "remove it"),
    ],
)
def test_unknown_field_hints(key: str, hint: str, write: Write) -> None:
    (line,) = findings(write(**{key: "x"}))
    assert line.endswith(f"is not a field of version 0; {hint}")


@pytest.mark.parametrize("port", [0, -1, 65536, 70000, 10**30, 22.0, 22.5, 1e999, True, "22", [], {}])
def test_one_finding_for_a_port(port: object, write: Write) -> None:
    (line,) = findings(write(port=port))
    assert line.startswith("connection.port: is ")


@pytest.mark.parametrize(
    ("identity", "field"),
    [
        ({}, "connection.identity"),
        ({"file": "a", "env": "B"}, "connection.identity"),
        ({"file": "a", "passphrase": "x"}, "connection.identity.passphrase"),
        ({"key": "x"}, "connection.identity.key"),
        ({"file": {}}, "connection.identity.file"),
        ({"env": "$X"}, "connection.identity.env"),
        ({"file": "a\0b"}, "connection.identity.file"),
        ("k", "connection.identity"),
    ],
)
def test_one_finding_for_an_identity(identity: object, field: str, write: Write) -> None:
    (line,) = findings(write(identity=identity))
    assert line.startswith(f"{field}: ")


@pytest.mark.parametrize(
    "connection",
    [
        {"user": "tok_SECRET\n"},
        {"user": ["tok_SECRET"]},
        {"user": {"tok_SECRET": 1}},
        {"user": "tok_SECRET\ud800"},
        {"identity": {"env": "-----BEGIN SECRET"}},
        {"identity": {"file": "-----BEGIN SECRET"}},
        {"identity": {"file": ["SECRET"]}},
        {"identity": "SECRET"},
        {"identity": {"file": "SECRET", "env": "SECRET"}},
        {"host": "tok_SECRET@h"},
        {"host_key": "-----BEGIN SECRET"},
    ],
)
def test_findings_show_no_secret(connection: dict[str, object], write: Write) -> None:
    assert "SECRET" not in "".join(findings(write(**connection)))


def test_foreign_text_in_findings_is_made_safe(write: Write) -> None:
    name = "\x1b]0;owned\x07\u202e" + "x" * 10_000
    document = {"version": name, "transport": "ssh", "connection": {"host": "h", name: 1}}
    text = "".join(findings(write(json.dumps(document))))
    assert "^[]0;owned^G<U+202E>" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert len(text) < 1000


def test_the_path_in_findings_is_made_safe(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[31m\nb"
    folder.mkdir()
    path = folder / CONTRACT_NAME
    path.write_text("x")
    path.chmod(0o600)
    with pytest.raises(ContractInvalid) as caught:
        load(path)
    assert len(caught.value.findings) == len(str(caught.value).splitlines()) == 1
    assert "\x1b" not in str(caught.value)


def test_thousands_of_faults_are_cut(write: Write) -> None:
    lines = findings(write(**{f"k{number}": 1 for number in range(5000)}))
    assert len(lines) == 21
    assert lines[-1] == "(file): has 4980 more faults; mend these first"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"a": "\xff"}', "byte 8 is not UTF-8"),
        ("{}".encode("utf-16"), "byte 1 is not UTF-8"),
        (b'{"version": "0",}', "line 1 column 17: not JSON"),
        (b"{}{}", "line 1 column 3: not JSON"),
        (b'{"a": "\n"}', "line 1 column 8: not JSON"),
        (b"[" * 200_000, "levels deep"),
        (b"[" * 20 + b"]" * 20, "levels deep"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "levels deep"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "too many digits"),
        (b'{"version": "0", "version": "0"}', "version: is written more than once"),
        (b'{"connection": {"host": "h", "\\u0068ost": "h"}}', "connection.host: is written more than once"),
    ],
    ids=range(14),
)
def test_files_that_are_not_one_strict_json_text(content: bytes, said: str, write: Write) -> None:
    (line,) = findings(write(content))
    assert said in line


def test_a_repeated_key_among_very_many_is_found_quickly(write: Write) -> None:
    text = "{" + ",".join(f'"{number}":1' for number in range(60_000)) + ',"1":1}'
    assert findings(write(text)) == ["1: is written more than once; keep one"]


def test_size_limit(write: Write) -> None:
    assert load(write(MINIMAL.ljust(MAX_CONTRACT_BYTES))).host == "h"
    (line,) = findings(write(MINIMAL.ljust(MAX_CONTRACT_BYTES + 1)))
    assert line == "(file): is larger than 1 MiB; a contract has a dozen lines"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["host", "port", "file", "x"]) | st.text(), inner, max_size=4)
    ),
    max_leaves=8,
)
CONTRACTS = st.fixed_dictionaries(
    {},
    optional={
        "version": st.just("0") | JSON,
        "transport": st.just("ssh") | JSON,
        "connection": JSON
        | st.fixed_dictionaries(
            {"host": st.just("h") | st.text()},
            optional={
                "port": st.integers(0, 70_000) | JSON,
                "user": st.text() | JSON,
                "identity": st.fixed_dictionaries({}, optional={"file": st.text(), "env": st.text()}) | JSON,
                "host_key": st.just(KEY) | st.text() | JSON,
            },
        ),
        "workspace": st.text().map(lambda text: "/" + text) | JSON,
        "other": JSON,
    },
)


def load_bytes(data: bytes) -> Contract | None:
    """Return the contract in ``data`` or None; every other failure than ContractError comes through."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CONTRACT_NAME
        path.write_bytes(data)
        path.chmod(0o600)
        try:
            return load(path)
        except ContractError as error:
            assert "\x1b" not in str(error)
            return None


@given(CONTRACTS | JSON)
def test_no_document_raises_anything_but_contract_error(document: object) -> None:
    contract = load_bytes(json.dumps(document).encode())
    if contract is None:
        return
    assert Draft202012Validator(SCHEMA).is_valid(document)
    assert isinstance(contract.port, int)
    assert not re.search("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", f"{contract.host}{contract.user}{contract.workspace}")


@given(st.binary(max_size=200))
@example(b"\x80\x02")
@example(b'"\\ud800"')
def test_no_bytes_raise_anything_but_contract_error(data: bytes) -> None:
    load_bytes(data)


# --- whose file (C3) ---


def test_a_symbolic_link_is_refused(tmp_path: Path, write: Write) -> None:
    real = write()
    link = tmp_path / "link.json"
    link.symlink_to(real)
    with pytest.raises(ContractUnsafe, match="symbolic link"):
        load(link)


def test_a_link_in_the_folders_is_resolved(tmp_path: Path, write: Write) -> None:
    real = write()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "up").symlink_to("..")
    assert load(tmp_path / "sub" / "up" / CONTRACT_NAME).path == real


@pytest.mark.timeout(5)
def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / CONTRACT_NAME
    os.mkfifo(path, 0o600)
    with pytest.raises(ContractUnsafe, match="FIFO"):
        load(path)


@pytest.mark.timeout(5)
def test_a_fifo_that_takes_the_place_after_the_first_look_is_refused(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    regular = path.lstat()
    path.unlink()
    os.mkfifo(path, 0o600)
    monkeypatch.setattr(Path, "lstat", lambda _: regular)
    with pytest.raises(ContractUnsafe, match="FIFO"):
        load(path)


def test_a_link_that_takes_the_place_after_the_first_look_is_refused(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    regular = path.lstat()
    path.rename(tmp_path / "real.json")
    path.symlink_to("real.json")
    monkeypatch.setattr(Path, "lstat", lambda _: regular)
    with pytest.raises(ContractUnsafe, match="cannot be read"):
        load(path)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONTRACT_NAME).mkdir()
    with pytest.raises(ContractUnsafe, match="is a directory"):
        load(tmp_path / CONTRACT_NAME)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o777])
def test_a_file_that_others_can_write_is_refused_with_the_line_to_type(mode: int, write: Write) -> None:
    path = write()
    path.chmod(mode)
    with pytest.raises(ContractUnsafe, match=re.escape(f"type: chmod go-w {path}")):
        load(path)
    path.chmod(mode & ~0o022)
    assert load(path).host == "h"


@needs_root
def test_a_file_of_another_user_is_refused(write: Write) -> None:
    path = write()
    os.chown(path, 12345, -1)
    with pytest.raises(ContractUnsafe, match="belongs to user id 12345"):
        load(path)


@needs_root
def test_a_file_of_root_is_accepted_from_others(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert load(path).host == "h"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ContractMissing, match="asp-sandbox up local"):
        load(tmp_path / CONTRACT_NAME)


@pytest.mark.parametrize("name", ["a\0b", "\0/x", "x" * 5000, "\udcff"])
def test_impossible_paths(name: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, ContractMissing, ContractUnsafe)):
        load(tmp_path / name)
    with pytest.raises(UsageError):
        find(tmp_path / name)


# --- find (C2) ---


def test_nothing_found_names_the_line_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ContractMissing, match=r"no \.asp\.json in .*; make .*: asp-sandbox up local"):
        find(tmp_path)


def test_find_follows_the_resolved_directory_not_the_link(tmp_path: Path, write: Write) -> None:
    outer = write()
    project = tmp_path / "project"
    (project / "deep").mkdir(parents=True)
    inner = project / CONTRACT_NAME
    inner.write_text("not even JSON")
    (tmp_path / "link").symlink_to(project / "deep")
    assert find(tmp_path / "link") == inner
    assert find(tmp_path) == outer


@pytest.mark.parametrize("kind", ["invalid", "dangling link", "directory", "fifo"])
def test_the_nearest_is_never_skipped(kind: str, tmp_path: Path, write: Write) -> None:
    write()
    folder = tmp_path / "project" / "deep"
    folder.mkdir(parents=True)
    nearest = tmp_path / "project" / CONTRACT_NAME
    match kind:
        case "invalid":
            nearest.write_text("{")
            nearest.chmod(0o600)
        case "dangling link":
            nearest.symlink_to("nowhere")
        case "directory":
            nearest.mkdir()
        case _:
            os.mkfifo(nearest)
    assert find(folder) == nearest
    with pytest.raises((ContractInvalid, ContractUnsafe)):
        load(nearest)


def test_find_from_a_file_looks_beside_it(write: Write) -> None:
    path = write()
    assert find(path) == path


def test_find_in_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError):
        find(Path())
    with pytest.raises((UsageError, ContractMissing)):
        load(Path(CONTRACT_NAME))


def test_find_in_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UsageError):
        find(tmp_path / "a")


def test_a_folder_that_cannot_be_entered_stops_the_search(tmp_path: Path, write: Write) -> None:
    write()
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o600)
    if os.access(closed, os.X_OK):
        pytest.skip("this user, such as root, can enter every folder")
    with pytest.raises((ContractUnsafe, UsageError)):
        find(closed)


@given(st.lists(st.sampled_from("abc"), max_size=6), st.sets(st.integers(0, 6)))
def test_find_on_random_trees(parts: list[str], places: set[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name).resolve()]
        for part in parts:
            folders.append(folders[-1] / part)
            folders[-1].mkdir()
        holding = [folder for depth, folder in enumerate(folders) if depth in places]
        for folder in holding:
            (folder / CONTRACT_NAME).touch()
        if holding:
            assert find(folders[-1]) == holding[-1] / CONTRACT_NAME
        else:
            with pytest.raises(ContractMissing):
                find(folders[-1])
