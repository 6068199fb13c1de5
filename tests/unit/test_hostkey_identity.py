"""Pinned host keys (C6, P53-P55) and private keys (C5, P56-P58). asyncssh makes the keys and judges the results."""

import base64
import json
import os
import struct
from pathlib import Path

import asyncssh
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asp import hostkey
from asp.contract import CONTRACT_NAME, Contract, Identity, load
from asp.errors import HostKeyError, IdentityError
from asp.identity import identity_path, load_identity, redaction_values

TYPES = ["ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa"]
KEYS = {name: asyncssh.generate_private_key(name, "box@host") for name in TYPES}
ED25519 = KEYS["ssh-ed25519"]
LINE = ED25519.export_public_key().decode().strip()  # TYPE BASE64 COMMENT
TYPE, BASE64, _ = LINE.split()


# --- host keys ---


@pytest.mark.parametrize("name", TYPES)
def test_a_pub_line_of_every_type(name: str) -> None:
    line = KEYS[name].export_public_key().decode()
    for text in (line, line.strip(), " ".join(line.split()[:2]), f"  {line}  ", line.strip() + " two words"):
        key = hostkey.parse(text)
        assert key.algorithm == name
        assert key.blob == KEYS[name].public_data
        assert key.fingerprint() == KEYS[name].get_fingerprint()
        assert key.line() == " ".join(line.split()[:2])


def test_the_pin_limits_the_algorithms() -> None:
    assert hostkey.parse(LINE).algorithms() == ("ssh-ed25519",)
    rsa = hostkey.parse(KEYS["ssh-rsa"].export_public_key().decode())
    assert rsa.algorithms() == ("rsa-sha2-512", "rsa-sha2-256")


def blob(*fields: bytes) -> str:
    return base64.b64encode(b"".join(struct.pack(">I", len(field)) + field for field in fields)).decode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("SHA256:abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG", "is a fingerprint"),
        ("MD5:" + ":".join(["0a"] * 16), "is a fingerprint"),
        (":".join(["0a"] * 16), "is a fingerprint"),
        ("256 SHA256:abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG root@h (ED25519)", "is a fingerprint"),
        (f"[127.0.0.1]:2222 {TYPE} {BASE64}", "is a known_hosts line"),
        (f"|1|abc=|def= {TYPE} {BASE64}", "is a known_hosts line"),
        (f"@cert-authority * {TYPE} {BASE64}", "is a known_hosts marker"),
        (f"@revoked * {TYPE} {BASE64}", "is a known_hosts marker"),
        (f"{TYPE} {BASE64}\n{TYPE} {BASE64}", "more than one line"),
        (f"{TYPE} {BASE64} {TYPE} {BASE64}", "holds several keys"),
        (f"{TYPE} {BASE64} x\x1b[0m", "control character"),
        (f"ssh-ed25519-cert-v01@openssh.com {BASE64}", "is a certificate"),
        (f"ssh-rsa {BASE64}", "says ssh-rsa, but its key is ssh-ed25519"),
        (f"{TYPE} " + blob(b"ssh-foo", b"x"), "its key is something else"),
        (BASE64, "lacks the type"),
        (TYPE, "has a type but no key"),
        (f"{TYPE} {BASE64[:-8]}", "damaged or cut off"),
        (f"{TYPE} {BASE64[:-3]}", "damaged or cut off"),
        (f"{TYPE} {BASE64}AAAA", "damaged or cut off"),
        (f"{TYPE} not~base64", "damaged or cut off"),
        (f"{TYPE} é", "damaged or cut off"),
        (f"{TYPE} AAAA", "damaged or cut off"),
        (f"{TYPE} " + blob(b"ssh-ed25519", b"x" * 31), "not a usable ssh-ed25519 key"),
        (f"{TYPE} " + blob(b"ssh-ed25519", b"x" * 32, b""), "not a usable ssh-ed25519 key"),
        ("ssh-rsa " + blob(b"ssh-rsa", b"", b""), "not a usable ssh-rsa key"),
        ("ssh-rsa " + blob(b"ssh-rsa", b"\x03", b"\x7f" * 64), "not a usable ssh-rsa key"),
        (
            "ecdsa-sha2-nistp256 " + blob(b"ecdsa-sha2-nistp256", b"nistp384", b"\x04" + b"x" * 64),
            "not a usable ecdsa-sha2-nistp256 key",
        ),
        (
            "ecdsa-sha2-nistp256 " + blob(b"ecdsa-sha2-nistp256", b"nistp256", b"\x02" + b"x" * 64),
            "not a usable ecdsa-sha2-nistp256 key",
        ),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "holds a key file"),
        ("ssh-dss AAAAB3NzaC1kc3M=", "does not begin with a known key type"),
        ("foo bar", "does not begin with a known key type"),
    ],
    ids=range(33),
)
def test_what_is_not_a_key_gets_its_own_hint(text: str, said: str) -> None:
    with pytest.raises(HostKeyError) as caught:
        hostkey.parse(text)
    message = str(caught.value)
    assert said in message
    assert "; " in message  # what to write instead
    assert len(message.splitlines()) == 1
    assert BASE64 not in message


