# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Addresses as text."""

from __future__ import annotations

import pytest

from titan_ft.run.address import join_address, split_address


@pytest.mark.parametrize(("host", "text"), [("10.0.0.1", "10.0.0.1:80"), ("fe80::1", "[fe80::1]:80"), ("n1", "n1:80")])
def test_an_address_is_what_it_was_made_of(host: str, text: str) -> None:
    """IPv6 stands in brackets, also behind http:// and before a slash."""
    assert join_address(host, 80) == text
    assert split_address(text) == split_address(f"http://{text}/") == (host, 80)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:+80", "host:8_0", "host: 80", "host:80a"])
def test_a_port_is_a_plain_number(text: str) -> None:
    """What int() would take, or guess, is refused all the same."""
    with pytest.raises(ValueError, match="has no port"):
        split_address(text)
