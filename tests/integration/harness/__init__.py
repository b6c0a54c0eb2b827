# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the integration tests run and check with: real worker processes, forked from one that has imported all."""
