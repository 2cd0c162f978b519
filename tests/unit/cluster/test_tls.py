"""A certificate that cannot be used is refused by name: the field, the file, the remedy."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from certificates import Authority
from shoal.cluster.ingress.front import Front, install_front, read_front_spec
from shoal.cluster.ingress.tls import choose_name, load_installed, read_certificate
from shoal.errors import ConfigError


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_good_one_is_read_without_what_haproxy_would_stumble_over(authority: Authority, tmp_path: Path) -> None:
    files = authority.sign(names=("*.example", "models.example", "192.0.2.1"), days=10)
    chain = Path(files.certificate)
    chain.write_text(f"a comment\n\n{chain.read_text()}\n\n{authority.ca.read_text()}\n\n")
    found = read_certificate(files._replace(client_ca=str(authority.ca)), time.time())
    assert b"\n\n" not in found.pem + found.client_ca
    assert found.pem.count(b"BEGIN") == 3
    assert found.names == ("*.example", "models.example", "192.0.2.1")
    assert 8.9 < (found.not_after - time.time()) / 86_400 < 9
    folder = tmp_path / "ha"
    install_front(Front(pem=found.pem, client_ca=found.client_ca, spec="{a: 1}"), folder)
    assert load_installed(folder) == found
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert read_front_spec(folder) == "{a: 1}"
    install_front(Front(), folder)
    assert [path.name for path in folder.iterdir()] == ["front.json"]


@pytest.mark.parametrize(
    ("damage", "field", "problem"),
    [
        ("expired", "certificate", "has expired, on "),
        ("future", "certificate", "is not valid before "),
        ("no certificate", "certificate", "holds no certificate"),
        ("no file", "certificate", r"cannot be read \(No such file"),
        ("a folder", "key", r"cannot be read \(Is a directory"),
        ("another key", "key", "is not the key of the certificate in"),
        ("no key", "key", "holds no private key"),
        ("encrypted", "key", "is encrypted"),
        ("no authority", "client_ca", "holds no certificate"),
        ("many authorities", "client_ca", r"has \d+ bytes, and a running HAProxy takes 30720"),
    ],
)
def test_a_bad_one_is_refused_by_name(
    authority: Authority, tmp_path: Path, damage: str, field: str, problem: str
) -> None:
    files = authority.sign()._replace(client_ca=str(authority.ca))
    match damage:
        case "expired":
            authority.sign(begins_in_days=-3, days=2)
        case "future":
            authority.sign(begins_in_days=1)
        case "no file":
            Path(files.certificate).unlink()
        case "a folder":
            files = files._replace(key=str(tmp_path))
        case "another key":
            files = files._replace(key=authority.sign("other").key)
        case "many authorities":
            authority.ca.write_bytes(authority.ca.read_bytes() * 100)
        case "encrypted":
            encrypt(Path(files.key))
        case _:
            Path(getattr(files, field)).write_text("nothing")
    with pytest.raises(ConfigError) as caught:
        read_certificate(files, time.time())
    assert re.match(problem, caught.value.problem)
    assert (caught.value.field, caught.value.value) == (f"endpoint.tls.{field}", getattr(files, field))
    assert caught.value.remedy


def encrypt(path: Path) -> None:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))


@pytest.mark.parametrize(
    ("names", "host", "name"),
    [
        (("*.a", "b", "127.0.0.1"), "::", "b"),
        (("b", "127.0.0.1"), "127.0.0.1", "127.0.0.1"),
        ((), "192.0.2.1", "192.0.2.1"),
        (("*.a",), "192.0.2.1", "192.0.2.1"),
    ],
)
def test_the_name_in_an_address_is_one_that_the_certificate_is_for(
    names: tuple[str, ...], host: str, name: str
) -> None:
    assert choose_name(names, host) == name