@given(st.text() | st.builds("{} {}".format, st.sampled_from(TYPES), st.text()))
def test_no_text_raises_anything_but_host_key_error(text: str) -> None:
    with pytest.raises(HostKeyError):
        hostkey.parse(text)


@given(st.sampled_from(TYPES), st.binary(max_size=80))
def test_no_blob_raises_anything_but_host_key_error(name: str, rest: bytes) -> None:
    with pytest.raises(HostKeyError):
        hostkey.parse(f"{name} {base64.b64encode(struct.pack('>I', len(name)) + name.encode() + rest).decode()}")


@pytest.mark.parametrize(
    "host",
    [
        *["127.0.0.1", "127.9.9.9", "127.1", "2130706433", "0x7f000001", "0.0.0.0", "0"],
        *["::1", "::ffff:127.0.0.1", "::", "localhost", "LocalHost.", "a.localhost"],
    ],
)
def test_loopback_in_every_notation(host: str) -> None:
    assert hostkey.is_loopback(host)


@pytest.mark.parametrize("host", ["h", "10.0.0.1", "192.168.1.1", "::2", "fe80::1%lo", "localhost.example", "128.1"])
def test_not_loopback(host: str) -> None:
    assert not hostkey.is_loopback(host)


def test_a_mismatch_names_both_fingerprints_and_the_likely_cause() -> None:
    pin = hostkey.parse(LINE)
    text = str(hostkey.mismatch(pin, "SHA256:other\x1b[2J\nx", "127.0.0.1", 2222))
    assert pin.fingerprint() in text
    assert "SHA256:other^[[2J^Jx" in text
    assert text.startswith("127.0.0.1:2222: ")
    assert "the sandbox that had this port is probably gone" in text
    text = str(hostkey.mismatch(pin, "SHA256:other", "fe80::2", 22))
    assert text.startswith("[fe80::2]:22: ")
    assert "probably gone" not in text
    assert "connection.host_key" in text


def test_a_missing_pin_names_the_line_that_mends_it() -> None:
    text = str(hostkey.missing(Contract(Path("/x/.asp.json"), "0" * 64, "::1", 2222)))
    assert text.startswith("/x/.asp.json: connection.host_key: ")
    assert '"host_key": "TYPE BASE64"' in text
    assert "--accept-new" in text
    assert "[::1]:2222" in text


# --- identities ---


def contract(tmp_path: Path, **identity: str) -> Contract:
    path = tmp_path / CONTRACT_NAME
    path.write_text(
        json.dumps({"version": "0", "transport": "ssh", "connection": {"host": "h", "identity": identity}}),
    )
    path.chmod(0o600)
    return load(path)


