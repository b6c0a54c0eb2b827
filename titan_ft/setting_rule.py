# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One rule about a setting, as the generators of rules yield it.

Rules come from generators, so that a rule may rely on the rules before it: the check stops at the
first rule that does not hold. `titan_ft.config.check_rules` is that check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SettingRule:
    """One rule about a setting, with all parts of the error's line.

    Attributes:
        holds: the setting obeys the rule.
        field: full name of the setting, such as "training.seq_len".
        rule: the rest of a sentence that begins with the field, such as "must be >= 1".
        value: the setting's value.
        remedy: the action that mends the setting.
    """

    holds: bool
    field: str
    rule: str
    value: Any
    remedy: str

    def describe(self) -> str:
        """Return the error's line: field, rule, value, remedy."""
        return f"{self.field} {self.rule}, got {self.value!r}; {self.remedy}"
