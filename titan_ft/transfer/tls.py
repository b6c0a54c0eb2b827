# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""TLS for transfers (`transfer_tls`), so that nobody on the network can read the weights.

In a transfer, a group that lacks the state (the joiner) connects to a group that serves it (the
donor). Each rank of a donor makes a certificate of its own when it starts. No authority signs the
certificate, and it contains no name, so TLS alone does not show who has sent it. But both ends
prove afterwards that they know the run's token, and the proofs cover the certificate's fingerprint
(`wire.py`). So a stranger without the token cannot use a certificate of his own.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import subprocess
import tempfile
from dataclasses import dataclass

from titan_ft.system.text import printable

_COMMAND = (
    *(
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ),
    *("-days", "3650", "-subj", "/CN=titan_ft", "-keyout", "-", "-out", "-"),
)
"""Prints a private key and its certificate. Python's standard library cannot make these."""
_COMMAND_SECONDS = 30.0
_MAX_LETTERS = 500  # longest part of openssl's output that an error repeats

CLOSED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""Errors of TLS if the other end has closed the connection. Other errors mean that it speaks
another protocol."""


@dataclass(frozen=True)
class Certificate:
    """A donor's certificate.

    Attributes:
        context: contains the private key and the certificate.
        fingerprint: SHA-256 of the certificate, in hex.
    """

    context: ssl.SSLContext
    fingerprint: str

    @classmethod
    def make(cls) -> Certificate:
        """Make a certificate with the command openssl.

        Raises:
            OSError: openssl is missing, or fails.
        """
        try:
            process = subprocess.run(
                _COMMAND,
                capture_output=True,
                check=True,
                timeout=_COMMAND_SECONDS,
            )
        except subprocess.CalledProcessError as error:
            # Repeat openssl's own output. Only it says, for example, which configuration of openssl
            # cannot be read.
            output = " ".join(error.stderr.decode(errors="replace").split())
            reason = printable(output, _MAX_LETTERS)
            text = f"openssl ended with status {error.returncode}: {reason}"
            raise OSError(text) from error
        except subprocess.SubprocessError as error:
            raise OSError(f"{error}") from error
        pem = process.stdout  # the private key, then the certificate
        context = _make_context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no joiner resumes a session
        # Python loads a private key from a file only. Only this user can read the file.
        with tempfile.NamedTemporaryFile() as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(file.name)
        _, header, rest = pem.decode().partition("-----BEGIN CERTIFICATE-----")
        return cls(context, _digest(ssl.PEM_cert_to_DER_cert(header + rest.strip())))

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """Start TLS as the donor. Use the returned connection from now on."""
        return self.context.wrap_socket(connection, server_side=True)


def connect(connection: socket.socket) -> tuple[ssl.SSLSocket, str]:
    """Start TLS as the joiner.

    Returns:
        The connection to use from now on, and the fingerprint of the donor's certificate.

    Raises:
        ConnectionError: the donor has no certificate.
    """
    context = _make_context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the proofs of the handshake cover the fingerprint
    secured = context.wrap_socket(connection)
    certificate = secured.getpeercert(binary_form=True)
    if certificate is None:
        with contextlib.closing(secured):
            raise ConnectionError("the donor has shown no certificate")
    return secured, _digest(certificate)


def _make_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _digest(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()