def keep(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def pem(label: str, body: str) -> bytes:
    return f"-----BEGIN {label}-----\n{body}-----END {label}-----\n".encode()


def same_key(text: bytes | None, key: asyncssh.SSHKey = ED25519) -> bool:
    assert text is not None
    return asyncssh.import_private_key(text).public_data == key.public_data


def refused(contract: Contract) -> str:
    with pytest.raises(IdentityError) as caught:
        load_identity(contract)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_no_identity_is_no_key(tmp_path: Path) -> None:
    assert load_identity(Contract(tmp_path / CONTRACT_NAME, "0" * 64, "h")) is None


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in TYPES for form in ("openssh", "pkcs8-pem")]
    + [(name, "pkcs1-pem") for name in TYPES if name != "ssh-ed25519"],
)
def test_every_format_and_type(name: str, form: str, tmp_path: Path) -> None:
    keep(tmp_path / "id", KEYS[name].export_private_key(form))
    assert same_key(load_identity(contract(tmp_path, file="id")), KEYS[name])


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative ones start at the folder of .asp.json, wherever we run (C5); ``~`` is HOME; links are followed."""
    home = tmp_path / "user"
    home.mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path / "elsewhere")
    real = keep(home / "id", ED25519.export_private_key())
    (tmp_path / "link").symlink_to(real)
    for name in ("~/id", "user/id", "./elsewhere/../user/id", str(real), "link"):
        assert same_key(load_identity(contract(tmp_path, file=name)))
    assert identity_path(contract(tmp_path, file="user/id")) == real
    assert "no home directory" in refused(contract(tmp_path, file="~no-such-user-here/id"))


@pytest.mark.parametrize("form", ["pkcs1-pem", "pkcs8-pem"])
def test_an_encrypted_key_is_refused_without_asking(form: str, tmp_path: Path) -> None:
    keep(tmp_path / "id", KEYS["ssh-rsa"].export_private_key(form, passphrase="x" * 8))
    assert "is encrypted" in refused(contract(tmp_path, file="id"))


def test_an_encrypted_openssh_key_is_refused_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ssh-keygen -N writes it (OpenSSH PROTOCOL.key); asyncssh cannot write one without bcrypt."""
    fields = [b"aes256-ctr", b"bcrypt", struct.pack(">I", 16) + b"s" * 16 + struct.pack(">I", 24)]
    body = b"openssh-key-v1\0" + b"".join(struct.pack(">I", len(field)) + field for field in fields)
    body += struct.pack(">II", 1, len(ED25519.public_data)) + ED25519.public_data + struct.pack(">I", 160) + b"x" * 160
    text = pem("OPENSSH PRIVATE KEY", base64.encodebytes(body).decode())
    keep(tmp_path / "id", text)
    assert "is encrypted" in refused(contract(tmp_path, file="id"))
    monkeypatch.setenv("ASP_KEY", text.decode())
    assert "is encrypted" in refused(contract(tmp_path, env="ASP_KEY"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (LINE.encode(), "is a public key"),
        (ED25519.export_public_key("pkcs8-pem"), "is a public key"),
        (ED25519.export_public_key("rfc4716"), "first line must read"),
        (ED25519.export_private_key()[:150], "last line is missing"),
        (ED25519.export_private_key().replace(b"\n", b"\n!", 2), "damaged or cut off"),
        (pem("OPENSSH PRIVATE KEY", "AAAA\n"), "is not an OpenSSH key inside"),
        (pem("OPENSSH PRIVATE KEY", ""), "damaged or cut off"),
        (pem("DSA PRIVATE KEY", "AAAA\n"), "kind DSA PRIVATE KEY is not supported"),
        (b"PuTTY-User-Key-File-3: ssh-ed25519\n", "is a PuTTY key"),
        (base64.b64encode(ED25519.export_private_key()), "base64 once more"),
        (b"".join(ED25519.export_private_key().splitlines()[1:-1]), "lacks the first and the last line"),
        (b"x" * 70_000, "too large"),
        (b"\x00\xff\xfe", "is not a private key"),
    ],
    ids=range(14),
)
def test_a_file_that_is_no_key(data: bytes, said: str, tmp_path: Path) -> None:
    keep(tmp_path / "id", data)
    message = refused(contract(tmp_path, file="id"))
    assert message.startswith(f"{tmp_path}/id: ")
    assert said in message


def test_an_openssh_key_that_is_cut_inside(tmp_path: Path) -> None:
    lines = ED25519.export_private_key().splitlines()
    keep(tmp_path / "id", b"\n".join([*lines[:3], lines[-1]]))
    assert "damaged or cut off" in refused(contract(tmp_path, file="id"))


@pytest.mark.timeout(5)
def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "is a directory" in refused(contract(tmp_path, file="dir"))
    assert "is a FIFO, device or socket" in refused(contract(tmp_path, file="fifo"))
    assert "is a FIFO, device or socket" in refused(contract(tmp_path, file="/dev/null"))
    assert "no such key file" in refused(contract(tmp_path, file="missing"))
    assert "no such key file" in refused(contract(tmp_path, file="missing\u202e"))
    assert "cannot be read" in refused(contract(tmp_path, file="x" * 5000))


@pytest.mark.timeout(5)
def test_a_fifo_that_takes_the_place_after_the_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regular = keep(tmp_path / "id", b"").stat()
    (tmp_path / "id").unlink()
    os.mkfifo(tmp_path / "id", 0o600)
    target = contract(tmp_path, file="id")
    monkeypatch.setattr(Path, "stat", lambda _: regular)
    assert "is a FIFO, device or socket" in refused(target)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused_as_openssh_does(mode: int, tmp_path: Path) -> None:
    path = keep(tmp_path / "id", ED25519.export_private_key(), mode)
    message = refused(contract(tmp_path, file="id"))
    assert f"(mode {mode:04o}); type: chmod 600 {path}" in message
    path.chmod(0o400)
    if os.geteuid() == 0 or os.access(path, os.R_OK):
        assert same_key(load_identity(contract(tmp_path, file="id")))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_mode_of_a_key_of_somebody_else_is_theirs(tmp_path: Path) -> None:
    os.chown(keep(tmp_path / "id", ED25519.export_private_key(), 0o640), 12345, -1)
    assert same_key(load_identity(contract(tmp_path, file="id")))


