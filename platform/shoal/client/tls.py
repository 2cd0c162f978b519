"""The certificates that a client trusts, and its own. Opens no connection."""

from __future__ import annotations

import os
import ssl

from shoal.errors import ConfigError, needs_extra
from shoal.network_address import is_loopback

with needs_extra("client"):
    import httpx2

CA_VARIABLE, CERTIFICATE_VARIABLE = "SHOAL_CA", "SHOAL_CLIENT_CERTIFICATE"


def create_tls_context(host: str, ca: str = "", certificate: str = "") -> ssl.SSLContext:
    """The context for https at this host.

    ca:          a file of the authorities to trust; "": of $SHOAL_CA, else those of SSL_CERT_FILE and SSL_CERT_DIR for
                 other hosts, else the system's
    certificate: a file with this client's certificate and its key; "": of $SHOAL_CLIENT_CERTIFICATE, else none

    Raises ConfigError for a file that cannot be used.
    """
    ca, ca_field = (ca, "ca") if ca else (os.environ.get(CA_VARIABLE, ""), CA_VARIABLE)
    try:
        made = (
            ssl.create_default_context(cafile=ca) if ca else httpx2.create_ssl_context(trust_env=not is_loopback(host))
        )
    except OSError as error:
        if ca:
            remedy = "give a file of certificates in PEM"
            raise ConfigError(ca_field, ca, f"holds no authorities ({error})", remedy) from None
        names = "SSL_CERT_FILE, SSL_CERT_DIR"
        raise ConfigError("environment", names, f"have no certificates: {error}", "correct or unset them") from None
    own, field = (
        (certificate, "certificate")
        if certificate
        else (os.environ.get(CERTIFICATE_VARIABLE, ""), CERTIFICATE_VARIABLE)
    )
    if own:
        try:
            made.load_cert_chain(own, password=lambda: "")
        except OSError as error:
            remedy = "give a file in PEM with the certificate, and its key without a password"
            raise ConfigError(field, own, f"holds no certificate of a client ({error})", remedy) from None
    return made
