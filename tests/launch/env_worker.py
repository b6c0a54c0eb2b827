# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A worker that writes its environment to `<$ENV_FOLDER>/<rank>.json`, and ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

if __name__ == "__main__":
    Path(os.environ["ENV_FOLDER"], f"{os.environ['RANK']}.json").write_text(
        json.dumps(dict(os.environ))
    )
