# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Addresses as text, host:port; a numeric host of IPv6 stands in brackets."""

from __future__ import annotations


def bracketed(host: str) -> str:
    """Return a host as addresses have it."""
    return f"[{host}]" if ":" in host else host


def join_address(host: str, port: int) -> str:
    """Return host:port."""
    return f"{bracketed(host)}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of host:port or http://host:port.

    Raises:
        ValueError: the port is no number.
    """
    host, _, port = address.split("//", 1)[-1].rstrip("/").rpartition(":")
    if not port.isdecimal():  # int() takes "+1", " 1" and "1_0" as well
        raise ValueError(f"{address!r} has no port")
    return host.strip("[]"), int(port)
