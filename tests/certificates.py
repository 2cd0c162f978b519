"""Certificates for tests: an authority, and what it signs."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.cluster.ingress.front import CertificateFiles

HERE = ("localhost", "127.0.0.1", "::1")


class Authority:
    """Signs certificates into `folder`. `ca`: its own certificate's file."""

    def __init__(self, folder: Path, name: str = "tests") -> None:
        self._folder = folder
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _name(name)
        self.ca = folder / f"{name}-ca.pem"
        own = self._build(self._name, self._key, [], datetime.now(UTC) - timedelta(days=400), 800, is_ca=True)
        self.ca.write_bytes(own)

    def sign(
        self, name: str = "server", names: tuple[str, ...] = HERE, begins_in_days: float = -1, days: float = 30
    ) -> CertificateFiles:
        """Make NAME.pem and NAME.key, over those that are there."""
        key = ec.generate_private_key(ec.SECP256R1())
        begin = datetime.now(UTC) + timedelta(days=begins_in_days)
        certificate, private = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(self._build(_name(name), key, names, begin, days))
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return CertificateFiles(str(certificate), str(private))

    def _build(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: tuple[str, ...] | list[str],
        begin: datetime,
        days: float,
        is_ca: bool = False,
    ) -> bytes:
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=begin,
            not_valid_after=begin + timedelta(days=days),
        ).add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_alternative, names))), False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