TEXT = ED25519.export_private_key().decode()
ONE_LINE = TEXT.replace("\n", " ")
REPAIRED = {
    "as it is": TEXT,
    "no last newline": TEXT.rstrip("\n"),
    "CRLF": TEXT.replace("\n", "\r\n"),
    "CR": TEXT.replace("\n", "\r"),
    "backslash-n": TEXT.replace("\n", "\\n"),
    "backslash-r-n": TEXT.replace("\n", "\\r\\n"),
    "double quotes": f'"{TEXT}"',
    "single quotes, backslash-n": "'" + TEXT.replace("\n", "\\n") + "'",
    "indented": TEXT.replace("\n", "\n    "),
    "one line": ONE_LINE,
    "one line without blanks": TEXT.replace("\n", ""),
    "BOM": "\ufeff" + TEXT,
    "text around": f"a comment\n{TEXT}\nmore",
}


@pytest.mark.parametrize("value", REPAIRED.values(), ids=REPAIRED.keys())
def test_a_key_in_a_variable_is_repaired(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASP_KEY", value)
    assert load_identity(contract(tmp_path, env="ASP_KEY")) == TEXT.encode()
    keep(tmp_path / "id", value.encode())
    assert load_identity(contract(tmp_path, file="id")) == TEXT.encode()


def test_ec_parameters_before_the_key_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``openssl ecparam -genkey`` writes both blocks."""
    key = KEYS["ecdsa-sha2-nistp256"]
    parameters = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"
    monkeypatch.setenv("ASP_KEY", parameters + key.export_private_key("pkcs1-pem").decode())
    assert same_key(load_identity(contract(tmp_path, env="ASP_KEY")), key)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "is not set"),
        ("", "is empty"),
        ('""', "is empty"),
        (LINE, "is a public key"),
        ("SECRET", "is not a private key"),
        (TEXT[:-40], "last line is missing"),
        (TEXT.replace("AA", "\udcff"), "damaged or cut off"),
        ("{path}", "holds the path of a file"),
        ("~", "holds the path of a file"),
        ("~no-such-user-here/x", "is not a private key"),
        ("x" * 9000, "is not a private key"),
    ],
    ids=range(11),
)
def test_a_variable_that_holds_no_key(value: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep(tmp_path / "SECRET-path", b"")
    if value is None:
        monkeypatch.delenv("ASP_KEY", raising=False)
    else:
        monkeypatch.setenv("ASP_KEY", value.format(path=path) if "{" in value else value)
    message = refused(contract(tmp_path, env="ASP_KEY"))
    assert message.startswith("the variable ASP_KEY")
    assert said in message
    assert "SECRET" not in message
    assert BASE64 not in message
    assert TEXT[100:140] not in message


@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])))
def test_no_value_raises_anything_but_identity_error(value: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASP_KEY", f"-----BEGIN OPENSSH PRIVATE KEY-----{value}-----END OPENSSH PRIVATE KEY-----")
        refused(Contract(Path("/x/.asp.json"), "0" * 64, "h", identity=Identity(env="ASP_KEY")))


# --- redaction (L5, C7) ---


def test_redaction_covers_every_secret_line_and_no_public_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()
    for value in (TEXT, TEXT.replace("\n", "\\n"), ONE_LINE):
        monkeypatch.setenv("ASP_KEY", value)
        found = redaction_values(contract(tmp_path, env="ASP_KEY"))
        assert found == sorted(found, key=len, reverse=True)
        assert value.strip() in found
        assert TEXT.strip() in found
        lines = TEXT.splitlines()
        assert set(lines[2:-2]) <= set(found)
        assert lines[1] not in found  # the same in every key
        assert not any(secret in other for secret in found)
        assert not any(secret in LINE for secret in found)
        assert min(map(len, found)) >= 16  # the last line is a few characters, which other text may hold too


@pytest.mark.parametrize("form", ["openssh", "pkcs1-pem", "pkcs8-pem"])
def test_redaction_of_a_file(form: str, tmp_path: Path) -> None:
    text = KEYS["ssh-rsa"].export_private_key(form).decode()
    keep(tmp_path / "id", text.encode())
    found = redaction_values(contract(tmp_path, file="id"))
    assert text.strip() in found
    secret = [line for line in text.splitlines()[8:-1] if len(line) >= 16]
    assert secret
    assert set(secret) <= set(found)


def test_redaction_of_a_user(tmp_path: Path) -> None:
    def values(user: str | None) -> list[str]:
        return redaction_values(Contract(tmp_path / CONTRACT_NAME, "0" * 64, "h", user=user))

    assert values("tok_SECRET123") == ["tok_SECRET123"]
    assert values("root") == values("deploy-user") == values(None) == values("Root") == []


def test_redaction_of_a_key_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert redaction_values(contract(tmp_path, file="missing")) == []
    monkeypatch.setenv("ASP_KEY", "not-a-key-but-secret")
    assert redaction_values(contract(tmp_path, env="ASP_KEY")) == ["not-a-key-but-secret"]
