# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A fake worker that has imported torch, as real workers have, so that the zygote has it for all
forks.
"""

from __future__ import annotations

import torch.distributed  # noqa: F401
from fake_worker import main

if __name__ == "__main__":
    main()
