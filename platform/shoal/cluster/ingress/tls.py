"""The certificate of a front: read and checked before it is used, and replaced in running HAProxies.

A new one is written where HAProxy reads it when it starts, and then committed through the admin socket of each running
HAProxy: connections stay as they are, and new ones get the new certificate. `CertificateWatch` does so when the user's
files change, for the endpoint's controller on the head; `keep_certificate` does on other nodes. A replacement that does
not fit changes nothing: HAProxy keeps what it has, also when it restarts, since its files are copies. Imports no Ray.
"""

from __future__ import annotations

import fcntl
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from shoal.cluster.ingress.front import CERTIFICATE_FILE, CLIENT_CA_FILE, CertificateFiles, write_certificate
from shoal.cluster.ingress.shared_listener import ask_haproxy
from shoal.errors import ClusterError, ConfigError

MAX_CONTENT_BYTES = 30 * 1024  # of a file that a command on the admin socket replaces: below `tune.bufsize`
END = b"-----END CERTIFICATE-----\n"
DAY_S = 86_400.0
POLL_S = 2.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Certificate:
    """A certificate that a front can have.

    pem:       the certificate, its chain and its key, without blank lines
    client_ca: the authorities of clients' certificates; empty for none
    names:     DNS names and addresses that it is for, the first ones first
    not_after: the end of its validity, in seconds since the epoch
    """

    pem: bytes = field(repr=False)
    client_ca: bytes
    names: tuple[str, ...]
    not_after: float


def read_certificate(files: CertificateFiles, now: float) -> Certificate:
    """Read and check a certificate. Raises ConfigError with the field, the file and the remedy."""
    chain = _parse_chain("certificate", files.certificate)
    key = _parse_key(files.key)
    leaf = chain[0]
    if key.public_key() != leaf.public_key():
        problem = f"is not the key of the certificate in {files.certificate}"
        raise ConfigError("endpoint.tls.key", files.key, problem, "give the key with which it was requested")
    begin, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if not begin.timestamp() <= now < end.timestamp():
        problem = f"has expired, on {end:%Y-%m-%d %H:%M} UTC"
        if now < begin.timestamp():
            problem = f"is not valid before {begin:%Y-%m-%d %H:%M} UTC"
        raise ConfigError("endpoint.tls.certificate", files.certificate, problem, "renew it, or correct the clock")
    ca = b"".join(map(_encode, _parse_chain("client_ca", files.client_ca))) if files.client_ca else b""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = b"".join(map(_encode, chain)) + private
    for name, path, content in (("certificate", files.certificate, pem), ("client_ca", files.client_ca, ca)):
        if len(content) > MAX_CONTENT_BYTES:
            problem = f"has {len(content)} bytes, and a running HAProxy takes {MAX_CONTENT_BYTES}"
            raise ConfigError(f"endpoint.tls.{name}", path, problem, "leave out what is not needed")
    return _make(chain, pem, ca)


def load_installed(folder: Path) -> Certificate:
    """The certificate in the folder of HAProxy's files, which was checked when it was written there."""
    pem, ca = (folder / CERTIFICATE_FILE).read_bytes(), folder / CLIENT_CA_FILE
    return _make(x509.load_pem_x509_certificates(pem), pem, ca.read_bytes() if ca.exists() else b"")


def choose_name(names: tuple[str, ...], host: str) -> str:
    """The host of the endpoint's address: where it listens if the certificate is for that, else its first name."""
    return next((name for name in (*filter(host.__eq__, names), *names) if not name.startswith("*.")), host)


def install_certificate(new: Certificate, folder: Path) -> None:
    """Write the certificate for HAProxies that start, and give it to those that run on this host.

    Raises ClusterError when one does not take it; then the former one stays.
    """
    former = load_installed(folder)
    write_certificate(new.pem, new.client_ca, folder)
    try:
        for admin in _list_sockets(folder):
            _replace(admin, folder / CERTIFICATE_FILE, "cert", new.pem)
            if new.client_ca:
                _replace(admin, folder / CLIENT_CA_FILE, "ca-file", new.client_ca)
    except ClusterError:
        write_certificate(former.pem, former.client_ca, folder)
        raise


