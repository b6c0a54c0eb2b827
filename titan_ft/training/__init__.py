# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What faces torchtitan besides its trainer: the worker, the train spec, loaders, checkpoints, the step's log."""