class CertificateWatch:
    """Watches the user's files. `poll` is called every few seconds, by one thread.

    problem: why the present files are not used; "" while they are
    """

    def __init__(self, files: CertificateFiles, folder: Path) -> None:
        self._files, self._folder = files, folder
        self.current = load_installed(folder)
        self.problem = self._suspected = ""

    @property
    def days_remaining(self) -> float:
        """Days until the certificate in use expires; below 0 after that."""
        return (self.current.not_after - time.time()) / DAY_S

    def poll(self) -> tuple[str, str] | None:
        """Use a valid replacement. Returns the kind of event and its reason; None when nothing has changed.

        Two polls must find the same problem: certificate and key are two files, replaced one after the other.
        """
        try:
            newest = read_certificate(self._files, time.time())
            is_new = (newest.pem, newest.client_ca) != (self.current.pem, self.current.client_ca)
            if is_new or not _is_in_use(newest, self._folder):
                install_certificate(newest, self._folder)
        except (ConfigError, ClusterError, OSError) as error:  # also a full disk: it is tried again
            before, self._suspected = self._suspected, str(error)
            if self._suspected != before or self._suspected == self.problem:
                return None
            self.problem = self._suspected
            return "certificate_rejected", f"{self.problem}; the former certificate stays in use"
        self.problem = self._suspected = ""
        self.current = newest
        return ("certificate_replaced", f"{self.days_remaining:.0f} days are left") if is_new else None


def keep_certificate(files: CertificateFiles, folder: Path) -> None:
    """Watch the files of this host for as long as this process lives, if no other process of the host does."""
    with (folder / "watch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the next process takes over when this one ends
        watch = CertificateWatch(files, folder)
        while True:
            if event := watch.poll():
                logger.warning("%s: %s", *event)
            time.sleep(POLL_S)


def _is_in_use(certificate: Certificate, folder: Path) -> bool:
    """Whether each HAProxy that runs on this host has the certificate and the authorities: one may have started during
    a replacement. Raises ClusterError when one does not answer."""
    leaf = certificate.pem[: certificate.pem.index(END) + len(END)]  # of the chain it shows no fingerprints
    wanted = {f"cert {folder / CERTIFICATE_FILE}": leaf}
    if certificate.client_ca:
        wanted[f"ca-file {folder / CLIENT_CA_FILE}"] = certificate.client_ca
    for admin in _list_sockets(folder):
        for name, content in wanted.items():
            shown = _command(admin, f"show ssl {name}")
            certificates = x509.load_pem_x509_certificates(content)
            fingerprints = [each.fingerprint(hashes.SHA1()).hex().upper() for each in certificates]  # HAProxy's form
            if shown and not all(each in shown for each in fingerprints):
                return False
    return True


def _list_sockets(folder: Path) -> list[Path]:
    """The admin sockets of this host's HAProxies: Serve has a folder for each node."""
    return sorted(folder.glob("*/a.sock"))


def _replace(admin: Path, file: Path, kind: str, content: bytes) -> None:
    answers = (
        _command(admin, f"set ssl {kind} {file} <<\n{content.decode()}"),
        _command(admin, f"commit ssl {kind} {file}"),
    )
    if any(answers) and "Success!" not in answers[1]:
        _command(admin, f"abort ssl {kind} {file}")
        raise ClusterError(f"HAProxy does not take {file.name}: {' '.join(' '.join(answers).split())}")


def _command(admin: Path, command: str) -> str:
    """The answer of HAProxy; "" when none runs there: it reads the files when it starts. Raises ClusterError."""
    try:
        return ask_haproxy(admin, command)
    except (FileNotFoundError, ConnectionRefusedError):
        return ""
    except OSError as error:
        raise ClusterError(f"HAProxy does not answer at {admin} ({error})") from None


def _parse_chain(field: str, path: str) -> list[x509.Certificate]:
    content = _read(field, path)
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        remedy = "give a file in PEM: -----BEGIN CERTIFICATE-----"
        raise ConfigError(f"endpoint.tls.{field}", path, f"holds no certificate ({error})", remedy) from None


def _parse_key(path: str) -> PrivateKeyTypes:
    content = _read("key", path)
    try:
        return serialization.load_pem_private_key(content, None)
    except TypeError:
        problem, remedy = "is encrypted", "decrypt it: openssl pkey -in FILE -out NEW"
    except (ValueError, UnsupportedAlgorithm) as error:
        problem, remedy = f"holds no private key ({error})", "give a file in PEM: -----BEGIN PRIVATE KEY-----"
    raise ConfigError("endpoint.tls.key", path, problem, remedy)


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name that no file has
        problem = getattr(error, "strerror", None) or str(error)
        remedy = "name a file on the host of the ingress that the user of the cluster may read"
        raise ConfigError(f"endpoint.tls.{field}", path, f"cannot be read ({problem})", remedy) from None


def _encode(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _make(chain: list[x509.Certificate], pem: bytes, client_ca: bytes) -> Certificate:
    leaf = chain[0]
    names: list[str] = []
    try:
        alternatives = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        pass
    else:
        names += alternatives.get_values_for_type(x509.DNSName)
        names += map(str, alternatives.get_values_for_type(x509.IPAddress))
    return Certificate(pem, client_ca, tuple(names), leaf.not_valid_after_utc.timestamp())
